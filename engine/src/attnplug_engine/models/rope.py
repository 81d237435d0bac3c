"""Rotary position embeddings: frequencies of each rope type, and both rotation layouts.

The formulas are those of transformers' ``modeling_rope_utils`` (5.22), also in float32: with long contexts, an angle
depends on the last bits of a frequency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from attnplug.hf.config_keys import Config, rope_section, rope_type, rope_type_key
from attnplug.host import MLAWeights
from attnplug_engine import kernels
from attnplug_engine.kernels.row_places import RowPlaces

_DEFAULT_THETA = 10_000.0
_SECTIONS = ("rope_scaling", "rope_parameters")
LONGROPE = ("longrope", "su")
"""Names of the rope type; the second one is that of the first Phi-3 only."""


class HeadNorm(Protocol):
    """A root-mean-square norm over the last dimension."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Rotation(Protocol):
    """Rotation for the tokens of one step, computed once and used by every layer."""

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x [tokens, heads, dim]`` rotated."""
        ...

    def apply_(self, x: Tensor) -> None:
        """Rotate ``x [tokens, heads, dim]``, which may be a view, in place."""
        ...

    def heads(
        self, qkv: Tensor, queries: int, skipped: int, keys: int, norms: tuple[HeadNorm, HeadNorm] | None
    ) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys of ``qkv [tokens, queries | skipped | keys | …, dim]``.

        ``norms`` are applied to each head of queries and of keys first. Both results may be views of ``qkv``; skipped
        and following heads are not changed.
        """
        ...

    def latent_rows(self, q: Tensor, down: Tensor, nope: int, norm: HeadNorm) -> Tensor:
        """Return new cache rows ``[tokens, latent | rope]`` of ``down``: its latent normed, its other dimensions
        rotated.

        ``q [tokens, heads, nope | rope]``, which may be a view, is rotated in place behind its first ``nope``
        dimensions.
        """
        ...

    def absorbs(self, q: Tensor) -> bool:
        """Return True if ``absorb`` supports these queries."""
        ...

    def absorb(self, q: Tensor, down: Tensor, weights: MLAWeights, norm: HeadNorm, places: RowPlaces) -> Tensor:
        """Return ``q`` absorbed and rotated; store the new rows of ``latent_rows`` in their ``places``."""
        ...


class TorchRotation:
    """Base class of rotations by torch operations."""

    __slots__ = ()

    def apply(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def apply_(self, x: Tensor) -> None:
        raise NotImplementedError

    def heads(
        self, qkv: Tensor, queries: int, skipped: int, keys: int, norms: tuple[HeadNorm, HeadNorm] | None
    ) -> tuple[Tensor, Tensor]:
        if norms is None and not skipped:
            turned = self.apply(qkv[:, : queries + keys])
            return turned[:, :queries], turned[:, queries:]
        q, k = qkv[:, :queries], qkv[:, queries + skipped : queries + skipped + keys]
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        return self.apply(q), self.apply(k)

    def latent_rows(self, q: Tensor, down: Tensor, nope: int, norm: HeadNorm) -> Tensor:
        self.apply_(q[..., nope:])
        latent, rope = down.tensor_split((norm.weight.shape[0],), dim=1)
        return torch.cat((norm(latent), self.apply(rope.unsqueeze(1)).squeeze(1)), dim=1)

    def absorbs(self, q: Tensor) -> bool:
        return False

    def absorb(self, q: Tensor, down: Tensor, weights: MLAWeights, norm: HeadNorm, places: RowPlaces) -> Tensor:
        raise NotImplementedError


class HalfRotation(TorchRotation):
    """Pairs ``(i, i + dim / 2)``, as in Llama. Cosines and signed sines ``[tokens, 1, dim]`` in the model's dtype."""

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(self, angles: Tensor, factor: float, dtype: torch.dtype) -> None:
        cos, sin = angles.cos().mul_(factor), angles.sin().mul_(factor)
        self._half = angles.shape[-1]
        self._cos = torch.cat((cos, cos), -1).to(dtype).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1)

    def apply(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self._cos, x.roll(self._half, -1), self._sin)

    def apply_(self, x: Tensor) -> None:
        torch.addcmul(x * self._cos, x.roll(self._half, -1), self._sin, out=x)


