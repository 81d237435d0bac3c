"""Variants of a layer of ``decode_chain_h200.py``: its parts in other configurations, with weights that are loaded or
prefetched earlier, with other splits of attention, and without one part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from decode_chain import PROGRAMS, Chain, Layer
from decode_chain_kernels import HELD, OWN, Fetched, early_skinny_gemm, early_streamed_gemm, fetch
from torch import Tensor

from attnplug_engine.kernels.gemm_tiles import STREAMED, GemmConfig, choose_few
from attnplug_engine.kernels.skinny_gemm import skinny_gemm
from attnplug_engine.models.layers import Linear

MB = 1 << 20
BYTES = (4 * MB, 16 * MB, 32 * MB)

OUT_CONFIGS = {
    1: [GemmConfig(*each) for each in ((8, 2048, 4), (4, 2048, 8), (4, 2048, 4), (2, 2048, 2), (1, 2048, 2))],
    16: [
        *(GemmConfig(16, columns, warps, tiles=True) for columns, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8))),
        *(GemmConfig(lines, 128, 4, tiles=True, stages=stages) for lines, stages in ((16, 12), (32, 10), (64, 8))),
        GemmConfig(32, 256, 4, tiles=True, stages=6),
    ],
}
GATE_UP_CONFIGS = {
    1: [
        *(GemmConfig(*each) for each in ((8, 2048, 8), (4, 2048, 8), (2, 2048, 4), (2, 2048, 2), (1, 2048, 2))),
        *(GemmConfig(4, 2048, 4, stages=1, along=along) for along in (1, 2, 4)),
        *(GemmConfig(2, 2048, warps, stages=1, along=2) for warps in (2, 4)),
        *(GemmConfig(2, 2048, 4, stages=stages, along=2, programs=most) for stages, most in ((3, 4), (2, 6), (4, 3))),
        GemmConfig(4, 2048, 4, stages=4, programs=1),
    ],
    16: [
        *(GemmConfig(16, columns, warps, tiles=True) for columns, warps in ((512, 4), (512, 8))),
        *(GemmConfig(32, 128, 4, tiles=True, stages=stages) for stages in (4, 8)),
        GemmConfig(32, 256, 4, tiles=True, stages=4),
        GemmConfig(64, 64, 8, tiles=True, stages=8),
        GemmConfig(64, 128, 4, tiles=True, stages=4),
    ],
}
"""Other configurations of the products, by rows."""


@dataclass(frozen=True)
class Variant:
    """Functions of the layer's number, called one after the other; ``None`` leaves a part out."""

    attend: Callable[[int, Tensor], Tensor] | None
    project: Callable[[int, Tensor, Tensor], Tensor] | None
    gate_up: Callable[[int, Tensor], Tensor] | None
    before: Callable[[int], None] = lambda number: None
    after: Callable[[], None] = lambda: None
    keep: Any = field(default=None, compare=False)
    """Memory that a graph needs."""

    def run(self, chain: Chain, layers: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Run layers; return the last one's attention, hidden states and result."""
        attended, hidden, act = chain.first[:, : chain.layers[0].out.weight.shape[1]], chain.hidden, chain.first
        for number in range(layers or len(chain.layers)):
            self.before(number)
            if self.attend is not None:
                attended = self.attend(number, act)
            hidden = self.project(number, attended, hidden) if self.project is not None else attended
            if self.gate_up is not None:
                act = self.gate_up(number, hidden)
        self.after()
        return attended, hidden, act


def base_of(chain: Chain) -> Variant:
    return Variant(chain.attend, chain.project, chain.gate_up)


def variants(chain: Chain, kinds: str = "abc") -> Iterator[tuple[str, Callable[[], Variant]]]:
    """Names and builders of the variants of some kinds, without the base. A builder may raise."""
    base, seen = base_of(chain), set()
    for name, build in (*_early(chain, base), *_side(chain, base), *_splits(chain, base)):
        # A CPU runs one of the variants that differ by numbers only.
        kind = name if chain.is_cuda else re.sub(r" [^a-z]+( |$)", " ", name)
        if name[0] in kinds and kind not in seen:
            seen.add(kind)
            yield name, build


def _early(chain: Chain, base: Variant) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """(a) Products that load or prefetch weights before they wait, and other tile configurations."""
    rows, layers = chain.shape.requests, chain.layers
    few = rows == 1

    def plain(weight: Callable[[Layer], Linear], config: GemmConfig, number: int, x: Tensor, **how: Any) -> Tensor:
        layer = layers[number]
        gated = weight(layer) is layer.gate_up
        norm = (layer.norm.weight, layer.norm.eps) if gated else None
        return skinny_gemm(x, weight(layer).weight, config, norm=norm, gated=gated, **how)

    def fetching(nbytes: int) -> Variant:
        """The output projection asks for the first weights of gate-up while it waits for attention."""

        def project(number: int, attended: Tensor, hidden: Tensor) -> Tensor:
            layer = layers[number]
            fetched, weight = Fetched(layer.gate_up.weight, nbytes), layer.out.weight
            if few:
                config = choose_few(*weight.shape)
                return early_skinny_gemm(attended, weight, config, hidden, fetched)
            return early(attended, weight, STREAMED, onto=hidden, fetched=fetched)

        return replace(base, project=project)

    def early(x: Tensor, weight: Tensor, config: GemmConfig, *, held: int = 0, **how: Any) -> Tensor:
        half = x.shape[1] // 2  # a limit for the tiny layers of a CPU only
        config = replace(config, block_k=min(config.block_k, half))
        return early_streamed_gemm(x, weight, config, held=min(held, half), **how)

    def early_out(number: int, attended: Tensor, hidden: Tensor, *, config: GemmConfig, **how: int) -> Tensor:
        return early(attended, layers[number].out.weight, config, onto=hidden, **how)

    def early_gate_up(number: int, hidden: Tensor, *, config: GemmConfig, **how: int) -> Tensor:
        layer = layers[number]
        return early(layer.norm(hidden), layer.gate_up.weight, config, gated=True, **how)

    for nbytes in BYTES:
        yield f"a: output fetches {nbytes // MB} MB of gate-up", partial(fetching, nbytes)
    if not few:
        for own in OWN[False][0]:
            project = partial(early_out, config=OWN[False][1], own=own)
            yield f"a: output prefetches {own} own columns", partial(replace, base, project=project)
        for own in OWN[True][0]:
            gate_up = partial(early_gate_up, config=OWN[True][1], own=own)
            yield f"a: gate-up prefetches {own} own columns", partial(replace, base, gate_up=gate_up)
        project = partial(early_out, config=OWN[False][1], own=2048)
        gate_up = partial(early_gate_up, config=OWN[True][1], own=512)
        yield "a: output prefetches 2048, gate-up 512", partial(replace, base, project=project, gate_up=gate_up)
        for held, config in HELD[False]:
            project = partial(early_out, config=config, held=held)
            yield f"a: output loads {held} columns early", partial(replace, base, project=project)
        for held, config in HELD[True]:
            gate_up = partial(early_gate_up, config=config, held=held)
            yield f"a: gate-up loads {held} columns early", partial(replace, base, gate_up=gate_up)
        (_, (held, config)), (gate_held, gate_config) = HELD[False], HELD[True][0]
        project = partial(early_out, config=config, held=held)
        gate_up = partial(early_gate_up, config=gate_config, held=gate_held)
        yield f"a: output loads {held}, gate-up {gate_held}", partial(replace, base, project=project, gate_up=gate_up)
    for config in OUT_CONFIGS[1 if few else 16]:

        def out_by(number: int, attended: Tensor, hidden: Tensor, *, config: GemmConfig = config) -> Tensor:
            return plain(lambda layer: layer.out, config, number, attended, onto=hidden)

        yield f"a: output by {_brief(config)}", partial(replace, base, project=out_by)
    for config in GATE_UP_CONFIGS[1 if few else 16]:
        if config.preloads and not chain.is_cuda:
            continue  # Triton's interpreter does not run Gluon

        def gate_up_by(number: int, hidden: Tensor, *, config: GemmConfig = config) -> Tensor:
            return plain(lambda layer: layer.gate_up, config, number, hidden)

        yield f"a: gate-up by {_brief(config)}", partial(replace, base, gate_up=gate_up_by)


def _brief(config: GemmConfig) -> str:
    kind = "preloaded" if config.preloads else "streamed" if config.stages else "tiles" if config.tiles else "rows"
    numbers = [config.block_n, config.block_k, config.warps, *([config.stages] if config.stages else [])]
    numbers += [config.along, config.programs] if config.preloads else []
    return f"{kind} {' '.join(map(str, numbers))}"


def _side(chain: Chain, base: Variant) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """(b) Prefetches of the next weights into L2 on a side stream, during attention."""
    modes = ("bulk", "lines", "load") if chain.is_cuda else ("load",)

    def fetching(nbytes: int, programs: int, mode: str, output: bool) -> Variant:
        def before(number: int) -> None:
            layer = chain.layers[number]
            fetched = Fetched(layer.gate_up.weight, nbytes, layer.out.weight if output else None)
            if chain.side is None:
                fetch(fetched, chain.sums, programs, mode)
                return
            chain.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(chain.side):
                fetch(fetched, chain.sums, programs, mode)

        def after() -> None:
            if chain.side is not None:
                torch.cuda.current_stream().wait_stream(chain.side)

        return replace(base, before=before, after=after)

    for mode in modes:
        for output in (True, False):
            for nbytes in BYTES:
                for programs in PROGRAMS:
                    if mode == modes[0] or (programs == PROGRAMS[1] and nbytes == BYTES[1]):
                        name = f"b: {mode} {nbytes // MB} MB by {programs}, from {'output' if output else 'gate-up'}"
                        yield name, partial(fetching, nbytes, programs, mode, output)


def _splits(chain: Chain, base: Variant) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """(c) Other splits and merges of attention."""
    now = chain.config_now

    def with_config(config: Any) -> Variant:
        using = chain.attention_of(config)
        return replace(base, attend=lambda number, act: chain.attend(number, act, using), keep=using)

    changes: list[dict[str, Any]]
    if chain.dims is None:
        changes = [{"programs": programs} for programs in (1, 2, 3, 4)]
        changes += [{"step": 16}, {"step": 32}, {"step": 64}, {"step": 128}]
        changes += [{"step": 16, "programs": 3}, {"step": 16, "programs": 4}, {"step": 32, "programs": 1}]
        changes += [{"separate_merge": False}, {"separate_merge": True}, {"separate_merge": False, "programs": 1}]
        changes += [{"prefetch": 0}, {"prefetch": 1}, {"single": not now.single}, {"warps": 2}, {"warps": 8}]
        changes += [{"step": 16, "separate_merge": False}, {"registers": 128}]
    else:
        changes = [{"programs": 2}, {"kernel": "triton"}, {"kernel": "triton", "step": 16}]
        changes += [{"kernel": "triton", "step": 64}, {"kernel": "triton", "step": 32, "programs": 2}]
        changes += [
            {"kernel": "triton", "merge": "last"},
            {"least_steps": 2},
            {"least_steps": 4},
            {"stages": 2},
            {"stages": 4},
        ]
        changes += [{"part_cost": 1 / 16}, {"part_cost": 1 / 4}]
        for parts, columns, warps in ((128, 32, 1), (64, 64, 2), (32, 64, 1), (16, 128, 1), (16, 512, 4), (16, 256, 2)):
            changes.append({"merge_parts": parts, "merge_columns": columns, "merge_warps": warps})
        changes.append({"programs": 2, "merge_parts": 16, "merge_columns": 128, "merge_warps": 1})
    for change in changes if chain.is_cuda else changes[:2]:
        config = replace(now, **change)
        if config != now:
            yield f"c: {', '.join(f'{name} {value}' for name, value in change.items())}", partial(with_config, config)


def parts_of(chain: Chain) -> Mapping[str, Variant]:
    """Chains of one part only, and chains without one."""
    base = base_of(chain)
    return {
        "alone: attention": Variant(lambda number, act: chain.attend(number, chain.first), None, None),
        "alone: output": Variant(None, lambda number, attended, _: chain.project(number, attended, chain.hidden), None),
        "alone: norm": Variant(None, lambda number, *_: chain.layers[number].norm(chain.hidden), None),
        "alone: gate_up": Variant(None, lambda *_: chain.hidden, chain.gate_up),
        "without: attention": replace(base, attend=None),
        "without: output": replace(base, project=None),
        "without: gate_up": replace(base, gate_up=None),
    }


def warm(chain: Chain, variant: Variant) -> None:
    """Compile what a variant does not share with the base."""
    base = base_of(chain)
    variant.before(0)
    if variant.attend is not None and variant.attend != base.attend:
        variant.attend(0, chain.first)
    if variant.project is not None and variant.project != base.project:
        variant.project(0, chain.first[:, : chain.layers[0].out.weight.shape[1]], chain.hidden)
    if variant.gate_up is not None and variant.gate_up != base.gate_up:
        variant.gate_up(0, chain.hidden)
    variant.after()
