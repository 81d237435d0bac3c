"""Mixture of experts: routers, routed experts, and the block that adds shared experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.hf.config_keys import Config
from attnplug_engine.kernels import usable
from attnplug_engine.kernels.invariant import active
from attnplug_engine.models.layers import (
    GATED,
    GATED_BY_NUMBER,
    MLP,
    ClippedGate,
    Linear,
    MLPForm,
    Projection,
    RMSNorm,
    frozen,
)
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, grouped_part, length

if TYPE_CHECKING:
    from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme


class Router(nn.Module):
    """Base class of routers: the experts that a token goes to, and their weights.

    Scores are float32, whatever the model's dtype. Experts are chosen by score plus ``bias``, only from the best
    ``groups`` if there are groups. Their weights are the scores without the bias, scaled; if ``normalised``, they first
    sum to one.
    """

    def __init__(self, weights: Weights, config: Config, experts: int) -> None:
        super().__init__()
        hidden = config.integer("hidden_size")
        # Cast through the model's dtype first, as in transformers; the product is then float32. A GPU multiplies the
        # narrow dtype just as exactly.
        weight = weights.take("weight", experts, hidden)
        self.weight = frozen(weight if weight.is_cuda else weight.float())
        self.experts = experts
        self.per_token = config.integer("num_experts_per_tok", most=experts)
        self.sigmoid = False
        self.logit_bias: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.normalised = False
        self.scaling = 1.0
        self.groups: _Groups | None = None

    def add_row(self, row: Tensor) -> None:
        """Append ``row [1, hidden]`` to the weight: one more product of the input that follows the logits."""
        self.weight = frozen(torch.cat((self.weight, row.to(self.weight))))

    def logits(self, x: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """Return ``x`` normed, and the scores before their activation, ``[tokens, experts (+ 1)]`` float32."""
        x, logits = self._product(x, norm)
        return x, logits if self.logit_bias is None else logits.add_(self.logit_bias)

    def _product(self, x: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        if usable(x):
            from attnplug_engine.kernels.routing import FEW, score

            if 0 < x.shape[0] <= FEW and not active():
                return score(x, self.weight) if norm is None else score(x, self.weight, norm.weight, norm.eps)
        x = x if norm is None else norm(x)
        if self.weight.dtype != torch.float32:
            return x, torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return x, F.linear(x.float(), self.weight)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return chosen experts ``[tokens, k]`` and their weights ``[tokens, k]`` float32."""
        groups = self.groups
        if usable(logits):
            from attnplug_engine.kernels.routing import MAX_EXPERTS, choose

            if self.experts <= MAX_EXPERTS:
                return choose(
                    logits,
                    self.per_token,
                    sigmoid=self.sigmoid,
                    bias=self.bias,
                    normalised=self.normalised,
                    scaling=self.scaling,
                    group=0 if groups is None else groups.shape[1],
                    taken=0 if groups is None else groups.taken,
                )
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        ranked = scores if self.bias is None else scores + self.bias
        if groups is not None:
            ranked = ranked.masked_fill(groups.excluded(ranked), float("-inf"))
        topk_weights, topk_ids = ranked.topk(self.per_token, dim=-1, sorted=False)
        if self.bias is not None:
            topk_weights = scores.gather(1, topk_ids)
        if self.normalised:
            topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_ids, topk_weights if self.scaling == 1.0 else topk_weights * self.scaling


class TopKRouter(Router):
    """Mixtral's router: the most probable experts; if ``normalised``, their weights sum to one.

    With ``biased`` logits have a bias (gpt-oss).
    """

    def __init__(
        self, weights: Weights, config: Config, experts: int, *, normalised: bool = True, biased: bool = False
    ) -> None:
        super().__init__(weights, config, experts)
        self.normalised = normalised
        self.logit_bias = frozen(weights.take("bias", experts, exact=True)) if biased else None


