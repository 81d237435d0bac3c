"""Makes SGLang take the code paths of an Arm host. Python imports this at start-up if the folder is on its path.

Only SGLang's own calls are answered so: torch.compile generates code for the machine that it runs on.
"""

import platform
import sys

_machine = platform.machine


def machine():
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return "aarch64" if caller.startswith("sglang.") else _machine()


platform.machine = machine
