"""Recurrences of linear attention over padded requests in torch: recurrent and chunked forms, in float32.

Both compute the recurrence of :class:`attnplug.linear.LinearInputs` in all its forms. They differ only in rounding and
speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Maximum tokens per chunk; a power of two."""
# Maximum tokens for which the recurrent form is faster than the chunked one.
_FEW_TOKENS = 8
# A decay of exp(-200) is 0 in float32. This lower bound keeps sums of log decays finite and their differences not NaN.
_LOWEST = -200.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Inputs of the recurrence in float32, padded to the same number of tokens per request.

    q and k are ``[requests, tokens, heads, key_dim]``, and q includes the layer's scale. v is ``[requests, tokens,
    heads, value_dim]``, ``log_decay`` ``[requests, tokens, heads, 1 or key_dim]``. ``beta`` ``[requests, tokens, heads,
    1]`` is for the delta rule only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None = None,
        *,
        scale: float = 1.0,
        normalize: bool = False,
    ) -> Tokens:
        """Make from a layer's own shapes, in any dtype.

        q and k ``[requests, tokens, key_heads, key_dim]``, v ``[requests, tokens, heads, value_dim]``, beta
        ``[requests, tokens, heads]``, and log_decay of the same shape, or with ``key_dim`` added, or ``[heads]``.
        """
        requests, tokens, heads, _ = v.shape
        if log_decay.dim() < 4:
            log_decay = log_decay.expand(requests, tokens, heads).unsqueeze(-1)
        return cls(
            _rows(q, heads, normalize).mul(scale),
            _rows(k, heads, normalize),
            v.float(),
            log_decay.float().clamp(min=_LOWEST),
            None if beta is None else beta.float().unsqueeze(-1),
        )

    def only(self, live: Tensor) -> Tokens:
        """Return the tokens with those outside ``live`` ``[requests, tokens]`` made neutral: they do not change the
        state."""
        dead = ~live[..., None, None]
        # All inputs that reach the state: with a zero key only, a NaN would propagate.
        k, v, log_decay = (tensor.masked_fill(dead, 0) for tensor in (self.k, self.v, self.log_decay))
        return Tokens(self.q, k, v, log_decay, None if self.beta is None else self.beta.masked_fill(dead, 0))


def _rows(x: Tensor, heads: int, normalize: bool) -> Tensor:
    """Expand queries or keys of key heads to all heads, L2-normalized if requested."""
    x = x.float()
    if normalize:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def advance(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance ``state`` ``[requests, heads, key_dim, value_dim]`` by the tokens, in the faster of both forms.

    Returns the output ``[requests, tokens, heads, value_dim]`` and the state after the last token.
    """
    return recurrent(tokens, state) if tokens.q.shape[1] <= _FEW_TOKENS else chunked(tokens, state)


def recurrent(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`advance`, token by token."""
    decays = tokens.log_decay.exp().unsqueeze(-1)
    outputs = []
    for token in range(tokens.q.shape[1]):
        q, k, write = tokens.q[:, token], tokens.k[:, token], tokens.v[:, token]
        state = state * decays[:, token]
        if tokens.beta is not None:
            write = tokens.beta[:, token] * (write - (k.unsqueeze(-2) @ state).squeeze(-2))
        state.addcmul_(k.unsqueeze(-1), write.unsqueeze(-2))
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


def chunked(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`advance`, by chunks of up to :data:`CHUNK` tokens, each a few matrix products."""
    count = tokens.q.shape[1]
    size = min(CHUNK, 1 << (count - 1).bit_length())
    outputs = []
    chunks = (_chunks(tensor, size) for tensor in (tokens.q, tokens.k, tokens.v, tokens.log_decay))
    betas = (None,) * -(-count // size) if tokens.beta is None else _chunks(tokens.beta, size)
    for q, k, v, log_decay, beta in zip(*chunks, betas, strict=True):
        out, state = _through_chunk(q, k, v, log_decay, beta, state)
        outputs.append(out)
    return torch.cat(outputs, 2)[:, :, :count].transpose(1, 2), state


def _chunks(tensor: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split into chunks ``[requests, heads, size, dim]``, zero-padded: a token of zeros does not change the state."""
    padded = F.pad(tensor.transpose(1, 2), (0, 0, 0, -tensor.shape[1] % size))
    chunks: tuple[Tensor, ...] = padded.split(size, 2)
    return chunks


def _through_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output ``[requests, heads, size, value_dim]`` of one chunk and the state after it.

    ``writes`` is what each token adds at its key. The state after a token is the initial state, decayed since the
    chunk's start, plus all writes so far, each decayed since it was made.
    """
    # Sums reach -20 * 64 for strong decays. In float32 their differences would lose 1e-4.
    sums = log_decay.double().cumsum(-2)
    since_start = sums.float().exp()
    until_end = (sums[..., -1:, :] - sums).float().exp()
    writes = v
    if beta is not None:
        # Write i is beta_i (v_i - what k_i reads), and k_i reads the initial state and writes 0 … i - 1.
        found = _decayed_products(k, k, sums).mul_(beta)
        wanted = beta * (v - (k * since_start) @ state)
        # Contiguous, like every right-hand side of a product here: on some CPUs other layouts cost up to ten times as
        # much.
        writes = torch.linalg.solve_triangular(found, wanted, upper=False, unitriangular=True).contiguous()
    out = (q * since_start) @ state + _decayed_products(q, k, sums) @ writes
    state = since_start[..., -1, :].unsqueeze(-1) * state + (k * until_end).mT @ writes
    return out, state


def _decayed_products(x: Tensor, y: Tensor, sums: Tensor) -> Tensor:
    """Return ``[…, i, j]``: the product of x's row i with y's row j, decayed since j; zero for j > i.

    x and y are ``[…, size, key_dim]``, the sums of log decays ``[…, size, 1 or key_dim]``. The exponential of a
    positive number is never taken.
    """
    if sums.shape[-1] == 1:
        decay = (sums - sums.mT).clamp_(max=0).float().exp_()
        return (x @ y.mT.contiguous()).mul_(decay).tril_()
    return _products_by_channel(x, y, sums)


def _products_by_channel(x: Tensor, y: Tensor, sums: Tensor) -> Tensor:
    """Compute the decayed products for per-channel decays, where the decay is split into one factor per row.

    Factors relative to the chunk's start overflow, so the rows are halved recursively. Products of second-half rows
    with first-half rows use factors relative to the first half's last row. It lies between them, so both factors are
    decays.
    """
    size, half = x.shape[-2], x.shape[-2] // 2
    if size == 1:
        return (x * y).sum(-1, keepdim=True)
    x, y, sums = (tensor.unflatten(-2, (2, half)) for tensor in (x, y, sums))
    middle = sums[..., 0, -1:, :]
    later = x[..., 1, :, :] * (sums[..., 1, :, :] - middle).float().exp_()
    earlier = y[..., 0, :, :] * (middle - sums[..., 0, :, :]).float().exp_()
    within = _products_by_channel(x, y, sums)
    products = x.new_zeros(*later.shape[:-2], size, size)
    products[..., :half, :half] = within[..., 0, :, :]
    products[..., half:, half:] = within[..., 1, :, :]
    products[..., half:, :half] = later @ earlier.mT.contiguous()
    return products