class SoftmaxRouter(Router):
    """DeepSeek-V2's router: most probable experts of all (``greedy``), or of the best groups
    (``group_limited_greedy``)."""

    def __init__(self, weights: Weights, config: Config, experts: int) -> None:
        super().__init__(weights, config, experts)
        self.scaling = config.number("routed_scaling_factor")
        method = config.optional_text("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise config.wrong("topk_method", "'greedy' or 'group_limited_greedy'")
        if config.flag("norm_topk_prob"):
            raise config.wrong("norm_topk_prob", "false: transformers ignores it here, and the authors' code does not")
        self.groups = _Groups(config, experts, judges=1) if method == "group_limited_greedy" else None


class SigmoidRouter(Router):
    """DeepSeek-V3's router: a learned bias affects the choice, but not the weights."""

    def __init__(
        self, weights: Weights, config: Config, experts: int, *, bias: str = "e_score_correction_bias"
    ) -> None:
        super().__init__(weights, config, experts)
        self.sigmoid = True
        self.scaling = config.number("routed_scaling_factor")
        self.bias = frozen(weights.take(bias, experts, exact=True))
        self.normalised = config.flag("norm_topk_prob")
        groups = _Groups(config, experts, judges=2)
        if groups.taken < groups.shape[0]:
            if groups.shape[1] < 2:
                raise config.wrong("n_group", f"at most {experts // 2}: a group is ranked by its two best experts")
            self.groups = groups


class _Groups:
    """Experts in groups of equal size. Only the best groups, by the sum of their ``judges`` best experts, are
    eligible."""

    def __init__(self, config: Config, experts: int, *, judges: int) -> None:
        groups = config.integer("n_group", most=experts)
        if experts % groups:
            raise config.wrong("n_group", f"a divisor of the number of experts, which is {experts}")
        self.shape = (groups, experts // groups)
        self.taken = config.integer("topk_group", most=groups)
        per_token = config.integer("num_experts_per_tok")
        if per_token > self.taken * self.shape[1]:
            raise config.wrong("topk_group", f"enough for {per_token} experts in groups of {self.shape[1]}")
        self.judges = judges

    def excluded(self, ranked: Tensor) -> Tensor:
        """Return a mask ``[tokens, experts]`` of the experts outside the best groups, by ``ranked [tokens,
        experts]``."""
        inside = ranked.unflatten(1, self.shape)
        best = inside.amax(dim=-1) if self.judges == 1 else inside.topk(self.judges, dim=-1).values.sum(dim=-1)
        open_groups = best.topk(self.taken, dim=-1, sorted=False).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, open_groups, False)
        return closed.repeat_interleave(self.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class AddedTerms:
    """Terms added to the routed experts' sum: ``onto``, and ``shared`` times ``sigmoid(gate)``.

    ``onto`` and ``shared`` are ``[tokens, hidden]``, ``gate`` is ``[tokens]`` float32. For kernels only, ``every`` may
    replace ``shared``: the two matrices of the shared expert.
    """

    onto: Tensor | None = None
    shared: Tensor | None = None
    gate: Tensor | None = None
    every: tuple[Tensor, Tensor] | None = None

    def to(self, routed: Tensor) -> Tensor:
        """Add the terms to ``routed`` in place."""
        if self.shared is not None and self.gate is not None:
            routed.addcmul_(self.shared, self.gate.sigmoid().to(routed.dtype).unsqueeze(1))
        return routed if self.onto is None else routed.add_(self.onto)


NOTHING = AddedTerms()


class QuantizedExperts(nn.Module):
    """Quantized weights of all experts, in the shapes of ``Experts``."""

    def __init__(self, gate_up: QuantizedWeight, down: QuantizedWeight) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.on_gpu = gate_up.on_gpu and down.on_gpu


class Experts(nn.Module):
    """MLPs of the routed experts. Each rank has a part of every expert's columns, so that no rank waits for another.

    ``gate_up`` is ``[experts, 2 * own columns, hidden]`` (own columns only, if the form has no gate), ``down`` is
    ``[experts, hidden, own columns]``. ``quantized`` replaces both.
    """

    quantized: QuantizedExperts | None

    def __init__(
        self, weights: Weights, experts: int, hidden: int, intermediate: int, *, form: MLPForm = GATED
    ) -> None:
        super().__init__()
        scheme = weights.expert_scheme((*form.inputs, form.output))
        own = expert_columns(weights, scheme, intermediate)
        columns = length(own)
        parts = form.rows(intermediate, own)
        for expert in {0, experts - 1}:
            weights.at(str(expert)).check("weight", parts, hidden)
        self._describe(form, experts)
        if scheme is not None:
            output = WeightRows(form.output, hidden, slice(0, hidden))
            part = own if weights.parallel.size > 1 else None
            gate_up = weights.empty_quantized(scheme, parts, hidden, experts=experts)
            down = weights.empty_quantized(scheme, [output], intermediate, columns=part, experts=experts)
            for expert in weights.experts_to_fill(experts):
                one = weights.at(str(expert))
                one.fill_quantized(gate_up.expert(expert), parts, hidden)
                one.fill_quantized(down.expert(expert), [output], intermediate, columns=part)
            self.quantized = QuantizedExperts(gate_up, down)
            return
        empty = torch.empty(0, dtype=weights.dtype, device=weights.device)
        self.gate_up = frozen(empty.new_empty(experts, len(form.inputs) * columns, hidden))
        self.down = frozen(empty.new_empty(experts, hidden, columns))
        for expert in weights.experts_to_fill(experts):
            one = weights.at(str(expert))
            one.fill(self.gate_up[expert], "weight", parts)
            self.down[expert].copy_(one.take(f"{form.output}.weight", hidden, intermediate, columns=own))

    def _describe(self, form: MLPForm, experts: int, biases: tuple[Tensor, Tensor] | None = None) -> None:
        """Set the form, and biases of both products: ``[experts, 2 * own columns]`` and ``[experts, hidden]``."""
        self._form, self._experts, self.biases = form, experts, biases
        self.quantized = None
        clip = form.activate
        self._clip = (clip.limit, clip.alpha, clip.offset) if isinstance(clip, ClippedGate) else None

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, added: AddedTerms = NOTHING) -> Tensor:
        """``x [tokens, hidden]``, ``topk_ids [tokens, k]`` and ``topk_weights [tokens, k]`` float32.

        On a GPU this does not synchronize, so that a step can be captured.
        """
        if self.quantized is None and usable(x):
            from attnplug_engine.kernels.experts import fused_experts

            return fused_experts(
                x,
                topk_ids,
                topk_weights,
                self.gate_up,
                self.down,
                gated=len(self._form.inputs) == 2,
                clip=self._clip,
                biases=self.biases,
                shared=added.shared,
                gate=added.gate,
                onto=added.onto,
                every=added.every,
                invariant=active(),
            )
        if self.quantized is not None and self.quantized.on_gpu and x.element_size() == 2:
            from attnplug_engine.kernels.quantized_experts import quantized_experts

            gate_up, down = self.quantized.gate_up, self.quantized.down
            return quantized_experts(
                x,
                topk_ids,
                topk_weights,
                gate_up,
                down,
                form=gate_up.scheme.kernel,
                group=gate_up.scheme.group,
                gated=len(self._form.inputs) == 2,
                clip=self._clip,
                biases=self.biases,
                shared=added.shared,
                gate=added.gate,
                onto=added.onto,
            )
        return added.to(self._one_by_one(x, topk_ids, topk_weights))

    def like(self, mlp: MLP) -> bool:
        """Return True if an MLP is the sum of experts of this width and form."""
        if not isinstance(mlp.gate_up, Linear) or not isinstance(mlp.down, Linear) or self.quantized is not None:
            return False
        return (
            mlp.form.activate is self._form.activate
            and mlp.gate_up.bias is None
            and mlp.down.bias is None
            and self.biases is None
            and mlp.down.weight.shape[1] % self.down.shape[-1] == 0
        )

    def _one_by_one(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run expert by expert. Rows are sorted by expert once, so that each expert works on a view."""
        per_token = topk_ids.shape[1]
        flat = topk_ids.flatten()
        order = flat.argsort(stable=True)
        grouped = x.index_select(0, order.div(per_token, rounding_mode="floor"))
        results = torch.empty_like(grouped)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self._experts).tolist()):
            if count == 0:
                continue
            stop = start + count
            up_bias, down_bias = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
            if self.quantized is not None:
                inner = self.quantized.gate_up.expert(expert).multiply(grouped[start:stop])
                inner = self._form.activate(inner if up_bias is None else inner + up_bias)
                results[start:stop] = self.quantized.down.expert(expert).multiply(inner)
            else:
                inner = self._form.activate(F.linear(grouped[start:stop], self.gate_up[expert], up_bias))
                torch.mm(inner, self.down[expert].t(), out=results[start:stop])
            if down_bias is not None:
                results[start:stop] += down_bias
            start = stop
        # Back in token order, so that a token's sum has a fixed order: index_add_ has none on a GPU.
        per_slot = torch.empty_like(results).index_copy_(0, order, results).unflatten(0, topk_ids.shape)
        if active():  # a batched product may depend on the number of tokens
            return cast(Tensor, (topk_weights.unsqueeze(2) * per_slot.float()).sum(1).to(x.dtype))
        return torch.bmm(topk_weights.unsqueeze(1), per_slot.float()).squeeze(1).to(x.dtype)


def expert_columns(weights: Weights, scheme: Scheme | None, count: int) -> slice:
    """Return the columns of every expert that this rank owns. Raises ParallelError if they cannot be divided."""
    if scheme is None:
        return even_part(count, weights.parallel, "expert columns")
    return grouped_part(count, scheme.column_unit, weights.parallel, "expert columns")


class LatentExperts(nn.Module):
    """Experts in a narrower space: tokens are projected there once for all of them, and their sum is projected back
    (Nemotron-H)."""

    def __init__(self, down: Projection, experts: Experts, up: Projection) -> None:
        super().__init__()
        self.down, self.experts, self.up = down, experts, up

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, added: AddedTerms = NOTHING) -> Tensor:
        return added.to(self.up(self.experts(self.down(x), topk_ids, topk_weights)))


def expert_layers(config: Config) -> list[bool]:
    """Return, per layer, True if it has experts: those that ``mlp_layer_types`` lists so, or all behind the first dense
    ones."""
    count = config.layer_count()
    listed = config.choices("mlp_layer_types", {"dense": False, "sparse": True}, count)
    first = config.integer("first_k_dense_replace", least=0)
    return listed or [index >= first for index in range(count)]


def qwen_mlps(config: Config, *, shared: bool) -> MakeMLP:
    """Return the builder of MLPs and experts of Qwen's models: experts in every ``decoder_sparse_step``-th layer that
    ``mlp_only_layers`` does not list; with ``shared``, each mixture has a shared expert."""
    step, experts = config.integer("decoder_sparse_step"), config.integer("num_experts", least=0)
    dense = config.sequence("mlp_only_layers") or ()

    def mlp(weights: Weights, index: int) -> nn.Module:
        if index in dense or not experts or (index + 1) % step:
            return MLP(weights, config.integer("hidden_size"), config.integer("intermediate_size"))
        return MixtureOfExperts.qwen(weights, config, experts, shared=shared)

    return mlp


MakeMLP = Callable[[Weights, int], nn.Module]
"""Builds the MLP or experts of a layer by its index, from the weights under their name."""
MakeRouter = Callable[[Weights, Config, int], Router]
"""Builds a router for n experts, from the weights under ``gate``."""


class MixtureOfExperts(nn.Module):
    """Routed experts and shared experts, if there are any: a partial sum to be reduced over the ranks.

    With ``gate [1, hidden]`` each token weighs the shared expert (Qwen3-Next). The gate is one more row of the router's
    weight.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts | LatentExperts,
        shared: MLP | None = None,
        *,
        gate: Tensor | None = None,
        adds: bool,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self._gated = gate is not None
        if gate is not None:
            router.add_row(gate)
        self._adds = adds
        self._alike = shared is not None and isinstance(experts, Experts) and experts.like(shared)

    @classmethod
    def deepseek(
        cls, weights: Weights, config: Config, router: MakeRouter, *, form: MLPForm = GATED
    ) -> MixtureOfExperts:
        """Build the mixture of DeepSeek and similar models: shared experts are one MLP as wide as all of them.

        ``form`` is that of the routed experts.
        """
        hidden, width = config.integer("hidden_size"), config.integer("moe_intermediate_size")
        experts = config.integer("n_routed_experts")
        shared = config.optional_integer("n_shared_experts", least=0) or 0
        return cls(
            router(weights.at("gate"), config, experts),
            Experts(weights.at("experts"), experts, hidden, width, form=form),
            MLP(weights.at("shared_experts"), hidden, width * shared) if shared else None,
            adds=weights.parallel.rank == 0,
        )

    @classmethod
    def mixtral(cls, weights: Weights, config: Config) -> MixtureOfExperts:
        """Build the mixture of Mixtral and MiniMax, which has no shared experts."""
        experts, hidden, width = (
            config.integer(key) for key in ("num_local_experts", "hidden_size", "intermediate_size")
        )
        return cls(
            TopKRouter(weights.at("gate"), config, experts),
            Experts(weights.at("experts"), experts, hidden, width, form=GATED_BY_NUMBER),
            adds=weights.parallel.rank == 0,
        )

    @classmethod
    def qwen(cls, weights: Weights, config: Config, experts: int, *, shared: bool) -> MixtureOfExperts:
        """Build the mixture of Qwen's models, with or without a gated shared expert."""
        hidden = config.integer("hidden_size")
        return cls(
            TopKRouter(weights.at("gate"), config, experts, normalised=config.flag("norm_topk_prob")),
            Experts(weights.at("experts"), experts, hidden, config.integer("moe_intermediate_size")),
            MLP(weights.at("shared_expert"), hidden, config.integer("shared_expert_intermediate_size"))
            if shared
            else None,
            gate=weights.take("shared_expert_gate.weight", 1, hidden) if shared else None,
            adds=weights.parallel.rank == 0,
        )

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, onto: Tensor | None = None) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``; rank 0 adds it to ``onto``."""
        x, logits = self.router.logits(x, norm)
        topk_ids, topk_weights = self.router.choose(logits[:, : self.router.experts])
        onto = onto if self._adds else None
        gate = logits[:, -1] if self._gated else None
        return cast(Tensor, self.experts(x, topk_ids, topk_weights, self._added(x, onto, gate)))

    def _added(self, x: Tensor, onto: Tensor | None, gate: Tensor | None) -> AddedTerms:
        shared = self.shared
        if shared is None:
            return AddedTerms(onto)
        if self._alike and usable(x):
            from attnplug_engine.kernels.experts import MAX_SEPARATE_TOKENS

            if x.shape[0] <= MAX_SEPARATE_TOKENS and not active():
                assert isinstance(shared.gate_up, Linear) and isinstance(shared.down, Linear)
                return AddedTerms(onto, gate=gate, every=(shared.gate_up.weight, shared.down.weight))
        return AddedTerms(shared(x, onto=onto)) if gate is None else AddedTerms(onto, shared(x), gate)
