"""Lets the tests of this plugin import what they share, and settles how they run."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# Read when a Triton kernel is defined: without a GPU it is interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Two test processes on two cores: one thread each is fastest.
torch.set_num_threads(1)
