"""Checks of an installed plugin's declarations, before anything is built."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

from attnplug import ForwardMode
from attnplug.declare.version import contract_problem
from attnplug.registry.kernel_builds import declared_builds
from attnplug.registry.loading import BuildError
from attnplug_conformance.case import Case
from attnplug_conformance.check import Check, CheckContext
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.subject import Subject, Unclaimed

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
    registered = context.subject.registered
    if (problem := contract_problem(registered.spec.contract, registered.source.distribution)) is not None:
        raise CheckFailure(problem)


def _kernel_builds(context: CheckContext) -> None:
    """Ask for the kernels of a decode of every claimed kind. None is compiled; other checks build what they run."""
    subject = context.subject
    for kind in subject.claimed_kinds():
        try:
            case = subject.fit(Case(((3, 1),), ForwardMode.DECODE, kind))
        except Unclaimed:
            continue
        problem = case.problem(subject.device.type, subject.sm, subject.architecture)
        try:
            builds = declared_builds(subject.registered, problem, subject.capabilities.roles, subject.options)
        except BuildError as error:
            raise CheckFailure(str(error)) from error
        for build in builds:
            try:
                pickle.dumps(build.build)
            except Exception as error:
                raise CheckFailure(f"kernel {build.name} cannot be built in another process: {error}") from error


def _lists_kernels(subject: Subject) -> str | None:
    return None if subject.registered.spec.kernel_builds is not None else "it lists no kernels to build"


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
    yield Check(
        "declared.contract",
        "declared",
        "the contract that it needs is one that this attnplug runs",
        None,
        _contract,
        True,
    )
    yield Check(
        "declared.kernel_builds",
        "declared",
        "the kernels that it compiles just in time are listed, each under a name of its own, and can be pickled",
        None,
        _kernel_builds,
        False,
        _lists_kernels,
    )
    yield Check(
        "declared.light",
        "declared",
        "loading the plugin imports neither torch nor the backend, and needs no GPU",
        None,
        _loads_light,
        False,
        _installed,
    )
