"""Plans for SGLang's forward batches, one geometry per KV group: eager batches, and those of CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendError, ForwardBatch, ForwardMode, Geometry, PlanError
from attnplug.host import HostLengths, ModelAttention, TypicalLens, plan_forward
from attnplug_sglang.kv_pools import PageTable

_MODES = {
    "EXTEND": ForwardMode.EXTEND,
    "MIXED": ForwardMode.MIXED,
    "DECODE": ForwardMode.DECODE,
    "TARGET_VERIFY": ForwardMode.TARGET_VERIFY,
    "DRAFT_EXTEND_V2": ForwardMode.DRAFT_EXTEND,
    "IDLE": ForwardMode.IDLE,
}
_UNSUPPORTED = {
    "SPLIT_PREFILL": "a prefill that is split by layers (--enable-pdmux)",
    "DLLM_EXTEND": "a diffusion language model, which attends in both directions",
}


def mode_of(batch: Any) -> ForwardMode:
    """Convert a batch's forward mode. Raises :class:`BackendError` for unsupported ones."""
    name = batch.forward_mode.name
    if name not in _MODES:
        raise BackendError(
            f"the batch is of mode {name}, {_UNSUPPORTED.get(name, 'which attnplug does not know')}; use one of "
            "SGLang's own backends"
        )
    return _MODES[name]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedGroup:
    """One KV group: the attention of its layers, and its page table. ``by_batch``: lengths choose the backend."""

    attention: ModelAttention
    table: PageTable
    by_batch: bool = False


@dataclass(slots=True, eq=False)
class GroupedStep:
    """Planned batches, one per KV group, in the groups' order."""

    mode: ForwardMode
    batches: tuple[ForwardBatch, ...]
    new_tokens: int = 1
    """New tokens per request, for modes in which all requests have the same number."""
    prefix_lens: Tensor | None = None
    """SGLang's static lengths of a captured batch, without its new tokens."""
    ragged: Any = field(default=None)
    """``RaggedPlan`` of an MLA prefill as MHA, once planned."""
    index: Any = field(default=None)
    """``IndexerMetadata`` of a sparse model, once read."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a batch: upper bounds, and exact host lengths if SGLang has them."""

    rows: int
    max_seq_len: int
    max_new: int
    seq_lens: Tensor
    new_lens: Tensor | None
    host: HostLengths | None


def eager_step(batch: Any, groups: Sequence[PlannedGroup], max_context: int) -> GroupedStep:
    """Plan a batch that runs eagerly."""
    mode = mode_of(batch)
    lengths = lengths_of(batch, mode, max_context, exact=any(_needs_host_lengths(group) for group in groups))
    tree, batches = draft_trees(batch.spec_info, batch.seq_lens), []
    for group in groups:
        geometry = Geometry(
            mode,
            group.table.gather(batch.req_pool_indices, lengths.max_seq_len),
            lengths.seq_lens,
            page_size=group.table.page_size,
            rows=lengths.rows,
            max_seq_len=lengths.max_seq_len,
            max_new=lengths.max_new,
            new_lens=lengths.new_lens,
            host=lengths.host,
            typical=_typical(batch, lengths) if group.by_batch else None,
            slots=group.table.slots(batch.out_cache_loc[: lengths.rows]),
            tree=tree,
        )
        if _needs_host_lengths(group):
            geometry = geometry.with_host_lengths()
        planned = ForwardBatch(geometry)
        plan_forward(group.attention.backend, planned)
        batches.append(planned)
    return GroupedStep(mode, tuple(batches), lengths.max_new)


