"""Fixtures of the engine's model tests: transformers as the oracle, and a stage that runs a model by hand."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # for modules that test files share


from naive_linear import NaiveLinearBackend

from attnplug import (
    AttentionBackend,
    AttentionKind,
    DType,
    ForwardBatch,
    ForwardMode,
    Geometry,
    MHAPool,
    MLAPool,
    ModelSpec,
    Refusal,
    Role,
)
from attnplug.declare.installed import missing_module
from attnplug.host import TINY_CONFIGS, HostContext, KVPools, Limits, ModelAttention, Registry, WorkspaceOwner
from attnplug.kernels import requirement_refusal, torch_dtype
from attnplug.linear import LinearStatePool
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_engine import kernels, prepare
from attnplug_engine.cli import arguments
from attnplug_engine.execution import compile_ahead
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_sparse.pools import COMPRESSED, INDEX_KEYS, CompressedPool, IndexKeyPool
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.batches import capabilities
from attnplug_testing.devices import DEVICES, INTERPRETED

# Every engine and every command looks for all plugins.
_find_plugins = prepare.load_registry


@functools.cache
def _found(*_places: str | None) -> Registry:
    return _find_plugins()


def _registry() -> Registry:
    return _found(os.environ.get("ATTNPLUG_PLUGINS"), os.environ.get("ATTNPLUG_STRICT"), *sys.path)


prepare.load_registry = arguments.load_registry = _registry


@functools.cache
def _refused(requirement: str, module: str | None, *_places: str) -> Refusal | None:
    return requirement_refusal(requirement, module)


@functools.cache
def _missing(module: str, *_places: str) -> str | None:
    return missing_module(module)


os.environ.setdefault("HF_HUB_OFFLINE", "1")

PAGE_SIZE = 4
MAX_PAGES = 64


class Stage:
    """A loaded model on a torch backend: requests in scattered pages of a poisoned pool, run step by step.

    Linear layers run on ``make_linear``, a backend over a pool of states. States of no request are poisoned, too.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        requests: int,
        make_linear: Callable[[LinearStatePool], Any] = NaiveLinearBackend,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        self.module, spec, self.dtype = loaded.module, loaded.spec, dtype
        self.page_size = page_size = math.lcm(PAGE_SIZE, spec.page_multiple)
        size = {"num_pages": MAX_PAGES, "page_size": page_size, "dtype": dtype, "device": "cpu"}
        states = None
        if spec.linear_layers:
            states = LinearStatePool(spec.layers, num_slots=2 * requests, dtype=DType.FLOAT32, device="cpu")
        self.pools = KVPools(
            mha=MHAPool(spec.layers, **size) if AttentionKind.MHA in spec.kinds else None,
            mla=MLAPool(spec.layers, **size) if AttentionKind.MLA in spec.kinds else None,
            linear=states,
            caches={
                **({INDEX_KEYS: IndexKeyPool(spec.layers, **size)} if spec.index_layers else {}),
                **({COMPRESSED: CompressedPool(spec.layers, drafts=4, **size)} if spec.compressed_layers else {}),
            },
        )
        for cache in self._caches():
            cache.fill_(float("nan"))
        self.backend: Any = self._full_backend(spec, requests) if spec.full_layers else None
        self.slots = None
        if states is not None:
            self.backend = HybridLinearBackend(self.backend, make_linear(states), spec)
            slots = range(2 * requests)
            self.slots = torch.tensor(list(slots[1::2][::-1]))  # with gaps, and not in the order of the requests
            for state in self.states():
                state[list(slots[0::2])] = float("nan")
        self.attention = ModelAttention(self.backend, self.pools)
        allocator = PageAllocator(MAX_PAGES)
        self.table = SlotTable(allocator, page_size=page_size, max_requests=requests, max_pages=MAX_PAGES)
        taken = allocator.allocate(MAX_PAGES)
        allocator.release(taken[1::2] + taken[0::2])  # so that neighbours in a request are none in the pool
        self.rows = [self.table.admit() for _ in range(requests)]

    def _full_backend(self, spec: ModelSpec, requests: int) -> AttentionBackend:
        host = HostContext(
            model=spec,
            device=torch.device("cpu"),
            dtype=torch_dtype(self.dtype),
            kv_dtype=self.dtype,
            page_size=self.page_size,
            limits=Limits(requests, 4096, 4096),
            pools=self.pools,
            workspace=WorkspaceOwner(),
        )
        name, kind = ("torch_sparse", TorchSparseBackend) if self.pools.caches else ("torch_native", TorchNativeBackend)
        roles = frozenset({Role.PREFILL, Role.DECODE})
        return kind(host.for_backend(name, capabilities(name), roles=roles))

    def step(self, new_tokens: Sequence[Sequence[int]], mode: ForwardMode = ForwardMode.EXTEND) -> list[Tensor]:
        """Run every request by its new tokens; logits ``[new tokens, vocab]`` of each."""
        positions = []
        for row, tokens in zip(self.rows, new_tokens, strict=True):
            start = self.table.length(row)
            positions += range(start, start + len(tokens))
            self.pools.copy_pages(self.table.extend(row, len(tokens)))
        page_table, seq_lens = self.table.batch(self.rows)
        counts = [len(tokens) for tokens in new_tokens]
        geometry = Geometry.of_lengths(
            mode, page_table, counts, seq_lens.tolist(), self.page_size, seq_lens=seq_lens, state_slots=self.slots
        )
        ids = torch.tensor([token for tokens in new_tokens for token in tokens])
        return list(self.forward(ForwardBatch(geometry, ids, torch.tensor(positions))).split(counts))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits ``[tokens, vocab]`` of a batch."""
        with torch.inference_mode(), self.attention.running() as attention:
            attention.plan(batch)
            hidden = self.module(batch.input_ids, batch.positions, batch)
            logits = self.module.logits(hidden)
        assert logits.dtype is torch.float32
        return logits

    def run(self, sequences: Sequence[Sequence[int]], decoded: int) -> list[Tensor]:
        """Logits ``[tokens, vocab]`` of whole sequences: an extend, one after a prefix, ``decoded`` decode steps."""
        prompts = [list(sequence[: len(sequence) - decoded]) for sequence in sequences]
        halves = [(len(prompt) + 1) // 2 for prompt in prompts]
        first = self.step([prompt[:half] for prompt, half in zip(prompts, halves, strict=True)])
        parts = [[logits] for logits in first]
        rest = [prompt[half:] for prompt, half in zip(prompts, halves, strict=True)]
        steps = [(rest, ForwardMode.EXTEND)]
        steps += [([[sequence[len(sequence) - left]] for sequence in sequences], ForwardMode.DECODE)
                  for left in range(decoded, 0, -1)]  # fmt: skip
        for tokens, mode in steps:
            for part, logits in zip(parts, self.step(tokens, mode), strict=True):
                part.append(logits)
        return [torch.cat(part) for part in parts]

    def latent_rows(self, layer_id: int, request: int) -> Tensor:
        """The cached rows ``[tokens, row_dim]`` of a request."""
        row = self.rows[request]
        assert self.pools.mla is not None
        pages = self.pools.mla.rows(layer_id)[list(self.table.pages(row))]
        return pages.flatten(0, 2)[: self.table.length(row)]

    def _caches(self) -> list[Tensor]:
        mha, mla = self.pools.mha, self.pools.mla
        caches = [] if mla is None else [mla.rows(layer_id) for layer_id in mla.layer_ids]
        if mha is not None:
            caches += [cache(layer_id) for layer_id in mha.layer_ids for cache in (mha.keys, mha.values)]
        if INDEX_KEYS in self.pools.caches:
            keys = self.pools.cache(INDEX_KEYS)
            caches += [keys.keys(layer_id) for layer_id in keys.layer_ids]
        if COMPRESSED in self.pools.caches:
            pool = self.pools.cache(COMPRESSED)
            held = [cache(layer_id) for layer_id in pool.layer_ids for cache in (pool.entries, pool.index)]
            caches += [memory for cache in held if cache is not None for memory in (cache.entries, cache.tokens)]
        return caches

    def states(self) -> list[Tensor]:
        """The states of all linear layers, with a row for each slot."""
        linear = self.pools.linear
        assert linear is not None
        states = [state(layer_id) for layer_id in linear.layer_ids for state in (linear.recurrent, linear.conv)]
        return [state for state in states if state is not None]


SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers has under another name."""


