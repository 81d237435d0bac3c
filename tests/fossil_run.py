"""Select, conform and run the fossils in this process, and print what happened as JSON.

Usage: python tests/fossil_run.py FOLDER EVERY DEVICE [NAME …]. FOLDER holds the unpacked wheels. One of EVERY quick
checks runs, on DEVICE. With names, attnplug is a later minor of ``tests/later_contract.py``, whose additions of these
names are used, too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PLUGINS = ("fossil_mha", "fossil_mla", "fossil_linear", "fossil_wrapper")


def listed() -> dict[str, Any]:
    """Return the fossils that can be selected, and the errors of those that cannot."""
    from attnplug.host import load_registry

    registry = load_registry()
    broken = {fault.name: fault.error for fault in registry.broken if fault.name in PLUGINS}
    return {"selectable": sorted(set(PLUGINS) & registry.backends.keys()), "broken": broken}


def served() -> dict[str, dict[str, float]]:
    """Run the fossil host on every fossil plugin; return its errors by step."""
    from fossil_host.host import serve

    from attnplug import ExtendPath

    paths = (ExtendPath.ABSORBED, ExtendPath.ONE_SHOT, ExtendPath.CHUNKED)
    return {
        "mha": serve("mha", "fossil_mha"),
        "wrapper": serve("mha", "fossil_wrapper"),
        "linear": serve("mha", "fossil_mha", "fossil_linear"),
        **{f"mla {path}": serve("mla", "fossil_mla", path=path) for path in paths},
    }


def conforming(every: int, device: str) -> dict[str, dict[str, Any]]:
    """Run the kit's quick checks, as the contract of the fossils has them; return counts and failures by plugin."""
    from dataclasses import replace

    from attnplug.host import load_registry
    from attnplug_conformance.catalog import all_checks
    from attnplug_conformance.runner import Status, run_checks
    from attnplug_conformance.subject import Subject

    backends, found = load_registry().backends, {}
    for name in PLUGINS:
        subject = replace(Subject.installed(backends[name], device), budget=0)
        quick = [check for check in all_checks() if check.quick and check.claim != "random"]
        required = backends[name].spec.contract
        verdict = run_checks(subject, quick[::every], quick=True, floors=every == 1, contract=required)
        passed = sum(result.status is Status.PASSED for result in verdict.results)
        failed = [f"{r.check.name}: {r.message}" for r in verdict.results if r.status is Status.FAILED]
        found[name] = {"passed": passed, "failed": [*failed, *verdict.problems]}
    return found


def main(folder: str, every: str, device: str, *names: str) -> None:
    sys.path.insert(0, folder)
    result = listed()
    if result["selectable"]:
        result |= {"served": served(), "conforming": conforming(int(every), device)}
    if names:
        import later_contract

        result["later"] = {name: later_contract.additions(name) for name in names}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
