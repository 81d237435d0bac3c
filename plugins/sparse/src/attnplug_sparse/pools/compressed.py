"""Cache of compressed layers: entries, each made of a window of tokens, and the tokens of unfinished windows.

Both are addressed by the requests' page table, so a request has no state besides its pages. Prefix hits, chunked
prefill and rejected drafts need no special handling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from attnplug import DType, LayerSpec, PoolError
from attnplug.kernels import (
    CacheKey,
    PageCopy,
    PagedBuffer,
    PageLayout,
    check_size,
    copy_pages,
    distinct_layers,
    held_for,
)

_KIND = "compressed"


@dataclass(frozen=True, slots=True)
class EntryShape:
    """Cache shape of one compressor of a layer, for pages of ``page_size`` tokens.

    An entry is a row of ``dim``. ``[values | gates]`` of the newest ``kept`` tokens of every page are kept: an
    unfinished window lies in the last page, and with overlap the previous window may end the page before.
    """

    ratio: int
    dim: int
    series: int
    page_size: int
    kept: int
    hosted: bool = False
    """True if entries are kept elsewhere: a coordinator has them in host memory."""

    @property
    def entries(self) -> int:
        """Entries per page that are kept here."""
        return 0 if self.hosted else self.page_size // self.ratio

    @property
    def numbers(self) -> int:
        """Elements per page."""
        return self.entries * self.dim + self.kept * 2 * self.series * self.dim


def entry_shapes(layer: LayerSpec, page_size: int, drafts: int = 0, *, hosted: bool = False) -> tuple[EntryShape, ...]:
    """Return the cache shapes of a compressed layer: of its entries and, if it has an index, of the index's keys.

    With ``hosted``, entries that an index selects are kept elsewhere.
    """
    dims, mla = layer.compressed, layer.mla
    assert dims is not None and mla is not None
    if page_size % dims.ratio:
        raise PoolError(
            f"pages of {page_size} tokens end inside a window of {dims.ratio}, of which layer {layer.layer_id} makes "
            "one entry; give a `page_size` that is a multiple of it",
            settings=["page_size"],
        )
    kept = min(page_size, dims.span + drafts)
    entries = EntryShape(dims.ratio, mla.row_dim, dims.series, page_size, kept)
    if layer.indexer is None:
        return (entries,)
    return replace(entries, hosted=hosted), replace(entries, dim=layer.indexer.head_dim)


def compressed_page_bytes(layers: Sequence[LayerSpec], page_size: int, dtype: torch.dtype, drafts: int = 0) -> int:
    """Return the bytes of one page in a ``CompressedPool``."""
    own = [layer for layer in layers if layer.compressed is not None]
    shapes = (shape for layer in own for shape in entry_shapes(layer, page_size, drafts))
    return dtype.itemsize * sum(shape.numbers for shape in shapes)


class EntryCache:
    """Entries of one compressor, and the newest tokens of every page. All slots are token slots of the page table.

    The entry of a window is stored at the slot of its last token divided by the ratio. ``hosted`` entries cannot be
    read or written here.
    """

    def __init__(self, shape: EntryShape, num_pages: int, dtype: DType, device: torch.device | str) -> None:
        self.shape = shape
        layout = PageLayout.named("token_major", num_pages, shape.kept, 1, 2 * shape.series * shape.dim)
        self._tokens = PagedBuffer.allocate(layout, dtype=dtype, device=device)
        self.buffers: tuple[PagedBuffer, ...] = (self._tokens,)
        if not shape.hosted:
            layout = PageLayout.named("token_major", num_pages, shape.entries, 1, shape.dim)
            self._entries = PagedBuffer.allocate(layout, dtype=dtype, device=device)
            self.buffers = self._entries, self._tokens

    @property
    def entries(self) -> Tensor:
        """``[pages, page_size / ratio, dim]``: the cache itself."""
        return self._entries.pages.squeeze(2)

    @property
    def tokens(self) -> Tensor:
        """``[pages, kept, values | gates]``: the cache itself."""
        return self._tokens.pages.squeeze(2)

    def write(self, slots: Tensor, entries: Tensor) -> None:
        """Store ``entries`` ``[n, dim]`` at the ``slots`` ``[n]`` of their windows' last tokens; -1 is skipped."""
        _write(self._entries, slots.div(self.shape.ratio, rounding_mode="floor"), entries, "entries")

    def read(self, slots: Tensor) -> Tensor:
        """Return entries ``[*slots.shape, dim]``, by the slots of their windows' last tokens."""
        return self._entries.read(slots // self.shape.ratio).squeeze(-2)

    def write_tokens(self, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[tokens, values | gates]``. Only the newest tokens of a page have a slot, others -1."""
        _write(self._tokens, self._kept(slots).masked_fill_(slots < 0, -1), rows, "compressed tokens")

    def read_tokens(self, slots: Tensor) -> Tensor:
        """Return ``[*slots.shape, values | gates]`` of tokens that are among the newest of their pages."""
        return self._tokens.read(self._kept(slots)).squeeze(-2)

    def _kept(self, slots: Tensor) -> Tensor:
        """Slots of kept tokens: a ring per page, in which the newest tokens overwrite the oldest."""
        size, kept = self.shape.page_size, self.shape.kept
        return slots.div(size, rounding_mode="floor") * kept + slots.remainder(size).remainder(kept)


def _write(buffer: PagedBuffer, slots: Tensor, rows: Tensor, name: str) -> None:
    rows = rows.unsqueeze(1)
    buffer.check_rows(slots, rows, name)
    buffer.write(slots, rows, padded=buffer.check_targets(slots))


class CompressedPool:
    """Entries of all compressed layers among ``layers``, and keys of their indexes, in the model's own ``dtype``.

    Requests may share whole pages only. A partly shared page holds the newest tokens of its end, not those at the end
    of the shared part, so the shared part has to be recomputed. ``drafts`` is the largest number of a request's newest
    tokens that speculation may reject. With ``hosted``, a coordinator keeps the entries that indexes select.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: DType,
        device: torch.device | str,
        drafts: int = 0,
        hosted: bool = False,
    ) -> None:
        check_size(num_pages, page_size)
        if dtype == DType.FLOAT8_E4M3:
            raise PoolError("entries cannot be kept in float8_e4m3fn without a scale each; give the model's own type")
        own = distinct_layers([layer for layer in layers if layer.compressed is not None], _KIND)
        self._caches = {
            layer_id: tuple(
                EntryCache(shape, num_pages, dtype, device)
                for shape in entry_shapes(layer, page_size, drafts, hosted=hosted)
            )
            for layer_id, layer in own.items()
        }
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, dtype

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._caches)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers())

    def entries(self, layer_id: int) -> EntryCache:
        """Return the cache of the entries that a layer attends to."""
        return held_for(self._caches, layer_id, _KIND)[0]

    def index(self, layer_id: int) -> EntryCache | None:
        """Return the cache of a layer's index keys, by which it selects entries; ``None`` if it has no index."""
        caches = held_for(self._caches, layer_id, _KIND)
        return caches[1] if len(caches) > 1 else None

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages(self._buffers(), copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Refused: an entry depends on the order of its tokens."""
        raise PoolError(
            f"rows of compressed layers cannot be moved ({targets.numel()} were requested): an entry is made of tokens "
            "in their order; verify chains of drafts, not trees"
        )

    def _buffers(self) -> Iterator[PagedBuffer]:
        return (buffer for caches in self._caches.values() for cache in caches for buffer in cache.buffers)


COMPRESSED: Final[CacheKey[CompressedPool]] = CacheKey("compressed entries", CompressedPool, "select")
"""Key of the entries of compressed layers in ``KVPools``."""
