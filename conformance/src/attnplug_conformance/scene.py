"""Test scenes: a backend, scattered pages, NaN in all memory that must not be read, and float64 references.

The model has three layers; the middle one is under test. The caches of the others are NaN, and so are rows that belong
to no request. ``zero_region`` names a region filled with zeros instead: a diagnosis finds the
region that was read by zeroing one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from weakref import ref

import torch
from torch import Tensor

from attnplug import (
    AttentionBackend,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    LayerSpec,
    ModelSpec,
    Role,
)
from attnplug.contract.batch import describe_result
from attnplug.host import KVPools, Limits, plan_forward
from attnplug.kernels import torch_dtype
from attnplug.machine.runtime import runtime_of
from attnplug.sparse import Coordinator
from attnplug_conformance.arithmetic import (
    NAN,
    as_bytes,
    pad_rows,
    poison,
    tolerance,
    uninitialized_as_nan,
    watched,
)
from attnplug_conformance.case import FIRST, LAST, LAYER, Case
from attnplug_conformance.padding import padded
from attnplug_conformance.reference import Rules, attention, tree_bits
from attnplug_conformance.scene_pools import first_page, make_pools
from attnplug_conformance.stored_rows import StoredRows, format_of
from attnplug_conformance.subject import Subject

POISONED = {
    "tail": "rows beyond the last token of a request, on its last page",
    "table": "a page outside its table: page table entries beyond a request's last page",
    "free": "a page that belongs to no request of the batch",
    "new": "the row of a new token, which it had not written to its slot; write new rows before they are read",
    "first": f"the cache of layer {FIRST}, while running layer {LAYER}",
    "last": f"the cache of layer {LAST}, while running layer {LAYER}",
    "all": "memory that belongs to no request: beyond the last token, and outside its table",
}
"""Regions that must not be read, with the message for a backend that reads them."""
MAX_NEGATIVE_PRODUCT = 40_000.0
"""Bound of negative products of queries and keys. FlashInfer masks them with -50,000, far below any model's."""
SCRATCH_BYTES = 1 << 20
"""Number of leading bytes of a workspace that are poisoned and inspected; workspaces may be large."""

GUARD_BYTES = 4096
"""Number of bytes behind a workspace that show whether a kernel wrote beyond its end."""


@dataclass(frozen=True, eq=False)
class Output:
    """Output of one call: result, log-sum-exp if requested, seconds of planning and running."""

    out: Tensor
    lse: Tensor | None
    plan_s: float
    run_s: float


class NotATensor(Exception):
    """A backend returned something other than a tensor, which no further check or diagnosis can inspect."""