class PairRotation(TorchRotation):
    """Pairs ``(2 i, 2 i + 1)``, not reordered, as in DeepSeek-V2. Computes in float32 like transformers."""

    __slots__ = ("_turn",)

    def __init__(self, angles: Tensor, factor: float, dtype: torch.dtype) -> None:
        self._turn = torch.polar(torch.full_like(angles, factor), angles).unsqueeze(1)

    def apply(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self._turn).flatten(-2).to(x.dtype)

    def apply_(self, x: Tensor) -> None:
        even = x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
        if x.dtype is torch.float32 and even:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(self._turn)
        else:
            x.copy_(self.apply(x))


class PartialRotation(TorchRotation):
    """Rotation of the first ``width`` dimensions of a head; the others are unchanged (Qwen3-Next)."""

    __slots__ = ("_inner", "_width")

    def __init__(self, inner: Rotation, width: int) -> None:
        self._inner = inner
        self._width = width

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat((self._inner.apply(x[..., : self._width]), x[..., self._width :]), -1)

    def apply_(self, x: Tensor) -> None:
        self._inner.apply_(x[..., : self._width])


class NoRotation(TorchRotation):
    """Identity, for models without rotary positions: Kimi-Linear, Nemotron-H."""

    __slots__ = ()

    def apply(self, x: Tensor) -> Tensor:
        return x

    def apply_(self, x: Tensor) -> None:
        pass


