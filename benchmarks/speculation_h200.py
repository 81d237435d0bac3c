"""Speculation on one GPU: cost of a round relative to a plain step, and its gain.

python benchmarks/speculation_h200.py --out benchmarks/results/speculation_h200.json
python benchmarks/speculation_h200.py --smoke        the same code on a CPU with a tiny model

The MLA model of decode_models.py with random weights and one layer for multi-token prediction. With random weights no
draft would be accepted, so the target's tokens are overwritten after sampling: by draft tokens with a given
probability, or by a repetitive text. Everything else runs unchanged: verify, accept, draft extend, drafts, and the
host.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_h200 import _rounded, machine_of
from decode_models import MODELS, Config, smaller
from torch import Tensor

from attnplug_engine import Engine, SamplingParams
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.speculation import rounds as rounds_module
from attnplug_engine.speculation.acceptance import Accepted
from attnplug_engine.speculation.tree import Proposal

_CONTEXT, _WARM, _MEASURED, _PERIOD = 512, 8, 60, 24
_BATCHES, _CHANCES = (1, 4, 16), (0.6, 0.8, 1.0)


def main() -> None:
    arguments = _parser().parse_args()
    end = time.perf_counter() + arguments.budget
    config = smaller(MODELS["mla"]) if arguments.smoke else MODELS["mla"]
    found: dict[str, Any] = {"machine": machine_of(), "context": _CONTEXT, "points": []}

    def record(**point: Any) -> None:
        found["points"].append(point)
        print(" ".join(f"{name}={_rounded(value)}" for name, value in point.items()), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(_rounded(found), indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        for measure in (_plain, _mtp, _ngram):
            if time.perf_counter() < end:
                try:
                    measure(folder, config, arguments, record)
                except Exception as error:  # the other cases go on
                    record(what=measure.__name__, error=f"{type(error).__name__}: {str(error)[:400]}")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print(table(found))


def _plain(folder: str, config: Config, arguments: argparse.Namespace, record: Callable[..., None]) -> None:
    engine = _engine(folder, arguments)
    for batch in _BATCHES:
        record(what="plain", batch=batch, **_measured(engine, batch, _random_prompt(config)))


def _mtp(folder: str, config: Config, arguments: argparse.Namespace, record: Callable[..., None]) -> None:
    for topk, nodes in ((1, None), (2, 8)):
        with _scripted_acceptance() as chance:
            settings = {"speculative_num_steps": 3, "speculative_topk": topk, "speculative_num_draft_tokens": nodes}
            engine = _engine(folder, arguments, speculative_algorithm="mtp", **settings)
            chance.to(engine.runner.device)
            for batch in _BATCHES:
                for share in _CHANCES if topk == 1 else (0.8,):
                    chance.set(share)
                    measured = _measured(engine, batch, _random_prompt(config))
                    record(what="mtp", steps=3, topk=topk, chance=share, batch=batch, **measured)
            del engine


def _ngram(folder: str, config: Config, arguments: argparse.Namespace, record: Callable[..., None]) -> None:
    text = np.random.default_rng(3).integers(config["vocab_size"], size=_PERIOD).tolist()
    with _repeated_text(text) as repeated:
        engine = _engine(folder, arguments, speculative_algorithm="ngram", speculative_num_steps=4)
        repeated.to(engine.runner.device)
        prompt = text * (_CONTEXT // _PERIOD)
        for batch in _BATCHES:
            record(what="ngram", steps=4, batch=batch, **_measured(engine, batch, lambda _: prompt))


def _engine(folder: str, arguments: argparse.Namespace, **settings: Any) -> Engine:
    given = {"attention_backend": "torch_native"} if arguments.smoke else {"attention_backend": "triton_mla"}
    return Engine(
        folder,
        random_weights=True,
        max_batch=max(_BATCHES),
        context_length=_CONTEXT + 1024,
        prefix_cache=False,
        ignore_eos=True,
        **given,
        **settings,
    )


def _random_prompt(config: Config) -> Callable[[int], list[int]]:
    return lambda number: np.random.default_rng(number).integers(config["vocab_size"], size=_CONTEXT).tolist()


def _measured(engine: Engine, batch: int, prompt: Callable[[int], list[int]]) -> dict[str, Any]:
    """Median time from step to step while ``batch`` requests decode, and their tokens per step."""
    requests = [engine.add(prompt(number), SamplingParams(max_tokens=900)) for number in range(batch)]
    while not all(request.output for request in requests):
        engine.step()
    for _ in range(_WARM):
        engine.step()
    before = sum(len(request.output) for request in requests)
    times, last = [], time.perf_counter()
    for _ in range(_MEASURED):
        engine.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    tokens = sum(len(request.output) for request in requests) - before
    ended = [request for request in requests if request.finish_reason is not None]
    for request in requests:
        engine.abort(request)
    while engine.step() is not None:
        pass
    if ended:
        raise RuntimeError(f"{len(ended)} requests ended while they were measured: {ended[0].finish_reason}")
    found = {"step_us": 1e6 * statistics.median(times), "tokens_per_s": tokens / sum(times)}
    if (counts := getattr(engine.statistics, "rounds", None)) is not None:
        found |= {"tokens_per_round": tokens / batch / _MEASURED}
        parts = {"verify": counts.verify_seconds, "extend": counts.extend_seconds, "draft": counts.draft_seconds}
        found |= {f"{part}_us": 1e6 * seconds / max(counts.timed, 1) for part, seconds in parts.items()}
    return found | {"replayed": engine.graphs.sizes}


class _Scripted:
    """Device memory with a probability or a text, read by captured rounds."""

    def __init__(self, values: list[float]) -> None:
        self._values = torch.tensor(values)

    def to(self, device: torch.device) -> None:
        assert self._values.device == device, "made where the engine runs"

    def set(self, value: float) -> None:
        self._values.fill_(value)

    @property
    def values(self) -> Tensor:
        return self._values


def _scripted(values: list[float]) -> _Scripted:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return _Scripted(values)


@contextmanager
def _scripted_acceptance() -> Iterator[_Scripted]:
    """Make the target accept each draft token with a given probability."""
    chance, accept = _scripted([1.0]), rounds_module.accept_and_commit

    def scripted(proposal: Proposal, chosen: Tensor, *committed: Tensor) -> Accepted:
        wanted = torch.rand(proposal.tokens.shape, device=chosen.device) < chance.values
        parents = proposal.parents
        if parents is None:
            place = torch.arange(proposal.tokens.shape[1], device=chosen.device).expand_as(proposal.tokens)
        else:
            place = parents
        # The target's token at a node is that of an accepted child, if any.
        scripted = chosen.scatter(1, place, torch.where(wanted, proposal.tokens, -1))
        return accept(proposal, torch.where(scripted < 0, chosen, scripted), *committed)

    rounds_module.accept_and_commit = scripted
    try:
        yield chance
    finally:
        rounds_module.accept_and_commit = accept


@contextmanager
def _repeated_text(text: list[int]) -> Iterator[_Scripted]:
    """Make the target continue with the prompt's repetitive text."""
    tokens, sample = _scripted([float(token) for token in text]), rounds_module.sample

    def scripted(logits: Tensor, batch: SamplingMetadata) -> Tensor:
        chosen = sample(logits, batch)
        repeated = tokens.values.long()[batch.position.long() % len(text)]
        return torch.where(chosen < -1, chosen, repeated)

    rounds_module.sample = scripted
    try:
        yield tokens
    finally:
        rounds_module.sample = sample


def table(found: dict[str, Any]) -> str:
    """Table of round times in plain steps of the same batch, and tokens/s relative to plain decoding."""
    plain = {point["batch"]: point for point in found["points"] if point["what"] == "plain" and "step_us" in point}
    lines = [
        "| | requests | round, µs | in plain steps | tokens a round | tokens/s | of plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in found["points"]:
        if "step_us" not in point or point["batch"] not in plain:
            continue
        beside = plain[point["batch"]]
        name = point["what"] if point.get("topk", 1) == 1 else f"{point['what']}, K = {point['topk']}"
        name += f", {point['chance']:.0%} accepted" if "chance" in point else ""
        lines.append(
            f"| {name} | {point['batch']} | {point['step_us']:,.0f} | {point['step_us'] / beside['step_us']:.2f} | "
            f"{point.get('tokens_per_round', 1):.2f} | {point['tokens_per_s']:,.0f} | "
            f"{point['tokens_per_s'] / beside['tokens_per_s']:.2f} |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=200, help="seconds; nothing is begun after them")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
