"""Version of the contract between core and backends, and deprecations (D4).

docs/contract.md states the stability promise.
"""

from __future__ import annotations

import re
import warnings

from attnplug.declare.errors import UsageError

CONTRACT_VERSION = "1.0"
DEPRECATIONS = {"skip_attn_backend_init": ("1.0", "batch.mark_forward_metadata_ready() where you plan the batch")}
"""Deprecated names: the first minor that warns, and the replacement.

A name warns for two minors, is an error in the third, and is removed in the fourth."""
_warned: set[str] = set()


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


def removal(since: str) -> tuple[str, str]:
    """Return the minor in which a name that is deprecated ``since`` a version is an error, and that of its removal."""
    major, minor = parse_contract(since) or (0, 0)
    return f"{major}.{minor + 2}", f"{major}.{minor + 3}"


def use_deprecated(name: str, stacklevel: int) -> None:
    """Warn, once per process, that a name of ``DEPRECATIONS`` is used. Raises UsageError in its third minor."""
    since, replacement = DEPRECATIONS[name]
    error, removed = removal(since)
    text = f"{name} is deprecated and is removed in contract {removed}; use {replacement}"
    if (parse_contract(CONTRACT_VERSION) or ()) >= (parse_contract(error) or ()):
        raise UsageError(text)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
