"""Lets the tests import what they share."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# Two test processes on two cores: one thread each is fastest.
torch.set_num_threads(1)
