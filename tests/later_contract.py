"""A pretended next minor of the contract: core's sources with one addition of each kind that a minor may make.

``write`` makes a copy of core with the additions. ``additions`` runs in a process that imports this copy, and uses each
addition together with the fossils.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnplug.declare.version import CONTRACT_VERSION

MAJOR, MINOR = map(int, CONTRACT_VERSION.split("."))
VERSION = f"{MAJOR}.{MINOR + 1}" if MAJOR else "1.1"

_HOOK = '''
class LaterPlanning(Protocol):
    """Optional: a hook of the next minor."""

    def init_later(self, forward_batch: ForwardBatch, depth: int = 2, *, hint: str = "none") -> str | None:
        """Return a note on the batch."""


MAY_IGNORE'''

EDITS = {
    # The version, and a code.
    "declare/version.py": [(f'CONTRACT_VERSION = "{CONTRACT_VERSION}"', f'CONTRACT_VERSION = "{VERSION}"')],
    "torch_native/plugin.py": [(f'contract="{CONTRACT_VERSION}"', f'contract="{VERSION}"')],
    "declare/errors.py": [('    ROLE = "role"\n', '    ROLE = "role"\n    LATER = "later"\n')],
    # A feature, and a field with a default that a layer with the feature has.
    "declare/model.py": [
        ('    COMPRESSED = "compressed"\n', '    COMPRESSED = "compressed"\n    LATER = "later"\n'),
        (
            "    compressed: CompressedDims | None = None\n\n    def __post_init__",
            "    compressed: CompressedDims | None = None\n    later: bool = False\n\n    def __post_init__",
        ),
        (
            "            Feature.SINKS: self.sinks,\n",
            "            Feature.SINKS: self.sinks,\n            Feature.LATER: self.later,\n",
        ),
    ],
    # A level.
    "declare/problem.py": [('    """Any batch, prefill included."""\n', '    """Any batch."""\n    LATER = 4\n')],
    # A claim, which wrappers combine.
    "declare/capabilities.py": [
        ('EXTRAS = ("entries", ', 'EXTRAS = ("entries", "later", '),  # an extra
        (
            "    def __post_init__(self) -> None:\n        for each in fields(self):",
            "    later: int = declared(integer, 0, weaker=min, within=operator.le)\n\n"
            "    def __post_init__(self) -> None:\n        for each in fields(self):",
        ),
    ],
    "declare/spec.py": [("    preference: int = 0\n", "    later: str | None = None\n    preference: int = 0\n")],
    # An extra.
    "contract/backend.py": [
        (
            '    lse: Tensor | None = None\n    """Output',
            '    later: Tensor | None = None\n    lse: Tensor | None = None\n    """Output',
        ),
        # An optional hook.
        ("\nMAY_IGNORE", _HOOK),
        ("DeltaDecoding, GraphPlanning)", "DeltaDecoding, GraphPlanning, LaterPlanning)"),
    ],
    # Fields of what backends receive.
    "contract/inputs.py": [
        ("    lane: int = 0\n\n    @classmethod", "    lane: int = 0\n    later: int = 0\n\n    @classmethod")
    ],
    # A format.
    "declare/kv_format.py": [
        (
            '    KVFormat("float16",',
            '    KVFormat("later", "a format of the next minor", (RowPart("float32"),), 0.0, holds=ROW_KINDS),\n'
            '    KVFormat("float16",',
        )
    ],
}


def write(core: Path, folder: Path) -> None:
    """Copy the package ``attnplug`` below ``core`` to ``folder`` and make the additions there."""
    shutil.copytree(core / "attnplug", folder / "attnplug", ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        path = folder / "attnplug" / name
        text = path.read_text(encoding="utf-8")
        for before, now in edits:
            assert text.count(before) == 1, f"{name} has {before!r} {text.count(before)} times; adapt {__name__}"
            text = text.replace(before, now)
        path.write_text(text, encoding="utf-8")


def additions() -> dict[str, Any]:
    """Use each addition with the fossils. Returns what came of it, by kind of addition."""
    from dataclasses import replace

    import torch
    from fossil_host.host import FULL
    from fossil_wrapper.backend import FossilWrapper

    from attnplug import DType, Feature, ForwardExtras, GraphLevel, ModelSpec, Problem, Role
    from attnplug.host import load_registry

    backends = load_registry().backends
    fossil = backends["fossil_mla"].spec
    layer = replace(FULL["mla"], later=True)

    def codes(**changes: Any) -> list[str]:
        model = ModelSpec("later", "later", (changes.pop("layer", FULL["mla"]),), context_length=64)
        problem = Problem(model, device="cuda", sm=90, dtype=DType.FLOAT32, page_size=16, **changes)
        return [str(refusal.code) for refusal in fossil.refusals(problem, Role.DECODE)]

    class Child:
        """A backend that has the next minor's hook and claim."""

        def __init__(self, later: int) -> None:
            self.claims = replace(fossil.capabilities.claims, later=later)
            self.backend_id = type("Id", (), {"name": "child"})()
            self.calls: list[Any] = []

        def init_later(self, forward_batch: Any, depth: int = 2, *, hint: str = "none") -> str:
            self.calls.append((forward_batch, depth, hint))
            return "noted"

    left, right = Child(3), Child(5)
    wrapper = FossilWrapper("fossil_wrapper", {"prefill": left, "decode": right})
    batch = _decode_batch()
    answer = wrapper.init_later(batch, hint="fast")
    return {
        "declared": fossil.contract,
        "field": [fossil.later, layer.later, fossil.capabilities.later],
        "feature": [Feature.LATER in fossil.capabilities.features, codes(layer=layer), codes()],
        "level": codes(cuda_graph=GraphLevel.LATER),
        "format": codes(kv_dtype="later"),
        "extra": _refused(lambda: _extend(ForwardExtras(later=torch.ones(1)))),
        "hook": [answer, left.calls == [], right.calls == [(batch, 2, "fast")]],
        "claim": [wrapper.claims.later, list(wrapper.limiting_children["later"])],
    }


def _decode_batch() -> Any:
    import torch

    from attnplug import ForwardBatch, ForwardMode, Geometry

    return ForwardBatch(
        Geometry.of_lengths(ForwardMode.DECODE, torch.zeros(1, 1, dtype=torch.int32), [1], [3], page_size=16)
    )


def _extend(extras: Any) -> None:
    """Run a step of the fossil host whose extras have the next minor's field."""
    import fossil_host.host as host

    original = host.ForwardExtras
    host.ForwardExtras = lambda **given: extras
    try:
        host.serve("mha", "fossil_mha")
    finally:
        host.ForwardExtras = original


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