def _typical(batch: Any, lengths: Lengths) -> TypicalLens | None:
    """Typical lengths of a decode or verify; of extends, exact lengths choose the backend."""
    known = batch.seq_lens_cpu
    if lengths.host is not None or known is None or not batch.batch_size:
        return None
    before = 0 if mode_of(batch) is ForwardMode.DECODE else lengths.max_new
    return TypicalLens(int(known.sum()) // batch.batch_size + before, lengths.max_seq_len)


def _needs_host_lengths(group: PlannedGroup) -> bool:
    return group.attention.backend.claims.needs_cpu_seq_lens


def lengths_of(batch: Any, mode: ForwardMode, max_context: int, *, exact: bool) -> Lengths:
    """Lengths of an eager batch. Host lengths of a decode are read only if ``exact``: that takes time."""
    requests = batch.batch_size
    if mode in (ForwardMode.EXTEND, ForwardMode.MIXED) or (
        mode is ForwardMode.DRAFT_EXTEND and batch.extend_seq_lens_cpu is not None
    ):
        new, prefixes = list(batch.extend_seq_lens_cpu), list(batch.extend_prefix_lens_cpu)
        total = [before + more for before, more in zip(prefixes, new, strict=True)]
        new_lens = batch.extend_seq_lens.to(torch.int32)
        seq_lens = batch.seq_lens.to(torch.int32)
        return Lengths(
            sum(new), max(total, default=0), max(new, default=0), seq_lens, new_lens, HostLengths(new, total)
        )
    each = new_tokens(batch, mode)
    before = 0 if mode is ForwardMode.DECODE else each  # SGLang's lengths of a verify exclude its new tokens
    known = batch.seq_lens_cpu
    host = None
    if exact and known is not None:
        host = HostLengths([each] * requests, [length + before for length in known.tolist()])
    longest = max_context if known is None or not requests else min(int(known.max()) + before, max_context)
    seq_lens = (batch.seq_lens + before).to(torch.int32)
    return Lengths(requests * each, longest, each, seq_lens, None, host)


def new_tokens(batch: Any, mode: ForwardMode) -> int:
    """New tokens per request, for modes in which all requests have the same number."""
    if mode is ForwardMode.DECODE:
        return 1
    info = batch.spec_info
    if getattr(info, "ragged_verify_layout", None) is not None:
        raise BackendError("SGLang verifies different numbers of tokens per request, which attnplug does not support")
    tokens = getattr(info, "draft_token_num", None) or getattr(info, "num_tokens_per_req", None)
    if not tokens or tokens < 1:
        raise PlanError(f"a batch of mode {mode} does not say how many tokens each request has: {info!r}")
    return int(tokens)


def fill_trees(step: GroupedStep, info: Any, prefix_lens: Tensor) -> None:
    """Write the draft trees of a replay to the memory that its graph reads. Groups share it."""
    tree = step.batches[0].geometry.tree
    if tree is not None and (drafted := draft_trees(info, prefix_lens)) is not None:
        tree[: drafted.shape[0]].copy_(drafted)


def has_trees(info: Any) -> bool:
    """Return True if a batch verifies draft trees. ``info`` is SGLang's ``spec_info``."""
    return getattr(info, "tree_topk", 1) != 1


def draft_trees(info: Any, prefix_lens: Tensor) -> Tensor | None:
    """Draft trees of a batch as ``Geometry.tree``, from SGLang's mask; ``None`` if it verifies chains or nothing.

    Runs on the device without synchronization.
    """
    if not has_trees(info):
        return None
    new, mask = int(info.draft_token_num), info.custom_mask
    if mask.device.type == "cpu":  # SGLang's mask has the new rows only
        cells = mask[: prefix_lens.shape[0] * new * new].view(-1, new, new)
    else:
        cells = cells_of_new_rows(mask, prefix_lens, new)
    row = torch.arange(new, device=mask.device)
    return torch.where(row <= row[:, None], cells.to(torch.int64) << row, 0).sum(-1)


def cells_of_new_rows(mask: Tensor, prefix_lens: Tensor, new: int) -> Tensor:
    """Cells ``[requests, new, new]`` of a mask that has ``new`` rows of ``prefix + new`` cells for each request.

    Requests that pad a CUDA graph have no cells in the mask and get those of others; their rows are not used.
    """
    prefixes, row = prefix_lens.to(torch.int64), torch.arange(new, device=mask.device)
    width = prefixes + new
    starts = (width.cumsum(0) - width) * new + prefixes
    place = starts[:, None, None] + row[:, None] * width[:, None, None] + row
    return mask[place.clamp_(max=mask.numel() - 1)]


class CapturedGroups:
    """Captured batches, over one set of static tensors per KV group.

    SGLang's scheduler may write to the slot table as soon as a replay is prepared. Page tables are therefore copied
    before the graph runs. Only lengths, which are in SGLang's own static tensors, are read inside it.
    """

    def __init__(self, groups: Sequence[PlannedGroup], max_requests: int, max_rows: int, max_context: int) -> None:
        device = groups[0].table.device
        self._groups, self._max_context = tuple(groups), max_context
        self._seq_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(max_requests, group.table.width, dtype=torch.int32, device=device) for group in groups
        ]
        self._slots = [
            torch.zeros(max_rows, dtype=torch.int64, device=device) if group.table.translated else None
            for group in groups
        ]
        self._steps: dict[tuple[ForwardMode, int], GroupedStep] = {}
        for group in groups:
            group.attention.reserve(max_requests, max_rows)
        self.max_requests, self.max_rows = max_requests, max_rows

    def capture(self, batch: Any) -> GroupedStep:
        """Plan the batch that is about to be captured. Its tensors are SGLang's static ones."""
        mode, requests = mode_of(batch), batch.batch_size
        each = new_tokens(batch, mode)
        rows, batches, tree = requests * each, [], None
        if has_trees(batch.spec_info):  # at capture, each row sees itself and the prefix
            tree = (1 << torch.arange(each, device=self._seq_lens.device)).repeat(requests, 1)
        for group, table, slots in zip(self._groups, self._tables, self._slots, strict=True):
            geometry = Geometry(
                mode,
                table[:requests],
                self._seq_lens[:requests],
                page_size=group.table.page_size,
                rows=rows,
                max_seq_len=min(self._max_context, group.table.width * group.table.page_size),
                max_new=each,
                slots=(batch.out_cache_loc if slots is None else slots)[:rows],
                captured=True,
                tree=tree,
            )
            batches.append(ForwardBatch(geometry))
        step = self._steps[mode, requests] = GroupedStep(mode, tuple(batches), each, batch.seq_lens)
        self._fill(step, batch)
        for group, planned in zip(self._groups, step.batches, strict=True):
            group.attention.capture(planned, in_capture=True)
        return step

    def replay(self, batch: Any) -> GroupedStep:
        """Update the static tensors and plan the replay. Raises :class:`PlanError` if the shape was not captured."""
        mode, requests = mode_of(batch), batch.batch_size
        step = self._steps.get((mode, requests))
        if step is None:
            sizes = ", ".join(str(size) for of, size in sorted(self._steps) if of is mode) or "none"
            raise PlanError(f"a {mode} of {requests} requests is replayed, but was never captured; captured: {sizes}")
        self._fill(step, batch)
        fill_trees(step, batch.spec_info, batch.seq_lens)
        for group, planned in zip(self._groups, step.batches, strict=True):
            group.attention.capture(planned)
        return step

    def refill(self, step: GroupedStep, batch: Any) -> None:
        """Run the captured part of planning. ``batch`` is the captured one: its tensors are static."""
        step.index = None  # its tensors are computed from the lengths inside the graph
        lens = self._seq_lens[: batch.batch_size]
        if step.mode is ForwardMode.DECODE:
            lens.copy_(batch.seq_lens)
        else:
            torch.add(batch.seq_lens, step.new_tokens, out=lens)
        for group, planned in zip(self._groups, step.batches, strict=True):
            group.attention.refill(planned)

    def _fill(self, step: GroupedStep, batch: Any) -> None:
        known = batch.seq_lens_cpu
        more = 0 if step.mode is ForwardMode.DECODE else step.new_tokens
        longest = self._max_context if known is None else min(int(known.max()) + more, self._max_context)
        for group, table, slots in zip(self._groups, self._tables, self._slots, strict=True):
            group.table.fill(table[: batch.batch_size], batch.req_pool_indices, longest)
            if slots is not None and batch.out_cache_loc is not None:
                own = group.table.slots(batch.out_cache_loc)  # without padding, which goes to slot 0
                slots[: own.shape[0]].copy_(own)
                slots[own.shape[0] :].zero_()
