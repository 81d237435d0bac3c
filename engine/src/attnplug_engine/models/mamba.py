"""Mamba-2: the state-space layer, and the model that consists of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from attnplug import ForwardBatch, LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug.host import active_attention
from attnplug.linear import LinearInputs
from attnplug_engine import kernels
from attnplug_engine.models.decoder import BACKBONE, Attention, Decoder, MixerBlock, hidden_norm
from attnplug_engine.models.layers import Linear, RMSNorm, check_activation, frozen
from attnplug_engine.models.linear_attention import GatedColumnNorm, ShortConvolution, linear_part
from attnplug_engine.models.rope import NoRope, Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import scaled

DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "time_step_limit": (0.0, math.inf),
}
ALIASES: Mapping[str, str] = {"layer_norm_epsilon": "rms_norm_eps"}


def mamba2(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    check_activation(config)
    norm, limits = hidden_norm(config), _time_step_limit(config)

    def block(layer: LayerSpec) -> MixerBlock:
        own = weights.at(BACKBONE.layer(layer.layer_id))
        mixer = MambaMixer(own.at("mixer"), layer, config, limits)
        return MixerBlock(own, norm, mixer, exact_sum=config.flag("residual_in_fp32"))

    return Decoder(weights, config, norm, NoRope(), [block(layer) for layer in spec.layers], BACKBONE)


class MambaMixer(Attention):
    """Mamba-2's layer as linear attention: q is C, k is B, v is the input times its step, decayed by A times the step.

    One product gives ``[gate | x | B | C | dt]``, of which ``[x | B | C]`` are the channels of the convolution.
    ``limits`` bound the step ``dt``; ``norm_groups`` is the number of parts of the output that are normed separately.
    """

    def __init__(
        self,
        weights: Weights,
        layer: LayerSpec,
        config: Config,
        limits: tuple[float, float],
        *,
        norm_groups: int = 1,
    ) -> None:
        super().__init__()
        assert layer.linear is not None
        dims = layer.linear
        hidden, bias = config.integer("hidden_size"), config.flag("use_bias")
        eps = config.number("rms_norm_eps", least=0.0)
        part = linear_part(layer, weights.parallel)
        self.layer = part.layer
        self._widths = (part.value_width, part.key_width, part.key_width)
        inner, keys = dims.heads * dims.value_dim, dims.key_heads * dims.key_dim
        own, own_keys = scaled(part.heads, dims.value_dim), scaled(part.key_heads, dims.key_dim)
        channels = ((0, own), (inner, own_keys), (inner + keys, own_keys))
        total = 2 * inner + 2 * keys + dims.heads
        starts = (
            (0, own),
            *((inner + start, rows) for start, rows in channels),
            (total - dims.heads, part.heads),
        )
        self.down = Linear.stacked(weights, [_rows("in_proj", total, *each) for each in starts], hidden, bias=bias)
        convolved = [_rows("conv1d", inner + 2 * keys, *each) for each in channels]
        self.conv = ShortConvolution(weights, convolved, self.layer, bias=config.flag("use_conv_bias"))
        self.rate = frozen(-weights.take("A_log", dims.heads, rows=part.heads, exact=True).exp())
        self.dt_bias = frozen(weights.take("dt_bias", dims.heads, rows=part.heads, exact=True))
        self.skip = frozen(weights.take("D", dims.heads, rows=part.heads, exact=True))
        self._limits = limits
        self.norm = GatedColumnNorm(weights.at("norm"), inner, eps, own, groups=norm_groups)
        self.out = Linear.row_parallel(weights.at("out_proj"), inner, hidden, own, bias=bias)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        dims = self.layer.linear
        assert dims is not None
        widths = (self._widths[0], dims.conv_channels, dims.heads)
        gate, convolved, dt = self.down(hidden, norm=norm).split(widths, dim=1)
        x, keys, queries = self.conv(convolved, batch).split(self._widths, dim=1)
        values, log_decay = self._time_steps(x.unflatten(1, (-1, dims.value_dim)), dt)
        inputs = LinearInputs(
            queries.unflatten(1, (-1, dims.key_dim)), keys.unflatten(1, (-1, dims.key_dim)), values, log_decay
        )
        attended = active_attention().attend_linear(inputs, self.layer, batch).flatten(1)
        # The gate comes before the norm here, unlike in delta-rule layers.
        return self.out(self.norm.after_gate(attended, gate, self.skip, x), onto=onto)

    def _time_steps(self, x: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x [tokens, heads, value_dim]`` times each head's step, and the log decays ``[tokens, heads]``."""
        if kernels.usable(x):
            from attnplug_engine.kernels.linear_gates import time_steps

            return time_steps(x, dt, self.rate, self.dt_bias, self._limits)
        step = F.softplus(dt.float() + self.dt_bias).clamp(*self._limits)
        return (x * step.unsqueeze(-1)).to(x.dtype), self.rate * step


def _rows(name: str, total: int, start: int, own: slice) -> WeightRows:
    return WeightRows(name, total, slice(start + own.start, start + own.stop))


def _time_step_limit(config: Config) -> tuple[float, float]:
    """Return the bounds of the step. JSON has no infinity, so transformers writes an object in its place."""
    key = "time_step_limit"
    limits = [
        float(str(each["__float__"])) if isinstance(each, Mapping) and "__float__" in each else each
        for each in config.sequence(key) or ()
    ]
    match limits:
        case [int() | float() as low, int() | float() as high] if 0 <= low <= high:
            return float(low), float(high)
    raise config.wrong(key, "a list of the least and the greatest time step")
