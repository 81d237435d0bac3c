"""Server that runs kernel-compiling scripts, each in a fork that has torch and Triton imported already.

``triton_mode.compiled_by`` starts one per test process: the imports take longer than compiling a small kernel. Each
input line is a JSON list ``[output, errors, script, *arguments]``; the reply is the script's exit code.
"""

import json
import os
import runpy
import sys
import traceback

import torch  # noqa: F401 - imported for the forks, like the next one
import triton.compiler  # noqa: F401


def run(output: str, errors: str, script: str, *arguments: str) -> int:
    """Run a script as ``__main__`` with its output and errors in files; returns its exit code."""
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv, code = [script, *arguments], 0
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    for line in sys.stdin:
        if not (child := os.fork()):
            os._exit(run(*json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
