"""Text or tokens in, tokens out: a model, a backend, a scheduler and a sampler as one thing."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnplug import (
    BackendRequest,
    DType,
    ExtendPolicy,
    ForwardMode,
    Problem,
    Role,
    Selection,
    Serving,
    build_chosen,
    choose_importable,
    load_registry,
)
from attnplug.device import open_device
from attnplug.errors import BackendError, PoolError, UsageError
from attnplug.kv import torch_dtype
from attnplug.model import ModelSpec
from attnplug.model_config import load_model as load_spec
from attnplug_engine.chat import Chat
from attnplug_engine.chat_template import ChatTemplate
from attnplug_engine.models import load_model
from attnplug_engine.parallel import SINGLE, TensorParallel
from attnplug_engine.prefix_cache import CacheStatistics, PrefixCache
from attnplug_engine.request import (
    DEFAULT_MAX_TOKENS,
    LARGEST_SEED,
    FinishReason,
    Request,
    SamplingParams,
    Step,
    StepResult,
)
from attnplug_engine.runner import Capacity, ModelRunner, bytes_per_page, bytes_per_state
from attnplug_engine.sampler import BadLogits, Sampler
from attnplug_engine.scheduler import Scheduler
from attnplug_engine.tokenizer import Tokenizer, end_tokens, find_tokenizer

Prompt = str | Sequence[int] | Chat

LARGEST_BATCH = 1 << 16

_CPU_CACHE_BYTES = 1 << 30
_GPU_CACHE_SHARE = 0.85
_MOST_EMPTY_PAGES = 1 << 21
_SLOTS_A_REQUEST = 3
"""Linear states by default: a request's own, and two snapshots."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built. ``None`` means: choose for me."""

    attention_backend: str = "auto"
    role_backends: Mapping[Role, str] = field(default_factory=dict)
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device: str | None = None
    dtype: DType | None = None
    kv_dtype: DType | None = None
    page_size: int | None = None
    num_pages: int | None = None
    max_batch: int = 32
    chunked_prefill_size: int = 2048
    """Most tokens of one step; -1 for prompts in one piece."""
    prefix_cache: bool = True
    state_slots: int | None = None
    """For models with linear layers: slots for their states, of running requests and of snapshots together."""
    state_checkpoint: int = 1024
    """Tokens from one snapshot of such a state to the next, rounded up to whole pages."""
    context_length: int | None = None
    extend_policy: ExtendPolicy = field(default_factory=ExtendPolicy)
    seed: int = 0
    ignore_eos: bool = False
    """Go on past the tokens by which the checkpoint says that a text ends."""
    check_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):
            if isinstance(value := getattr(self, name), str):  # "bf16" is as good as the member
                object.__setattr__(self, name, DType.parse(value, f"--{name.replace('_', '-')}"))
        for name in ("max_batch", "num_pages", "context_length", "state_slots", "state_checkpoint"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed; give 1 or more")
        if self.max_batch > LARGEST_BATCH:
            raise UsageError(f"--max-batch {self.max_batch} is not allowed; give at most {LARGEST_BATCH}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"--seed {self.seed} is not allowed; give 0 to {LARGEST_SEED}")
        if self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1:
            raise UsageError(
                f"--chunked-prefill-size {self.chunked_prefill_size} is not allowed; give 1 or more, or -1 for prompts "
                "in one piece"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. ``text`` is ``None`` where the checkpoint has no tokenizer."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None = None


@dataclass(slots=True)
class Statistics:
    """Tokens and seconds since the engine was made. A step that does both is divided by its tokens."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, step: Step, seconds: float) -> None:
        total = step.num_tokens
        decoding = (
            total if step.mode is ForwardMode.DECODE else sum(1 for entry in step.entries if entry.request.output)
        )
        self.decode_tokens += decoding
        self.prefill_tokens += total - decoding
        self.decode_seconds += seconds * decoding / total
        self.prefill_seconds += seconds * (total - decoding) / total


class Engine:
    """A model that generates on any installed backend: ``Engine("tiny:llama", attention_backend="torch_native")``.

    Settings are the fields of :class:`EngineOptions`. Under tensor parallelism every rank makes the same calls: each
    runs the same schedule and samples the same tokens.
    """

    def __init__(
        self,
        model: str,
        options: EngineOptions | None = None,
        *,
        parallel: TensorParallel = SINGLE,
        **settings: Any,
    ) -> None:
        self.options = options = replace(options or EngineOptions(), **settings)
        spec = load_spec(model)
        device, sm = open_device(options.device)
        dtype = options.dtype or _model_dtype(spec)
        kv_dtype = options.kv_dtype or dtype
        problem = Problem(
            spec, device.type, sm, dtype, kv_dtype, page_size=options.page_size, tensor_parallel=parallel.size
        )
        request = BackendRequest(options.attention_backend, options.role_backends, options.backend_options)
        self.registry = load_registry()
        # A refusal, and a kernel library that cannot be imported, are told before a checkpoint is read.
        failed = choose_importable(self.registry, request, problem).failed
        loaded = load_model(model, dtype=torch_dtype(dtype), device=device, parallel=parallel, seed=options.seed)
        self.vocab_size = loaded.module.vocab_size
        self.tokenizer: Tokenizer | None = find_tokenizer(model, self.vocab_size)
        self.stop_token_ids = frozenset() if options.ignore_eos else end_tokens(model, loaded.config)

        def build(selection: Selection) -> ModelRunner:
            return ModelRunner(
                loaded,
                selection,
                _capacity(spec, options, selection, torch_dtype(dtype), kv_dtype, device, parallel),
                device=device,
                dtype=torch_dtype(dtype),
                kv_dtype=kv_dtype,
                parallel=parallel,
                policy=options.extend_policy,
                serving=Serving(
                    chunked_prefill_size=options.chunked_prefill_size, disable_radix_cache=not options.prefix_cache
                ),
                check_layers=options.check_layers,
            )

        self.selection, self.runner = build_chosen(self.registry, request, problem, build, failed)
        if parallel.size > 1:
            _insist_on_one_choice(self.selection, parallel, device)
        capacity = self.runner.capacity
        states = self.runner.pools.linear
        self.cache = PrefixCache(self.runner.allocator, capacity.page_size, states) if options.prefix_cache else None
        self.scheduler = Scheduler(
            self.runner.table,
            self.runner.allocator,
            self.cache,
            max_batch=capacity.max_batch,
            max_step_tokens=capacity.max_step_tokens,
            context_length=capacity.context_length,
            states=states,
            checkpoint=options.state_checkpoint,
        )
        self.sampler = Sampler(options.seed)
        self.statistics = Statistics()
        self._model = model
        self._chat_template: ChatTemplate | None = None
        self._next_id = 0

    def add(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a prompt; it takes part from the next step on. It also ends where the checkpoint says texts end."""
        if not self.stop_token_ids <= params.stop_token_ids:
            params = replace(params, stop_token_ids=params.stop_token_ids | self.stop_token_ids)
        request = Request(self._next_id, tuple(self._tokens(prompt)), params)
        self.scheduler.add(request)
        self._next_id += 1
        return request

    def abort(self, request: Request) -> None:
        """End a request now; what it has so far stays with it."""
        self.scheduler.abort(request.id)

    def step(self) -> StepResult | None:
        """Run one step; ``None`` when there is nothing to do.

        A request whose logits are not finite ends with an error; the others go on as if it had never been there.
        """
        step = self.scheduler.next_step()
        if step is None:
            return None
        started = time.perf_counter()
        try:
            sampled = self.sampler.sample(self.runner.run(step), step.sampled_requests)
        except BadLogits as error:
            ended = [self.scheduler.abort(request_id, FinishReason.ERROR) for request_id in error.request_ids]
            self.scheduler.drop_step(step)
            return StepResult({}, tuple(request for request in ended if request is not None))
        except BaseException:
            self.scheduler.drop_step(step)
            raise
        self.statistics.add(step, time.perf_counter() - started)
        return self.scheduler.finish_step(step, sampled)

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> Iterator[Update]:
        """Generate for all prompts; yields each token as it comes, and each prompt's end."""
        if isinstance(prompts, str) or not all(isinstance(prompt, str | Sequence | Chat) for prompt in prompts):
            raise UsageError(
                f"prompts is {prompts!r:.60}; give a list of prompts, each a text, a Chat or a list of token ids"
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts were given with {len(each)} sampling parameters")
        requests: list[Request] = []
        try:
            for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                with naming(f"prompt {number}"):
                    requests.append(self.add(prompt, one))
        except BaseException:  # all or none
            for request in requests:
                self.abort(request)
            raise
        yield from self.follow(requests)

    def follow(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run until these requests are finished; yields their tokens as they come, and their ends."""
        index = {request.id: number for number, request in enumerate(requests)}
        try:
            while any(request.finish_reason is None for request in requests):
                result = self.step()
                assert result is not None, "an unfinished request is work"
                for request_id, token in result.tokens.items():
                    if request_id in index:
                        yield Update(index[request_id], requests[index[request_id]], token)
                for request in result.finished:
                    if request.id in index:
                        yield Update(index[request.id], request, None)
        finally:
            for request in requests:
                self.abort(request)  # of an iterator that was left early, nothing stays behind

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Generate for all prompts, in their order. ``sampling`` are fields of ``SamplingParams``, alike for all."""
        if "stop_token_ids" in sampling:
            sampling["stop_token_ids"] = frozenset(sampling["stop_token_ids"])
        if params is None:
            params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **sampling})
        elif sampling:
            raise UsageError(f"give params or {', '.join(sampling)}, not both")
        ended = {update.index: update.request for update in self.stream(prompts, params) if update.token is None}
        return [self.completion(index, ended[index]) for index in range(len(prompts))]

    def completion(self, index: int, request: Request) -> Completion:
        """A finished request as its owner wants it."""
        assert request.finish_reason is not None
        text = None if self.tokenizer is None else self.tokenizer.decode(request.output)
        error = None
        if request.finish_reason is FinishReason.ERROR:
            error = f"the logits of prompt {index} are not finite after {len(request.output)} tokens"
        return Completion(index, list(request.output), text, request.finish_reason.value, error)

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        return None if self.cache is None else self.cache.statistics

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str | Chat):
            if self.tokenizer is None:
                raise UsageError("the checkpoint has no tokenizer.json; give the prompt as token ids")
            text = prompt if isinstance(prompt, str) else self._rendered(prompt)
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UsageError("the prompt is not text: it holds half of a surrogate pair") from None
            return self.tokenizer.encode(text, special_tokens=isinstance(prompt, str))
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise UsageError(f"token id {token!r} is not in the vocabulary; give 0 to {self.vocab_size - 1}")
        return prompt

    def _rendered(self, chat: Chat) -> str:
        if self._chat_template is None:
            self._chat_template = ChatTemplate.find(self._model)
        return self._chat_template.render(chat)


@dataclass(frozen=True, slots=True)
class Update:
    """A new token of a prompt, or its end (``token`` is ``None``)."""

    index: int
    request: Request
    token: int | None


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say of a refused prompt which one it was."""
    try:
        yield
    except (UsageError, PoolError) as error:
        raise type(error)(f"{where}: {error}") from error


def _model_dtype(spec: ModelSpec) -> DType:
    return DType.FLOAT32 if spec.dtype is None else DType.parse(spec.dtype, "--dtype")


def _insist_on_one_choice(selection: Selection, parallel: TensorParallel, device: torch.device) -> None:
    """Ranks run one schedule, so they must agree on pages. Where a backend is built on some alone, they would not."""
    chosen = {str(role): choice.chosen_name for role, choice in selection.choices.items()}
    mine = torch.tensor([zlib.crc32(repr((chosen, selection.page_size)).encode())], device=device)
    if len(set(parallel.all_gather(mine, 0).tolist())) > 1:
        raise BackendError(
            f"rank {parallel.rank} runs {', '.join(f'{role} on {name}' for role, name in chosen.items())}, and others "
            "chose otherwise: a backend could be built on some ranks alone; ask for one by --attention-backend"
        )


def _capacity(
    spec: ModelSpec,
    options: EngineOptions,
    selection: Selection,
    dtype: torch.dtype,
    kv_dtype: DType,
    device: torch.device,
    parallel: TensorParallel,
) -> Capacity:
    page_size = selection.page_size
    assert page_size is not None
    context = min(options.context_length or spec.context_length, spec.context_length)
    per_request = -(-context // page_size)
    num_pages = options.num_pages
    state_slots = options.state_slots or 0
    if spec.linear_layers and not state_slots:
        state_slots = _SLOTS_A_REQUEST * options.max_batch + 1 if options.prefix_cache else options.max_batch
    elif state_slots and not spec.linear_layers:
        raise UsageError(
            f"--state-slots {state_slots} is given, but the model has no linear-attention layer; leave it out"
        )
    if num_pages is None and not spec.full_layers:
        # A page is a number without memory then; but a config may claim any context.
        num_pages = min(per_request * options.max_batch, _MOST_EMPTY_PAGES)
    if num_pages is None:
        page = bytes_per_page(spec, page_size, kv_dtype, parallel.size)
        room = _CPU_CACHE_BYTES
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch holds for later counts as taken
            room = int(torch.cuda.mem_get_info(device)[0] * _GPU_CACHE_SHARE)
            room -= state_slots * bytes_per_state(spec, dtype, parallel)
        num_pages = min(room // page, per_request * options.max_batch)
        if num_pages < 1:
            states = f" beside {state_slots} linear states (--state-slots)" if state_slots else ""
            raise PoolError(
                f"one page of {page_size} tokens takes {page} bytes, and there are {max(room, 0)}{states}; "
                "use --page-size"
            )
    chunk = context if options.chunked_prefill_size == -1 else min(options.chunked_prefill_size, context)
    return Capacity(num_pages, page_size, options.max_batch, chunk, context, state_slots)
