"""Settings for all tests of core, and the fixtures that several files use."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for core/tests/support

from attnplug_testing.command import attnplug, package, plain_environment
from attnplug_testing.plugins import core_alone, install, install_source, only_fault
from attnplug_testing.triton_mode import settle_triton
from support.board import board

__all__ = ["attnplug", "board", "core_alone", "install", "install_source", "only_fault", "package", "plain_environment"]

settle_triton()

# Two test processes on two cores: one thread each is fastest.
torch.set_num_threads(1)

# A shared machine may stall any example for a second; slowness is measured in benchmarks/, not here.
settings.register_profile("attnplug", deadline=None, print_blob=True)
settings.load_profile("attnplug")