class Positions(Protocol):
    """Positional embedding of a decoder."""

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotation for tokens at ``positions [tokens]``."""
        ...


class Rope:
    """A model's rotary embedding. Positions are unbounded: angles are computed, not looked up.

    ``partial``: the model supports ``partial_rotary_factor``. Others rotate whole heads: as in transformers, a plain
    rope ignores the factor, and other rope types refuse it.
    """

    def __init__(
        self,
        config: Config,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rotation: Callable[[Tensor, float, torch.dtype], Rotation] = HalfRotation,
        partial: bool = False,
    ) -> None:
        self.width = _rotary_width(config, dim, partial)
        """Number of rotated dimensions."""
        self._partial = self.width < dim
        frequencies, self._factor = inverse_frequencies(config, self.width)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype
        self._rotation = rotation

    def at(self, positions: Tensor) -> Rotation:
        if kernels.usable(positions):
            from attnplug_engine.kernels.rotation import FusedRotation

            # It rotates as many dimensions as there are frequencies, so partial rotation needs no special case.
            return FusedRotation(positions, self._frequencies, self._factor, pairs=self._rotation is PairRotation)
        angles = positions.unsqueeze(-1) * self._frequencies
        rotation = self._rotation(angles, self._factor, self._dtype)
        return PartialRotation(rotation, self.width) if self._partial else rotation


class NoRope:
    """A model without positional embeddings."""

    def at(self, positions: Tensor) -> Rotation:
        return NoRotation()


class LayerRotations(TorchRotation):
    """Rotations of a model whose layers have different ropes; each layer uses one of ``ropes``."""

    __slots__ = ("ropes",)

    def __init__(self, ropes: tuple[Rotation, ...]) -> None:
        self.ropes = ropes


class LayerRopes:
    """Rotary embeddings of a model whose layers have different ones, or none (Gemma 3, SmolLM3)."""

    def __init__(self, *ropes: Positions) -> None:
        self._ropes = ropes

    def at(self, positions: Tensor) -> Rotation:
        return LayerRotations(tuple(rope.at(positions) for rope in self._ropes))


def _rotary_width(config: Config, dim: int, partial: bool) -> int:
    """Return the number of rotated dimensions of a head."""
    key = "partial_rotary_factor"
    section = rope_section(config)
    part = section if key in section.values else config
    # Null in the outer config means none; transformers fails for null in the section.
    factor = section.number(key) if part is section else config.optional_number(key)
    if factor is None:
        return dim
    if not partial:
        if factor != 1.0 and rope_type(section) != "default":
            raise part.wrong(key, f"1 with rope type {rope_type(section)!r}: this model rotates whole heads")
        return dim
    if factor > 1.0:
        raise part.wrong(key, "at most 1")
    return int(dim * factor)


def inverse_frequencies(config: Config, dim: int) -> tuple[Tensor, float]:
    """Return frequencies ``[dim / 2]`` float32 on the CPU, and the factor on cos and sin, from the config's rope
    keys."""
    if dim % 2 or not dim:
        raise config.error(f"rope needs an even number of dimensions, not {dim}", "head_dim")
    section = rope_section(config)
    name = rope_type(section)
    if name not in _TYPES:
        raise section.wrong(rope_type_key(section), f"one of {', '.join(map(repr, _TYPES))}")
    theta = _theta(section, config)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return _TYPES[name](section, config, theta, theta**exponents)


def _theta(section: Config, config: Config) -> float:
    for part in (section, config):
        if "rope_theta" in part.values:
            theta = part.number("rope_theta")
            if theta <= 1:
                raise part.wrong("rope_theta", "greater than 1")
            return theta
    return _DEFAULT_THETA


# Each takes ``periods [dim / 2]``, the powers of theta: the frequencies of a plain rope are their inverses.


def _default(section: Config, config: Config, theta: float, periods: Tensor) -> tuple[Tensor, float]:
    return 1.0 / periods, 1.0


def _linear(section: Config, config: Config, theta: float, periods: Tensor) -> tuple[Tensor, float]:
    return 1.0 / periods / section.number("factor"), 1.0


def _llama3(section: Config, config: Config, theta: float, periods: Tensor) -> tuple[Tensor, float]:
    """Short wavelengths stay, long ones are stretched by the factor, those between are blended."""
    factor, original = section.number("factor"), _original_length(section, config)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    plain = 1.0 / periods
    wavelengths = 2 * math.pi / plain
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelengths > original / low, plain / factor, blended)
    return torch.where(wavelengths < original / high, plain, stretched), 1.0


def _yarn(section: Config, config: Config, theta: float, periods: Tensor) -> tuple[Tensor, float]:
    if "factor" not in section.values:
        raise section.missing("factor")
    original = _original_length(section, config)
    # Null means that the factor follows from the lengths.
    factor = section.optional_number("factor") or config.integer("max_position_embeddings") / original
    dim = 2 * periods.shape[0]

    def dimension(rotations: float) -> float:
        """Return the dimension that makes this many rotations over the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(section.optional_number("beta_fast") or 32)
    high = dimension(section.optional_number("beta_slow") or 1)
    if "truncate" not in section.values or section.flag("truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return frequencies, _yarn_factor(section, factor)


def _yarn_factor(section: Config, factor: float) -> float:
    """Return yarn's factor on cos and sin. Its factor on the softmax scale is already in the LayerSpec."""
    given = section.optional_number("attention_factor")
    if given is not None:
        return given
    mscale = section.optional_number("mscale", least=0.0)
    all_dim = section.optional_number("mscale_all_dim", least=0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(section: Config, config: Config, theta: float, periods: Tensor) -> tuple[Tensor, float]:
    """Frequencies with the factors for sequences of up to the original length; see ``exact_length``."""
    original = _original_length(section, config)
    given = section.sequence("short_factor")
    if given is None:
        raise section.missing("short_factor")
    if len(given) != len(periods) or not all(isinstance(each, int | float) and each > 0 for each in given):
        raise section.wrong("short_factor", f"a list of {len(periods)} positive numbers, one per rotated pair")
    factor = section.optional_number("factor") or config.integer("max_position_embeddings") / original
    scale = section.optional_number("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (torch.tensor(given, dtype=torch.float32) * periods), scale


def exact_length(config: Config) -> int | None:
    """Return the longest sequence for which a model's keys keep their rotation; None if there is no limit.

    With longrope, a sequence beyond the original length has other frequencies at every position. Keys in the cache
    would need another rotation, and pages of the prefix cache differ between short and long sequences.
    """
    given = next((part for key in _SECTIONS if (part := config.section(key)) and part.values), None)
    if given is None or given.lookup(rope_type_key(given)) not in LONGROPE:
        return None
    return None if given.lookup("long_factor") == given.lookup("short_factor") else _original_length(given, config)


def _original_length(section: Config, config: Config) -> int:
    """Return the context length before extension; the outer key takes precedence, as in transformers."""
    key = "original_max_position_embeddings"
    for part in (config, section):
        if key in part.values:
            return part.integer(key)
    return config.integer("max_position_embeddings")


_TYPES: Mapping[str, Callable[[Config, Config, float, Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
