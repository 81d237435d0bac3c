"""Make the shared test modules of this bridge importable. Tests that need vLLM are run by ``make bridge-test``."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = [] if find_spec("vllm") else ["hosted"]
