"""Two-batch overlap, splits, hybrids, backends that take turns, speculation, captured steps, the plan stream and ranks,
nested in every order that makes sense: the tokens are those of a plain engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from device_native import DeviceNative
from refilled_native import captured
from speculating import DEEPSEEK, HYBRID, LLAMA, MTP, NGRAM, PROMPTS, engine, params, shaped, standalone
from thread_ranks import in_ranks

from attnplug import AttentionBackend, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.host import HostContext, Selection
from attnplug.registry.assembly import build_backend
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_engine import Engine
from attnplug_testing.sharing import alternating

pytestmark = pytest.mark.long

DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": NGRAM | shaped(2),
    "chain": standalone("tiny:qwen3") | shaped(2),
    "tree": standalone(LLAMA) | shaped(2, 2, 4),
    "mtp": MTP | shaped(2),
}


@dataclass(frozen=True)
class Nesting:
    """A way to nest backends, with a model and a draft.

    ``verify``: role of the backend that verifies if two backends prefill and decode. ``outside``: each of the two is
    joined to linear layers, instead of both as one. ``shared``: two backends share each place by length.
    """

    model: str
    draft: str
    verify: Role | None = None
    outside: bool = False
    replays: bool = False
    ranks: int = 1
    shared: bool = False

    def __str__(self) -> str:
        split = "" if self.verify is None else f"split-{self.verify}-verifies"
        words = (self.model, self.draft, split, "outside" * self.outside, "replayed" * self.replays)
        words = (*words, "shared" * self.shared)
        return " ".join(word for word in (*words, f"{self.ranks} ranks" * (self.ranks > 1)) if word)

    def build(self, selection: Selection, context: HostContext) -> AttentionBackend:
        if selection.problem.is_draft:
            return self._full("draft", selection, context, Role.DRAFT)
        linear = Role.LINEAR in selection.choices
        if self.verify is None:
            full = self._full("one", selection, context, Role.PREFILL, Role.DECODE)
            return self._joined(full, selection, context) if linear else full
        halves = [self._full(str(role), selection, context, role) for role in (Role.PREFILL, Role.DECODE)]
        if linear and self.outside:
            halves = [self._joined(half, selection, context) for half in halves]
        split = SplitBackend(*halves, verify=self.verify)
        return self._joined(split, selection, context) if linear and not self.outside else split

    def _full(self, name: str, selection: Selection, context: HostContext, *roles: Role) -> AttentionBackend:
        can = selection.chosen(roles[0]).spec.capabilities
        names = (f"{name}-odd", f"{name}-even") if self.shared else (name,)
        built = {each: DeviceNative(context.for_backend(each, can, roles=frozenset(roles))) for each in names}
        return FastestBackend(built, {roles[0]: alternating(*names)}) if self.shared else built[name]

    def _joined(self, full: AttentionBackend, selection: Selection, context: HostContext) -> AttentionBackend:
        registered = selection.chosen(Role.LINEAR)
        own = context.for_backend(registered.spec.name, registered.spec.capabilities, roles=frozenset({Role.LINEAR}))
        return HybridLinearBackend(full, build_backend(registered, own, selection.problem), context.model)


def nestings() -> list[Nesting]:
    """Linear states follow one path, so hybrids verify chains. Their backend on a CPU cannot be captured. Of the others
    every second one is."""
    verifying = (None, Role.DECODE, Role.PREFILL)
    found = [
        Nesting(LLAMA, draft, verify, replays=bool(number % 2))
        for number, (draft, verify) in enumerate(product(("plain", "ngram", "chain", "tree"), verifying))
    ]
    found += [Nesting(DEEPSEEK, "mtp", verify, replays=True) for verify in verifying]
    found += [
        Nesting(HYBRID, draft, verify, outside)
        for draft, verify, outside in product(("plain", "ngram", "chain"), verifying, (False, True))
        if (verify or not outside) and (draft == "ngram" or outside is (verify is Role.DECODE))
    ]
    found += [
        Nesting(LLAMA, "tree", Role.DECODE, replays=True, ranks=2),
        Nesting(HYBRID, "ngram", Role.PREFILL, ranks=2),
    ]
    found += [
        Nesting(LLAMA, "plain", shared=True),
        Nesting(LLAMA, "tree", Role.DECODE, replays=True, shared=True),
        Nesting(DEEPSEEK, "mtp", Role.PREFILL, replays=True, shared=True),
        Nesting(HYBRID, "chain", Role.DECODE, outside=True, shared=True),
        Nesting(HYBRID, "plain", shared=True, ranks=2),
    ]
    return found


def tokens(one: Engine) -> list[list[int]]:
    """Tokens of four requests that end one after the other; two of them sample."""
    each = [replace(one, max_tokens=most) for one, most in zip(params(), (8, 6, 4, 2), strict=False)]
    return [done.token_ids for done in one.generate(PROMPTS[1:5], each)]


@cache
def plain(model: str) -> list[list[int]]:
    return tokens(engine(model))


@pytest.mark.parametrize("nesting", nestings(), ids=str)
def test_every_nesting_gives_the_tokens_of_a_plain_engine(nesting: Nesting, monkeypatch: pytest.MonkeyPatch):
    """A9, B1, B4: all run prefills in halves, and eager rounds with a plan stream if lengths may stay on the device."""
    expected = plain(nesting.model)
    for module in ("execution.runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", nesting.build)
    draft = DRAFTS[nesting.draft]

    def run(**settings: Any) -> list[list[int]]:
        one = engine(nesting.model, two_batch_overlap=True, plan_stream=bool(draft), **draft, **settings)
        if nesting.replays:
            captured(one, (2,))
        found = tokens(one)
        assert bool(one.statistics.replayed_steps) is nesting.replays
        assert bool(one.statistics.backend_usage.by_backend()) is nesting.shared
        assert not draft or (one.rounds.plan_stream is None) is (nesting.model == HYBRID)
        return found

    if nesting.ranks == 1:
        assert run(overlap=True) == expected
    else:
        assert in_ranks(nesting.ranks, lambda parallel: run(parallel=parallel)) == [expected] * nesting.ranks