class Oracle:
    """A transformers model with random weights, and the folder that it was saved to."""

    def __init__(self, folder: Path, model_type: str, changes: dict[str, Any], max_shard_size: str = "5GB") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        # Types that have no tiny model of their own look like Llama's.
        keys = {**TINY_CONFIGS.get(model_type, TINY_CONFIGS["llama"]), **changes}
        del keys["model_type"], keys["architectures"]
        torch.manual_seed(1)
        config = AutoConfig.for_model(SAME_AS.get(model_type, model_type), **keys)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():  # norms of 1 and biases of 0 would hide that they are missing
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if (tensor.dim() == 1 or name.endswith("_bias")) and "inv_freq" not in name:
                    tensor.add_(0.2 * torch.randn_like(tensor))
                elif "tid2eid" in name:
                    tensor.random_(config.n_routed_experts)
        self.folder = folder
        self.model.save_pretrained(folder, max_shard_size=max_shard_size)
        if model_type in SAME_AS:
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """``[tokens, vocab]`` of a whole sequence at once."""
        if (key := tuple(tokens)) not in self._logits:
            with torch.inference_mode():
                self._logits[key] = self.model(torch.tensor([key])).logits[0]
        return self._logits[key]

    def cache(self, tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)]), use_cache=True).past_key_values


