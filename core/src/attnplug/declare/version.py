"""Version of the contract between core and backends (D4).

Before 1.0 a minor version may be incompatible, so a backend declares the exact version that it was written for.
docs/contract.md states the stability promise.
"""

from __future__ import annotations

import re

MAJOR = 0
MINOR = 9
CONTRACT_VERSION = f"{MAJOR}.{MINOR}"


def contract_problem(declared: object) -> str | None:
    """Return why a backend written for contract ``declared`` cannot run on this core; ``None`` if it can."""
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", declared) if isinstance(declared, str) else None
    if match is None:
        shown = repr(declared)[:20]
        return f"contract {shown} is not a version; write MAJOR.MINOR as a string, such as {CONTRACT_VERSION!r}"
    version = int(match[1]), int(match[2])
    if version == (MAJOR, MINOR):
        return None
    remedy = f"install a release of the plugin made for contract {CONTRACT_VERSION}"
    if version > (MAJOR, MINOR):
        remedy = f"upgrade attnplug, or {remedy}"
    return f"it speaks contract {declared}, this attnplug speaks {CONTRACT_VERSION}; {remedy}"
