"""Command line of ``attnplug run``. Imports no torch, so that mistakes are reported, and ranks started, at once."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attnplug import ExtendPath, Role, UsageError
from attnplug.cli.app import Commands, add_command
from attnplug_engine.cli.arguments import (
    TEXT,
    add_model_and_prompts,
    add_serving_options,
    on_each_rank,
    shared_settings,
)
from attnplug_engine.cli.prompts import PromptLine, read_prompts
from attnplug_engine.execution import signals
from attnplug_engine.request import DEFAULT_MAX_TOKENS, SamplingParams
from attnplug_engine.settings.speculation import DEFAULT_STEPS, Algorithm
from attnplug_engine.text.chat import Chat

if TYPE_CHECKING:
    from attnplug_engine.options import EngineOptions


def declare(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to core's command line."""
    parser = add_command(commands, "run", "Generate with a model on any installed backend.", run)
    add_model_and_prompts(parser, "prompt, messages or prompt_token_ids, and its own id, max_tokens, stop and so on")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message: use the chat template")
    add_engine_options(parser)
    parser.add_argument(
        "--random-weights", action="store_true", help="read only the model's config; draw random weights from --seed"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="most new tokens per prompt"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens; 0 keeps all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the most likely tokens with this total probability"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="keep tokens at least P times as likely as the best one"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends the answer and is not part of it; may be repeated",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="log probability of every token, and of the N most likely ones in its place",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="continue beyond the checkpoint's end-of-text token")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an engine, which ``attnplug warm`` has too."""
    roles = (Role.PREFILL, Role.DECODE, Role.LINEAR, Role.DRAFT)
    add_serving_options(parser, roles, chunked_prefill_size=None, seeded="sampling and of random weights")
    parser.add_argument(
        "--index-dtype", metavar="FORMAT", help="format of a sparse model's index keys (default: as --dtype)"
    )
    parser.add_argument("--num-pages", type=int, metavar="N", help="pages of the cache (default: by memory)")
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    parser.add_argument(
        "--state-slots",
        type=int,
        metavar="N",
        help="slots of linear states, for requests and snapshots (default: by --max-batch)",
    )
    parser.add_argument(
        "--inter-token-latency",
        type=float,
        default=0.05,
        metavar="SECONDS",
        help="most seconds that prefill may delay requests that decode, on a GPU",
    )
    parser.add_argument(
        "--state-checkpoint",
        type=int,
        default=1024,
        metavar="N",
        help="tokens between two snapshots of linear states",
    )
    parser.add_argument("--mla-extend", metavar="PATH", help=f"force the path of MLA prefills: {', '.join(ExtendPath)}")
    parser.add_argument("--mla-chunk-capacity", type=int, metavar="N", help="most prefix rows up-projected at a time")
    parser.add_argument(
        "--disable-overlap", action="store_true", help="schedule a step only when the previous one has finished"
    )
    parser.add_argument(
        "--enable-two-batch-overlap",
        action="store_true",
        help="run steps as two halves, on two streams on a GPU; there steps of CUDA graphs and of fewer than "
        "12288 tokens are not split, so raise --chunked-prefill-size",
    )
    parser.add_argument(
        "--cuda-graph-batch-sizes",
        metavar="N,N,…",
        help="capture decode steps for these numbers of prompts (default: several up to --max-batch)",
    )
    parser.add_argument(
        "--cuda-graph-prefill-sizes",
        metavar="N,N,…",
        help="capture prefills of up to these numbers of tokens (default: those that a GPU runs faster than the host "
        "launches them)",
    )
    parser.add_argument("--disable-cuda-graph", action="store_true", help="capture nothing")
    parser.add_argument("--disable-prefill-cuda-graph", action="store_true", help="capture decode steps only")
    parser.add_argument(
        "--enable-hisparse",
        action="store_true",
        help="keep latent rows in host memory, and on the device those that sparse layers select",
    )
    parser.add_argument(
        "--hisparse-config",
        metavar="JSON",
        help="settings of HiSparse: device_buffer_size, in rows per prompt and layer, and host_memory_gib",
    )
    _add_speculation(parser)
    parser.add_argument(
        "--check-layers", action="store_true", help="stop at the first layer whose output is not finite"
    )


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(Algorithm)
    parser.add_argument("--speculative-algorithm", metavar="NAME", help=f"speculation algorithm: {names}")
    parser.add_argument(
        "--speculative-draft-model", metavar="PATH|tiny:NAME", help="the draft's checkpoint, if it has its own"
    )
    parser.add_argument(
        "--speculative-num-steps", type=int, metavar="S", help=f"depth of a draft in tokens (default: {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--speculative-topk", type=int, metavar="K", help="branches of a draft; more than 1 make it a tree"
    )
    parser.add_argument(
        "--speculative-num-draft-tokens",
        "--speculative-tokens",  # the spelling of `explain`, which its refusals name
        type=int,
        metavar="N",
        help="rows of a prompt that are verified at once (default: steps + 1, or steps × branches + 1)",
    )
    parser.add_argument(
        "--enable-plan-stream",
        action="store_true",
        help="plan eager rounds ahead of time on a side stream",
    )


def run(parsed: argparse.Namespace) -> int:
    options = engine_options(parsed)
    return on_each_rank(parsed, _prompts, partial(_generate, options=options), speculation=options.speculation)


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    """Return the parsed options of an engine."""
    from attnplug.host import ExtendPolicy  # imported here, as --help needs neither
    from attnplug_engine.options import EngineOptions

    policy = ExtendPolicy()
    if parsed.mla_extend is not None:
        policy = replace(policy, forced=ExtendPath.parse(parsed.mla_extend))
    if parsed.mla_chunk_capacity is not None:
        policy = replace(policy, chunk_capacity=parsed.mla_chunk_capacity)
    return EngineOptions(
        **shared_settings(parsed),
        index_dtype=parsed.index_dtype,
        random_weights=parsed.random_weights,
        num_pages=parsed.num_pages,
        prefix_cache=not parsed.no_prefix_cache,
        state_slots=parsed.state_slots,
        state_checkpoint=parsed.state_checkpoint,
        inter_token_latency=parsed.inter_token_latency,
        extend_policy=policy,
        ignore_eos=parsed.ignore_eos,
        check_layers=parsed.check_layers,
        cuda_graph_batch_sizes=_sizes("--cuda-graph-batch-sizes", parsed.cuda_graph_batch_sizes),
        cuda_graph_prefill_sizes=_sizes("--cuda-graph-prefill-sizes", parsed.cuda_graph_prefill_sizes),
        disable_prefill_cuda_graph=parsed.disable_prefill_cuda_graph,
        disable_cuda_graph=parsed.disable_cuda_graph,
        overlap=False if parsed.disable_overlap else None,
        two_batch_overlap=parsed.enable_two_batch_overlap,
        speculative_algorithm=parsed.speculative_algorithm,
        speculative_draft_model=parsed.speculative_draft_model,
        speculative_num_steps=parsed.speculative_num_steps,
        speculative_topk=parsed.speculative_topk,
        speculative_num_draft_tokens=parsed.speculative_num_draft_tokens,
        plan_stream=parsed.enable_plan_stream,
        enable_hisparse=parsed.enable_hisparse,
        hisparse_config=parsed.hisparse_config,
    )


def _sizes(flag: str, text: str | None) -> tuple[int, ...] | None:
    """Parse ``1,2,4`` as numbers."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a list of numbers; write them like 1,2,4,8") from None


def _generate(parsed: argparse.Namespace, lines: list[PromptLine], options: EngineOptions) -> int:
    if any(isinstance(line.prompt, Chat) for line in lines):
        from attnplug_engine.text.template_process import PROCESS

        PROCESS.start()  # it is ready when the model is loaded
    with signals.exit_immediately():
        from attnplug_engine.cli.generate import generate

    return generate(parsed, lines, options)


def _prompts(parsed: argparse.Namespace) -> list[PromptLine]:
    defaults = SamplingParams(
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        min_p=parsed.min_p,
        stop=tuple(parsed.stop),
        logprobs=parsed.logprobs,
    )
    if parsed.prompts is not None:
        return read_prompts(parsed.prompts, defaults, chat=parsed.chat, plain=parsed.prompts_format == TEXT)
    return [PromptLine(Chat.of_user(parsed.prompt) if parsed.chat else parsed.prompt, defaults, "--prompt")]
