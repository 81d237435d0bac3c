"""Settings for all tests of attnplug-tune, and the fixtures that they use."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for modules that test files share

from attnplug_testing.command import attnplug, package, plain_environment
from attnplug_testing.plugins import core_alone, install

__all__ = ["attnplug", "core_alone", "install", "package", "plain_environment"]

# Two test processes on two cores: one thread each is fastest.
torch.set_num_threads(1)