@pytest.fixture(autouse=True)
def _quiet_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True)
def _installed_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the checks for installed libraries and modules per ``sys.path``: every engine repeats them for all
    backends."""

    def refused(requirement: str, module: str | None = None) -> Refusal | None:
        return _refused(requirement, module, *sys.path)

    def missing(module: str) -> str | None:
        return _missing(module, *sys.path)

    monkeypatch.setattr("attnplug.declare.spec.requirement_refusal", refused)
    monkeypatch.setattr("attnplug.declare.installed.missing_module", missing)


@pytest.fixture(scope="session")
def oracle_type() -> type[Oracle]:
    """For oracles that several tests share."""
    return Oracle


@pytest.fixture
def make_oracle(tmp_path: Path) -> Callable[..., Oracle]:
    """Saves a random transformers model of a type, with changes to its tiny config, and returns both."""

    def make(model_type: str, folder: str = "checkpoint", max_shard_size: str = "5GB", **changes: Any) -> Oracle:
        return Oracle(tmp_path / folder, model_type, changes, max_shard_size)

    return make


@pytest.fixture(scope="module")
def shared_oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """The oracle of a tiny model, for tests that change neither it nor its folder."""

    @functools.cache
    def shared(model_type: str) -> Oracle:
        return Oracle(tmp_path_factory.mktemp(model_type), model_type, {})

    return shared


@pytest.fixture
def make_stage() -> type[Stage]:
    return Stage


@pytest.fixture
def idle() -> ForwardBatch:
    """A batch without requests, as a rank runs that has none."""
    none = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros(0, 1, dtype=torch.int32)
    geometry = Geometry.of_lengths(ForwardMode.IDLE, table, [], [], PAGE_SIZE, state_slots=none)
    return ForwardBatch(geometry, none, none)


@pytest.fixture
def sequences() -> list[list[int]]:
    """Token ids of three requests of different lengths. Tests decode the last 8 tokens of each one by one."""
    random = torch.Generator().manual_seed(7)
    return [torch.randint(0, 128, (length,), generator=random).tolist() for length in (8 + 17, 8 + 2, 8 + 30)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let child processes receive SIGINT even if this process ignores it, as in the background of a shell without job
    control."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Replace the recording process by a script; returns a function that writes it, and the cache's folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "_MODULE", "recorder")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*events: dict[str, object], end: str = "") -> None:
        started = f"from pathlib import Path; Path({str(tmp_path / 'started')!r}).open('a').write('x')"
        read = "import sys; assert b'tiny:llama' in sys.stdin.buffer.read()"  # pickle would import torch
        lines = [
            "print('a library is imported')",
            started,
            read,
            *(f"print({json.dumps(event)!r})" for event in events),
            end,
        ]
        (tmp_path / "recorder.py").write_text("\n".join(lines))

    return write


@pytest.fixture(
    params=[
        "torch",
        pytest.param("interpreted", marks=INTERPRETED),
        pytest.param("cuda", marks=DEVICES[1].marks),
    ]
)
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device for each implementation of functions with kernels: torch, interpreted kernels, and a GPU."""
    if request.param == "interpreted":
        monkeypatch.setattr(kernels, "usable", lambda _x: True)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let every engine run on a backend whose captured steps run the same calls again (``captured_prefills``)."""
    from captured_prefills import AnyLinear
    from refilled_native import AnyBatch, build

    def use(kind: Any = AnyBatch, linear: Any = AnyLinear) -> None:
        build_native = functools.partial(build, kind=kind, linear=linear)
        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build_native)

    use()
    return use