class Scene:
    """A backend over a poisoned pool with the cached prefixes of a case, and the new rows of its requests."""

    diagnosed = True
    """True if wrong results are diagnosed, which costs many times the run itself."""

    def __init__(
        self,
        subject: Subject,
        case: Case,
        zero_region: str | None = None,
        backend: AttentionBackend | None = None,
        roles: frozenset[Role] | None = None,
    ) -> None:
        self.subject, self.case, self.device, self.layer = subject, case, subject.device, case.layer
        assert case.page_size is not None and case.dtype is not None
        self.page_size, self.dtype = case.page_size, torch_dtype(case.dtype)
        self.format = format_of(case.kv_dtype or case.dtype)
        self.coordinator: Coordinator | None = None
        self.scratch: list[tuple[ref[Tensor], bool]] = []
        """Live buffers of the backend's workspaces, and True if the buffer must stay zero."""
        self.random = torch.Generator().manual_seed(case.seed)
        self.new = [new for _, new in case.lengths]
        self.totals = [before + new for before, new in case.lengths]
        self.page_table, self.num_pages, self.poisoned_page = self._page_table()
        self.pools = self._pools(zero_region)
        self.problem = case.problem(self.device.type, subject.sm, subject.architecture)
        self.rows = rows = sum(self.new) + case.padding
        """Number of tokens of the newest batch, padding included."""
        requests = len(self.new) + case.padded_requests
        longest = self.page_table.shape[1] * self.page_size
        limits = Limits(max(requests, 1), max(rows + 64, 128), max(longest, 512), case.lanes)
        if case.at_limits:
            limits = Limits(requests, rows, max(self.totals))
        self.model = ModelSpec("conformance", "conformance", case.layers, 1 << 20)
        self.limits = limits
        self.backend = backend or subject.build(
            self.model, self.problem, case.role, self.pools, limits, roles, self.coordinator, self._allocate, case.ranks
        )
        key_dim, value_dim, kv_heads = self.widths
        self.q = self.normal(sum(self.new), self.layer.num_heads, key_dim)
        if case.mla is not None:  # an absorbed query is wider than head_dim; keep the variance of the logits
            self.q = (self.q.float() * (self.layer.head_dim / key_dim) ** 0.5).to(self.dtype)
        self.keys = [self.normal(total, kv_heads, key_dim) for total in self.totals]
        self.keys = [self._with_scales(keys) for keys in self.keys]
        self.share(self.keys)
        if case.magnitude != 1.0:
            self._lower_first_logits()
        self.values = [self._with_scales(self.normal(total, kv_heads, value_dim)) for total in self.totals]
        self.share(self.values)
        if case.mla is not None:
            self.values = [keys[..., :value_dim] for keys in self.keys]
        # In a long context a small sink would make no difference.
        level = math.log(max(self.totals, default=1))
        self.sinks = self.normal(self.layer.num_heads).float() + level if case.sinks else None
        self.store(LAYER, [(0, before) for before, _ in case.lengths])
        if zero_region == "tail":
            self._zero_rows((total, -(-total // self.page_size) * self.page_size) for total in self.totals)
        if zero_region == "new":
            self._zero_rows((before, before + new) for before, new in case.lengths)

    # Memory

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of a cached key and of a value, and the number of KV heads."""
        mla = self.case.mla
        if mla is not None:
            return mla.row_dim, mla.kv_lora_rank, 1
        return self.layer.head_dim, self.layer.v_head_dim, self.layer.num_kv_heads

    def normal(self, *shape: int) -> Tensor:
        """Return normal random values, scaled by the case's magnitude, in the case's dtype."""
        made = torch.randn(*shape, generator=self.random) * self.case.magnitude
        return made.to(self.dtype).to(self.device)

    def _with_scales(self, rows: Tensor) -> Tensor:
        """Vary the magnitudes of rows and of groups of values, so that the scales of a quantized format differ."""
        if not self.format.in_bytes:
            return rows
        group, (count, _, width) = self.format.group, rows.shape
        by_group = torch.tensor([1.0, 0.25, 2.0, 0.5])[torch.arange(width) // group % 4] if group > 1 else 1.0
        by_row = torch.ones(count) if group > 2 else torch.tensor([1.0, 0.5, 2.0])[torch.arange(count) % 3]
        return (rows * (by_row[:, None, None] * by_group).to(self.device)).to(self.dtype)

    def _allocate(self, nbytes: int, device: torch.device, zeroed: bool) -> Tensor:
        """Allocate a workspace buffer. Scratch memory starts as NaN, as if another backend had used it.

        Memory behind it is NaN too, and must stay so.
        """
        whole = (torch.zeros if zeroed else torch.empty)(nbytes + GUARD_BYTES, dtype=torch.uint8, device=device)
        whole[nbytes:] = 0xFF
        buffer = whole[:nbytes]
        if not zeroed:
            buffer[:SCRATCH_BYTES] = 0xFF
        self.scratch.append((ref(buffer), zeroed))
        return buffer

    def _lower_first_logits(self) -> None:
        """Give the first query of each request without a prefix, which has a single logit, a very low one.

        Queries whose logits are all too low for ``MAX_NEGATIVE_PRODUCT`` are negated.
        """
        scale, groups = self.layer.scale, self.layer.num_heads // self.keys[0].shape[1]
        most = MAX_NEGATIVE_PRODUCT * scale
        for start, keys, (before, new) in zip(
            accumulate(self.new, initial=0), self.keys, self.case.lengths, strict=False
        ):
            if not new:
                continue
            rows = slice(start, start + new)
            unpacked = keys.repeat_interleave(groups, 1).double()
            logits = torch.einsum("qhd,khd->qhk", self.q[rows].double(), unpacked) * scale
            hidden = torch.ones(new, before + new, dtype=torch.bool, device=self.device).triu(before + 1)
            highest = logits.masked_fill(hidden[:, None], float("-inf")).amax(-1, keepdim=True)
            self.q[rows] = torch.where(highest < -most, -self.q[rows], self.q[rows])
            if not before:
                lowest = scale * unpacked[0].square().sum(-1, keepdim=True)
                self.q[start] = (-unpacked[0] * (most / lowest).clamp(max=1.0)).to(self.dtype)

    def _page_table(self) -> tuple[Tensor, int, int]:
        """Return the page table ``[requests, width]`` on the host, the page count, and the page of unused entries."""
        needed = [-(-total // self.page_size) for total in self.totals]
        requests, width = len(needed), max([*needed, 1]) + (not self.case.at_limits)
        start = self.first_page = first_page(self.case, self.widths)
        pages = start + requests * width + 3
        orders = {
            **dict.fromkeys(
                ("shuffled", "far", "wide"),
                lambda: start + torch.randperm(pages - start - 1, generator=self.random),
            ),
            "contiguous": lambda: torch.arange(pages - 1),
            "interleaved": lambda: torch.arange(requests * width).view(width, requests).T.flatten(),
            "descending": lambda: torch.arange(pages - 1).flip(0),
        }
        order = orders[self.case.pages]()
        poisoned_page = pages - 1
        table = order[: requests * width].view(requests, width).int()
        for request, count in enumerate(needed):
            table[request, count:] = poisoned_page if self.case.unused is None else self.case.unused
        for request, count in enumerate(self.case.shared):
            table[request, :count] = table[request - 1, :count]
        return table, pages, poisoned_page

    def share(self, rows: list[Tensor]) -> None:
        """Copy the rows of shared pages from request to request. ``rows`` are ``[tokens, …]`` of each request."""
        for request, count in enumerate(self.case.shared):
            rows[request][: count * self.page_size] = rows[request - 1][: count * self.page_size]

    def _pools(self, zero_region: str | None) -> KVPools:
        pools = make_pools(self.case, self.format, self.widths[0], self.num_pages, self.device)
        first = self.first_page if self.case.pages == "wide" else 0  # writing to all of a wide cache would take minutes
        for layer_id in (FIRST, LAYER, LAST):
            for whole in self.cache_tensors(layer_id, pools):
                memory = whole[first:]
                poison(memory)
                if (
                    zero_region is not None and zero_region == {FIRST: "first", LAST: "last"}.get(layer_id)
                ) or zero_region == "all":
                    memory.copy_(torch.tensor(0.0))
                elif layer_id == LAYER and zero_region == "table":
                    as_bytes(whole)[self.poisoned_page] = 0
                elif layer_id == LAYER and zero_region == "free":
                    used = set(self.page_table.flatten().tolist())
                    as_bytes(whole)[[page for page in range(first, self.num_pages) if page not in used]] = 0
        return pools

    def cache_tensors(self, layer_id: int, pools: KVPools | None = None) -> tuple[Tensor, ...]:
        """Return all tensors of a layer's cache, ``[pages, page_size, heads, …]`` each."""
        return tuple(part for parts in self.contents(layer_id, pools) for part in parts)

    def contents(self, layer_id: int, pools: KVPools | None = None) -> tuple[tuple[Tensor, ...], ...]:
        """Return the tensors (format parts) of a layer's keys and of its values, or of its latent rows."""
        pools = pools or self.pools
        if pools.mla is not None:
            return (pools.mla.parts(layer_id),)
        assert pools.mha is not None
        return pools.mha.parts(layer_id)

    @property
    def stored_rows(self) -> tuple[StoredRows, ...]:
        """Codecs of each of the layer's ``contents``."""
        if self.case.mla is not None:
            return (StoredRows(self.format, self.widths[0], self.case.mla.qk_rope_head_dim),)
        return StoredRows(self.format, self.widths[0]), StoredRows(self.format, self.widths[1])

    def scales(self, layer_id: int) -> tuple[float, ...]:
        """Return the layer scale of each of a layer's ``contents``; 1 for formats without one."""
        if self.pools.mla is not None:
            return (self.pools.mla.scale(layer_id),)
        assert self.pools.mha is not None
        return self.pools.mha.scales(layer_id)

    def cache_rows(self) -> tuple[list[Tensor], ...]:
        """Return the rows of every request, in the order of ``contents``."""
        return (self.keys,) if self.case.mla is not None else (self.keys, self.values)

    def store(self, layer_id: int, spans: list[tuple[int, int]]) -> None:
        """Write rows ``start … stop`` of every request directly into the cache, by the page table."""
        contents, scales = self.contents(layer_id), self.scales(layer_id)
        for parts, rows, scale, stored in zip(contents, self.cache_rows(), scales, self.stored_rows, strict=True):
            for request, (start, stop) in enumerate(spans):
                page, offset = self.places(request, start, stop)
                for memory, cells in zip(parts, stored.encode(rows[request][start:stop], scale), strict=True):
                    device = memory.device  # the host, with HiSparse
                    as_bytes(memory)[page.to(device), offset.to(device)] = as_bytes(cells).to(device)

    def read(self, pages: Tensor, offsets: Tensor) -> list[Tensor]:
        """Return rows ``[rows, heads, width]`` float32 of the layer under test: keys and values, or latent rows."""
        found = []
        for parts, scale, stored in zip(self.contents(LAYER), self.scales(LAYER), self.stored_rows, strict=True):
            cells = [as_bytes(memory)[pages.to(memory.device), offsets.to(memory.device)] for memory in parts]
            typed = [each.view(memory.dtype) for each, memory in zip(cells, parts, strict=True)]
            found.append(stored.decode(typed, scale))
        return found

    def places(self, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return pages and offsets of rows ``start … stop`` of a request."""
        position = torch.arange(start, stop)
        page = self.page_table[request, position // self.page_size].long()
        return page.to(self.device), (position % self.page_size).to(self.device)

    def _zero_rows(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fill rows ``start … stop`` of every request with zeros."""
        for request, (start, stop) in enumerate(spans):
            page, offset = self.places(request, start, stop)
            for memory in self.cache_tensors(LAYER):
                as_bytes(memory)[page.to(memory.device), offset.to(memory.device)] = 0

    def describe_row(self, page: int, offset: int) -> str:
        """Describe a cache row by its request and token."""
        for request, total in enumerate(self.totals):
            pages = self.page_table[request, : -(-total // self.page_size)].tolist()
            if page in pages:
                token = pages.index(page) * self.page_size + offset
                if token < total:
                    return f"request {request}, token {token}"
                return f"page {page}, row {offset}, beyond the last token of request {request}"
        return f"page {page}, row {offset}, which belongs to no request"

    # Batches

    def geometry(self, *, lane: int = 0, slots: Tensor | None = None) -> Geometry:
        case, device = self.case, self.device
        made = Geometry.of_lengths(
            case.mode,
            self.page_table.to(device, copy=True),  # a backend that writes to it must not change the reference
            self.new,
            self.totals,
            self.page_size,
            lane=lane,
            slots=slots,
        )
        if not case.exact:
            made = replace(made, host=None, max_seq_len=self.page_table.shape[1] * self.page_size)
        if case.trees is not None:
            made = replace(made, tree=tree_bits(case.trees, device))
        if case.padded_requests:
            made = padded(made, made.requests + case.padded_requests)
        return made

    def batch(self, *, lane: int = 0, slots: Tensor | None = None) -> ForwardBatch:
        geometry = self.geometry(lane=lane, slots=slots)
        self.rows = geometry.rows + self.case.padding
        return ForwardBatch(geometry, input_ids=torch.zeros(self.rows, dtype=torch.int64, device=self.device))

    def new_rows(self, of: list[Tensor]) -> Tensor:
        """Return the new rows of all requests, from the rows ``of`` each request."""
        return torch.cat([rows[before:] for rows, (before, _) in zip(of, self.case.lengths, strict=True)])

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q, k and v with ``rows`` rows, padding included.

        Padding of k and v is 5.0: NaN written to poisoned memory would not be detected.
        """
        k, v = self.new_rows(self.keys), None if self.case.mla is not None else self.new_rows(self.values)
        return pad_rows(self.q, rows), pad_rows(k, rows, 5.0), None if v is None else pad_rows(v, rows, 5.0)

    # Running

    def plan(self, batch: ForwardBatch) -> ForwardBatch:
        with uninitialized_as_nan(self.device), watched(_tensors_of(batch.geometry)):
            plan_forward(self.backend, batch)
        return batch

    def forward(
        self,
        batch: ForwardBatch,
        inputs: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
        *,
        layer: LayerSpec | None = None,
        save: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        """Call the backend with a planned batch. Raises :class:`NotATensor`."""
        q, k, v = inputs or self.inputs(batch.num_tokens)
        if self.sinks is not None:
            extras = replace(extras or ForwardExtras(), sinks=self.sinks)
        backend = self.backend
        run = backend.forward_decode if batch.forward_mode.is_decode else backend.forward_extend
        given = {"q": q, "k": k, "v": v, **_tensors_of(batch.geometry)}
        with uninitialized_as_nan(self.device), watched(given):
            out: object = run(q, k, v, layer or self.layer, batch, save_kv_cache=save, extras=extras)
        if not isinstance(out, Tensor):
            name = "forward_decode" if batch.forward_mode.is_decode else "forward_extend"
            raise NotATensor(f"{name} returned {describe_result(out)}; it must return one tensor")
        return out

    def run(self, batch: ForwardBatch | None = None, *, lse: bool = False, save: bool = True) -> Output:
        """Plan the batch if necessary and run it."""
        batch = batch or self.batch()
        started = self.now()
        if batch.plan is None:
            self.plan(batch)
        planned = self.now()
        sums = torch.full((batch.num_tokens, self.layer.num_heads), NAN, device=self.device) if lse else None
        inputs = self.inputs(batch.num_tokens) if save else (pad_rows(self.q, batch.num_tokens), None, None)
        out = self.forward(batch, inputs, save=save, extras=None if sums is None else ForwardExtras(lse=sums))
        return Output(out, sums, planned - started, self.now() - planned)

    def now(self) -> float:
        """Synchronize the device and return the time in seconds."""
        if (module := runtime_of(self.device).module) is not None:
            module.synchronize()
        return time.perf_counter()

    # Expected results

    def rules(self, layer: LayerSpec | None = None) -> Rules:
        layer = layer or self.layer
        return Rules(layer.scale, layer.sliding_window, layer.logit_cap)

    def stored(self, request: int, *, scaled: tuple[bool, bool] = (True, True)) -> tuple[Tensor, Tensor]:
        """Return keys and values of a request as cached, in float64.

        ``scaled`` says whether layer scales of keys and values are applied; a diagnosis leaves one out.
        """
        found = [
            stored.read_back(rows[request], scale, scaled=used).double()
            for stored, rows, scale, used in zip(
                self.stored_rows, self.cache_rows(), self.case.kv_scales, scaled, strict=False
            )
        ]
        if self.case.mla is not None:
            latent = self.stored_rows[0].read_back(self.keys[request], self.case.kv_scales[0], scaled=scaled[1])
            found.append(latent.double()[..., : self.widths[1]])
        return found[0], found[1]

    def read_by_tables(self, tables: Tensor) -> Tensor:
        """Return the output of a backend that reads by other page tables; NaN if it reads poisoned rows."""
        outs = []
        for request, q in enumerate(self.q.split(self.new)):
            position = torch.arange(self.totals[request])
            page = tables[request, position // self.page_size].long().clamp(0, self.num_pages - 1).to(self.device)
            offset = (position % self.page_size).to(self.device)
            read = [rows.double() for rows in self.read(page, offset)]
            keys, values = read[0], read[-1][..., : self.widths[1]]
            outs.append(attention(q, keys, values, self.rules(), self.sinks)[0])
        return torch.cat(outs)

    def wanted(
        self,
        rules: Rules | None = None,
        *,
        scaled: tuple[bool, bool] = (True, True),
        sinks: Tensor | bool = True,
        trees: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return expected output and log-sum-exp of all requests, by ``rules`` or the layer's own rules.

        ``sinks`` and ``trees``: True for the case's own.
        """
        extra = sinks if isinstance(sinks, Tensor) else self.sinks if sinks else None
        outs, sums = [], []
        for request, q in enumerate(self.q.split(self.new)):
            keys, values = self.stored(request, scaled=scaled)
            request_rules = rules or self.rules()
            if self.case.trees is not None and trees:
                request_rules = replace(request_rules, parents=self.case.trees[request])
            out, lse = attention(q, keys, values, request_rules, extra)
            outs.append(out)
            sums.append(lse)
        if not outs:
            return torch.zeros(0, self.layer.num_heads, self.widths[1]), torch.zeros(0, self.layer.num_heads)
        return torch.cat(outs), torch.cat(sums)

    @property
    def tolerance(self) -> float:
        """Largest relative error that rounding explains."""
        return tolerance(self.case, self.widths[0] + max(self.totals, default=1))

    def snapshot(self) -> dict[int, list[Tensor]]:
        """Copy the cache of every layer, as integers."""
        return {each: [as_bytes(m).clone() for m in self.cache_tensors(each)] for each in (FIRST, LAYER, LAST)}

    def changes(self, before: dict[int, list[Tensor]]) -> Iterator[tuple[int, int, int]]:
        """Yield layer, page and offset of every row that changed since a snapshot."""
        for layer_id, copies in before.items():
            for memory, copy in zip(self.cache_tensors(layer_id), copies, strict=True):
                for page, offset in (as_bytes(memory) != copy).flatten(2).any(-1).nonzero().tolist():
                    yield layer_id, page, offset

    def with_zeros(self, region: str) -> Scene:
        """Return the same scene with zeros instead of NaN in one ``POISONED`` region."""
        return Scene(self.subject, self.case, region)


def _tensors_of(geometry: Geometry) -> dict[str, object]:
    """Return the fields of a geometry by the names that failures show."""
    return {f"the batch's {field.name}": getattr(geometry, field.name) for field in fields(geometry)}
