"""Version of the contract between core and backends (D4).

docs/writing-a-backend.md states the stability promise.
"""

from __future__ import annotations

import re

CONTRACT_VERSION = "0.9"


def parse_contract(text: object) -> tuple[int, int] | None:
    """Parse ``"MAJOR.MINOR"``: ASCII digits without leading zeros. Returns ``None`` for anything else."""
    number = "(0|[1-9][0-9]{0,3})"
    match = re.fullmatch(rf"{number}\.{number}", text) if isinstance(text, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


def core_range(contract: tuple[int, int]) -> str:
    """Return the releases of core that run a backend of ``contract``: ``>=1.2,<2``, before 1.0 ``>=0.9,<0.10``."""
    major, minor = contract
    return f">={major}.{minor},<{major + 1 if major else f'0.{minor + 1}'}"


def contract_problem(declared: object, distribution: str = "the plugin") -> str | None:
    """Return why a backend that needs contract ``declared`` or newer cannot run on this core; ``None`` if it can.

    Later minors of a major run it. Before 1.0 a minor may change anything, so minors must match.
    """
    needed, core = parse_contract(declared), parse_contract(CONTRACT_VERSION)
    assert core is not None
    if needed is None:
        shown = repr(declared)[:20]
        return f"contract {shown} is not a version; write MAJOR.MINOR as a string, such as {CONTRACT_VERSION!r}"
    if needed == core or (needed[0] == core[0] > 0 and needed < core):
        return None
    problem = f"it needs contract {declared}; this attnplug has contract {CONTRACT_VERSION}"
    fix = f"run: pip install 'attnplug{core_range(needed)}'"
    if needed > core:
        return f"{problem}; {fix}"
    return f"{problem}; install a release of {distribution} for contract {core[0]}.{core[1]}, or {fix}"
