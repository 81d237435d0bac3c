"""The version of the contract between core and backends (D4).

``MAJOR`` changes when a correct backend of the old contract could stop working; ``MINOR`` when something is
added that old backends need not know. docs/writing-a-backend.md holds the promise in full.
"""

from __future__ import annotations

import re

MAJOR = 1
MINOR = 0
CONTRACT_VERSION = f"{MAJOR}.{MINOR}"


def contract_problem(declared: object) -> str | None:
    """Why a backend written for ``declared`` cannot run on this core; ``None`` if it can."""
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", declared) if isinstance(declared, str) else None
    if match is None:
        shown = repr(declared)[:20]
        return f"contract {shown} is not a version; write MAJOR.MINOR as a string, such as {CONTRACT_VERSION!r}"
    major, minor = int(match[1]), int(match[2])
    if major > MAJOR or (major == MAJOR and minor > MINOR):
        return (
            f"it speaks contract {declared}, this attnplug speaks {CONTRACT_VERSION}; "
            "upgrade attnplug, or install a release of the plugin made for this one"
        )
    if major < MAJOR:
        return (
            f"it speaks contract {declared}, this attnplug speaks {CONTRACT_VERSION}; "
            f"install a release of the plugin made for contract {MAJOR}"
        )
    return None
