"""Checks of an installed plugin's declarations, before anything is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from attnplug.declare.version import CONTRACT_VERSION
from attnplug_conformance.check import Check, CheckContext
from attnplug_conformance.diagnosis import CheckFailure
from attnplug_conformance.subject import Subject

_PROGRAM = """
import json, sys
from attnplug.host import load_registry
registry = load_registry()
print(json.dumps([NAME in registry.backends, sorted(sys.modules)]))
"""


def _loads_light(context: CheckContext) -> None:
    """Load the plugin in a new process: this must import neither torch nor the module of its factory."""
    registered = context.subject.registered
    program = _PROGRAM.replace("NAME", repr(context.subject.name))
    environment = os.environ | {"ATTNPLUG_PLUGINS": registered.source.distribution, "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CheckFailure(f"its plugin cannot be loaded without a GPU: {done.stderr.strip().splitlines()[-1:]}")
    found, modules = json.loads(done.stdout.splitlines()[-1])
    if not found:
        raise CheckFailure("its plugin cannot be loaded without a GPU; see attnplug backends --all")
    factory = registered.spec.factory.partition(":")[0]
    for heavy in ("torch", factory):
        if heavy in modules:
            raise CheckFailure(f"loading its plugin imports {heavy}; import it where the backend is built")


def _contract(context: CheckContext) -> None:
    spec = context.subject.registered.spec
    if spec.contract != CONTRACT_VERSION:
        raise CheckFailure(f"it is written for contract {spec.contract}; the installed contract is {CONTRACT_VERSION}")


def _installed(subject: Subject) -> str | None:
    from importlib.metadata import PackageNotFoundError, distribution

    if subject.seam is not None:
        return f"its factory is replaced: {subject.seam}"
    try:
        distribution(subject.registered.source.distribution)
    except PackageNotFoundError:
        return "it is not an installed plugin"
    return None


def declared_checks() -> Iterator[Check]:
    yield Check("declared.contract", "declared", "it is written for this contract", None, _contract, True)
    yield Check(
        "declared.light",
        "declared",
        "loading the plugin imports neither torch nor the backend, and needs no GPU",
        None,
        _loads_light,
        False,
        _installed,
    )
