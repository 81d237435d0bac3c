"""Pretended later minors of the contract: core's sources with one addition of each kind that a minor may make.

``write`` makes a copy of core with the additions of a minor, and those of the minors before it. ``additions`` runs in a
process that imports this copy, and uses each addition together with the fossils.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnplug.declare.version import CONTRACT_VERSION

MINORS = {"1.1": "later", "1.3": "latest"}
"""Pretended minors, and the name of each one's additions."""

_HOOK = '''
class {title}Planning(Protocol):
    """Optional: a hook of a later minor."""

    def init_{name}(self, forward_batch: ForwardBatch, depth: int = 2, *, hint: str = "none") -> str | None:
        """Return a note on the batch."""


MAY_IGNORE'''


def edits(name: str, level: int) -> list[tuple[str, str]]:
    """Return replacements in core's sources that add one of each kind, called ``name``. Those of two minors do not
    collide."""
    upper, title = name.upper(), name.title()
    return [
        # A refusal code.
        ('    ROLE = "role"\n', f'    ROLE = "role"\n    {upper} = "{name}"\n'),
        # A feature, and a field with a default that a layer with the feature has.
        ('    COMPRESSED = "compressed"\n', f'    COMPRESSED = "compressed"\n    {upper} = "{name}"\n'),
        (
            "    compressed: CompressedDims | None = None\n",
            f"    compressed: CompressedDims | None = None\n    {name}: bool = False\n",
        ),
        (
            "            Feature.SINKS: self.sinks,\n",
            f"            Feature.SINKS: self.sinks,\n            Feature.{upper}: self.{name},\n",
        ),
        # A level.
        (
            '    """Any batch, prefill included."""\n',
            f'    """Any batch, prefill included."""\n    {upper} = {level}\n',
        ),
        # A claim, which wrappers combine.
        (
            "    def __post_init__(self) -> None:\n        for each in fields(self):",
            f"    {name}: int = declared(integer, 0, weaker=min, within=operator.le)\n\n"
            "    def __post_init__(self) -> None:\n        for each in fields(self):",
        ),
        # A field of specs.
        ("    preference: int = 0\n", f"    {name}: str | None = None\n    preference: int = 0\n"),
        # An extra.
        ('EXTRAS = ("entries", ', f'EXTRAS = ("entries", "{name}", '),
        (
            '    lse: Tensor | None = None\n    """Output',
            f'    {name}: Tensor | None = None\n    lse: Tensor | None = None\n    """Output',
        ),
        # An optional hook.
        ("\nMAY_IGNORE", _HOOK.format(name=name, title=title)),
        ("DeltaDecoding, GraphPlanning", f"DeltaDecoding, GraphPlanning, {title}Planning"),
        # A field of what backends receive. Arguments by position stay as they are.
        (
            "    kv_indptr: Tensor\n    lane: int = 0\n",
            "    kv_indptr: Tensor\n    lane: int = 0\n"
            f'    {name}: int = __import__("dataclasses").field(default=0, kw_only=True)\n',
        ),
        # A format.
        (
            '    KVFormat("float16",',
            f'    KVFormat("{name}", "a format of a later minor", (RowPart("float32"),), 0.0, holds=ROW_KINDS),\n'
            '    KVFormat("float16",',
        ),
    ]


def write(core: Path, folder: Path, version: str) -> None:
    """Copy the package ``attnplug`` below ``core`` to ``folder``; add what minors up to ``version`` have."""
    package = folder / "attnplug"
    shutil.copytree(core / "attnplug", package, ignore=shutil.ignore_patterns("__pycache__"))
    changes = [(f'CONTRACT_VERSION = "{CONTRACT_VERSION}"', f'CONTRACT_VERSION = "{version}"')]
    for level, (minor, name) in enumerate(MINORS.items(), start=4):
        changes += edits(name, level) if parts(minor) <= parts(version) else []
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    for before, now in changes:
        places = [path for path, text in texts.items() if before in text]
        counts = [texts[path].count(before) for path in places]
        assert counts == [1], f"core has {before!r} {sum(counts)} times; adapt {__name__}"
        texts[places[0]] = texts[places[0]].replace(before, now)
        places[0].write_text(texts[places[0]], encoding="utf-8")


def parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def additions(name: str) -> dict[str, Any]:
    """Use each addition of that name with the fossils. Returns what came of it, by kind of addition."""
    from dataclasses import replace

    import torch
    from fossil_host.host import FULL
    from fossil_wrapper.backend import FossilWrapper

    from attnplug import DType, Feature, ForwardExtras, GraphLevel, ModelSpec, Problem, Role
    from attnplug.host import load_registry

    backends = load_registry().backends
    fossil = backends["fossil_mla"].spec
    layer = replace(FULL["mla"], **{name: True})

    def codes(**changes: Any) -> list[str]:
        model = ModelSpec("later", "later", (changes.pop("layer", FULL["mla"]),), context_length=64)
        problem = Problem(model, device="cuda", sm=90, dtype=DType.FLOAT32, page_size=16, **changes)
        return [str(refusal.code) for refusal in fossil.refusals(problem, Role.DECODE)]

    class Child:
        """A backend that has the minor's hook and claim."""

        def __init__(self, claimed: int) -> None:
            self.claims = replace(fossil.capabilities.claims, **{name: claimed})
            self.backend_id = type("Id", (), {"name": "child"})()
            self.calls: list[Any] = []

        def note(self, forward_batch: Any, depth: int = 2, *, hint: str = "none") -> str:
            self.calls.append((forward_batch, depth, hint))
            return "noted"

    setattr(Child, f"init_{name}", Child.note)
    left, right = Child(3), Child(5)
    wrapper = FossilWrapper("fossil_wrapper", {"prefill": left, "decode": right})
    batch = _decode_batch()
    answer = getattr(wrapper, f"init_{name}")(batch, hint="fast")
    feature = Feature(name)
    return {
        "declared": fossil.contract,
        "field": [getattr(each, name) for each in (fossil, layer, fossil.capabilities)],
        "feature": [feature in fossil.capabilities.features, codes(layer=layer), codes()],
        "level": codes(cuda_graph=GraphLevel[name.upper()]),
        "format": codes(kv_dtype=name),
        "extra": _refused(lambda: _extend(ForwardExtras(**{name: torch.ones(1)}))),
        "hook": [answer, left.calls == [], right.calls == [(batch, 2, "fast")]],
        "claim": [getattr(wrapper.claims, name), list(wrapper.limiting_children[name])],
    }


def _decode_batch() -> Any:
    import torch

    from attnplug import ForwardBatch, ForwardMode, Geometry

    return ForwardBatch(
        Geometry.of_lengths(ForwardMode.DECODE, torch.zeros(1, 1, dtype=torch.int32), [1], [3], page_size=16)
    )


def _extend(extras: Any) -> None:
    """Run a step of the fossil host whose extras have a later minor's field."""
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
