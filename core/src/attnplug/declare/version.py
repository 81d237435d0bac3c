"""The version of the contract between core and backends (D4).

Before 1.0 a minor version may change things, so a backend declares the exact version that it was written for.
docs/writing-a-backend.md holds the promise in full.
"""

from __future__ import annotations

import re

MAJOR = 0
MINOR = 9
CONTRACT_VERSION = f"{MAJOR}.{MINOR}"


def contract_problem(declared: object) -> str | None:
    """Why a backend written for ``declared`` cannot run on this core; ``None`` if it can."""
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", declared) if isinstance(declared, str) else None
    if match is None:
        shown = repr(declared)[:20]
        return f"contract {shown} is not a version; write MAJOR.MINOR as a string, such as {CONTRACT_VERSION!r}"
    version = int(match[1]), int(match[2])
    if version == (MAJOR, MINOR):
        return None
    both = f"it speaks contract {declared}, this attnplug speaks {CONTRACT_VERSION}"
    if version > (MAJOR, MINOR):
        return f"{both}; upgrade attnplug, or install a release of the plugin made for contract {CONTRACT_VERSION}"
    return f"{both}; install a release of the plugin made for contract {CONTRACT_VERSION}"
