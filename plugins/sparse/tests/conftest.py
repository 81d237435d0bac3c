"""Make the shared test modules of this package importable, and configure how tests run."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

from attnplug_testing.triton_mode import settle_triton

sys.path.insert(0, str(Path(__file__).parent))

settle_triton()

# Two test processes on two cores: one thread each is fastest.
torch.set_num_threads(1)

# A shared machine may stall any example for a second; slowness is measured in benchmarks/, not here.
settings.register_profile("attnplug", deadline=None, print_blob=True)
settings.load_profile("attnplug")
