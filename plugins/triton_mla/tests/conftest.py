"""Test configuration: import path of the helper modules in this folder, Triton mode, threads, hypothesis."""

import sys
from pathlib import Path

import torch

from attnplug_testing.triton_mode import settle_triton

sys.path.insert(0, str(Path(__file__).parent))

settle_triton()

# Two test processes on two cores: one thread each is fastest.
torch.set_num_threads(1)
