"""N-gram drafts: the tokens that followed an earlier occurrence of the newest ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug.kernels import to_device
from attnplug_engine import kernels
from attnplug_engine.speculation.tree import Proposal


class History:
    """Tokens of all requests on the device, by row of the slot table.

    ``tokens [rows + 1, context]`` int32; the last row serves padded requests. Each call gets the number of known tokens
    as ``lengths [requests]``: the committed cache rows plus one, for the newest token, whose cache row is not computed
    yet. Entries behind them are never used.
    """

    def __init__(self, rows: int, context: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows + 1, context, dtype=torch.int32, device=device)

    def write_prompt(self, row: int, start: int, ids: Sequence[int]) -> None:
        """Write tokens that the host knows, from position ``start`` on."""
        self.tokens[row, start : start + len(ids)] = to_device(ids, self.tokens.device, np.int32)

    def append(self, rows: Tensor, lengths: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write the first ``counts [requests]`` of ``tokens [requests, N]`` behind the ``lengths`` known tokens of each
        request at ``rows [requests]``. Nothing is written beyond the context, and a token of -1 becomes 0."""
        if kernels.usable(self.tokens):
            from attnplug_engine.kernels.ngram import append

            return append(self.tokens, rows, lengths, tokens, counts)
        context, place = self.tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
        where = lengths.long().unsqueeze(1) + place
        written = (place < counts.unsqueeze(1)) & (where < context)
        nowhere = (self.tokens.shape[0] - 1) * context  # a cell of the padded requests' row
        where = torch.where(written, rows.unsqueeze(1) * context + where, nowhere)
        self.tokens.view(-1).scatter_(0, where.flatten(), tokens.clamp(min=0).int().flatten())

    def propose(
        self, rows: Tensor, lengths: Tensor, steps: int, *, topk: int = 1, most: int = 5, least: int = 2
    ) -> Proposal:
        """Propose ``steps`` tokens for each request at ``rows [requests]`` with ``lengths [requests]`` known tokens.

        They are those that followed the latest earlier occurrence of the longest suffix of ``least`` to ``most``
        tokens. If fewer than ``steps`` tokens followed, they repeat. Without an occurrence they are -1.

        With ``topk`` > 1 there are ``topk`` chains from the root, ``1 + topk * steps`` nodes: those that followed the
        longest occurrences, of equals the latest, with different next tokens. Nodes are numbered by depth and then by
        chain, so the first n nodes are a tree for any n.
        """
        if kernels.usable(self.tokens):
            from attnplug_engine.kernels.ngram import propose

            return Proposal(*propose(self.tokens, rows, lengths, steps, topk, most, least))
        found = _occurrences(self.tokens[rows], lengths, topk, most, least)
        known = lengths.long().clamp(max=self.tokens.shape[1]).unsqueeze(1)
        # An occurrence that ends at token p is followed by tokens p + 1 to known - 1.
        step = torch.arange(steps, device=rows.device)
        ahead = step % (known - 1 - found).clamp(min=1).unsqueeze(2)
        places = (found.unsqueeze(2) + 1 + ahead).flatten(1)
        tokens = self.tokens[rows.unsqueeze(1), places].long().view(-1, topk, steps)
        tokens = torch.where(found.unsqueeze(2) >= 0, tokens, -1).transpose(1, 2).flatten(1)
        return Proposal(tokens, None if topk == 1 else chains(rows.shape[0], steps, topk, rows.device))


def chains(requests: int, steps: int, topk: int, device: torch.device) -> Tensor:
    """Return the parents ``[requests, topk * steps]`` in ``topk`` chains from the root, numbered by depth, then by
    chain."""
    parents = torch.arange(1 - topk, 1 + topk * (steps - 1), device=device).clamp(min=0)
    return parents.expand(requests, -1)


def _occurrences(tokens: Tensor, lengths: Tensor, topk: int, most: int, least: int) -> Tensor:
    """Return the ends ``[requests, topk]`` of the best occurrences in ``tokens [requests, context]``; -1 if there is
    none.

    The longest are best, and of these the latest; the tokens that follow any two of them differ.
    """
    requests, context = tokens.shape
    known = lengths.long().unsqueeze(1)
    place = torch.arange(context, device=tokens.device)
    alike = ((place < known - 1) & (known <= context)).expand(requests, -1)
    length = torch.zeros(requests, context, dtype=torch.int64, device=tokens.device)
    for back in range(most):
        suffix = tokens.gather(1, (known - 1 - back).clamp(0, context - 1))
        shifted = torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :context]
        alike = alike & (shifted == suffix) & (known > back)
        length += alike
    following = tokens.roll(-1, 1)
    value = torch.where(length >= least, length * context + place, -1)
    found = []
    for _ in range(topk):
        best = value.max(1, keepdim=True)
        found.append(torch.where(best.values >= 0, best.indices, -1))
        value = torch.where(following == following.gather(1, best.indices), -1, value)
    return torch.cat(found, 1)
