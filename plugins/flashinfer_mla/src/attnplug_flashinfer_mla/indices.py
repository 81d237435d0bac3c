"""Page indices and write slots of a batch, made on the device by one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The requests of one call: ``qo_indptr`` and ``kv_indptr`` ``[requests + 1]``, ``kv_lens`` ``[requests]``, int32.

    ``kv_indptr`` counts pages: where the indices of a request's pages begin.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Lengths:
        """From the three, one behind the other."""
        requests = (numbers.shape[0] - 2) // 3
        return cls(numbers[: requests + 1], numbers[requests + 1 : 2 * requests + 2], numbers[2 * requests + 2 :])


def fill_indices(page_table: Tensor, lengths: Lengths, page_size: int, kv_indices: Tensor, slots: Tensor) -> None:
    """Fill ``kv_indices`` with the pages of every request, and ``slots`` ``[queries]`` with where new rows go.

    The new rows of a request are its last ones. A row before the request's first has no place: its slot is -1, which
    is how padded requests of a captured batch, of length 0, come out. So does a row for which the table has no column.
    Entries of the table behind a request's last page are not read, and places of ``kv_indices`` that belong to no page
    are left as they are.
    """
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    if page_table.device.type == "cuda":
        from attnplug_flashinfer_mla.triton_kernels import launch_fill_indices

        launch_fill_indices(page_table, lengths, page_size, kv_indices, slots)
        return
    kv_lens = lengths.kv_lens.long()
    width = page_table.shape[1]
    pages = ((kv_lens + page_size - 1) // page_size).clamp(max=width)
    owner, place = _each(pages)
    kv_indices[lengths.kv_indptr.long()[owner] + place] = page_table[owner, place]
    new = lengths.qo_indptr.long().diff()
    owner, place = _each(new)
    position = (kv_lens - new)[owner] + place
    exists = (position >= 0) & (position < width * page_size)
    page = page_table[owner, torch.where(exists, position // page_size, 0)].long()
    slots.copy_(torch.where(exists, page * page_size + position % page_size, -1))


def _each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For ``counts`` things of each owner, one after the other: whose each is, and its number among the owner's."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
