"""Mixture of experts: routers, routed experts, and the block that adds shared experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.hf.config_keys import Config
from attnplug_engine.kernels import usable
from attnplug_engine.kernels.invariant import active
from attnplug_engine.models.layers import GATED, MLP, Linear, MLPForm, RMSNorm, frozen
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, length


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
        self.bias: nn.Parameter | None = None
        self.normalised = False
        self.scaling = 1.0
        self.groups: _Groups | None = None

    def add_row(self, row: Tensor) -> None:
        """Append ``row [1, hidden]`` to the weight: one more product of the input that follows the logits."""
        self.weight = frozen(torch.cat((self.weight, row.to(self.weight.dtype))))

    def logits(self, x: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """Return ``x`` normed, and the scores before their activation, ``[tokens, experts (+ 1)]`` float32."""
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
    """Mixtral's router: the most probable experts; if ``normalised``, their weights sum to one."""

    def __init__(self, weights: Weights, config: Config, experts: int, *, normalised: bool) -> None:
        super().__init__(weights, config, experts)
        self.normalised = normalised


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


class Experts(nn.Module):
    """MLPs of the routed experts. Each rank has a part of every expert's columns, so that no rank waits for another.

    ``gate_up`` is ``[experts, 2 * own columns, hidden]`` (own columns only, if the form has no gate), ``down`` is
    ``[experts, hidden, own columns]``.
    """

    def __init__(
        self, weights: Weights, experts: int, hidden: int, intermediate: int, *, form: MLPForm = GATED
    ) -> None:
        super().__init__()
        own = even_part(intermediate, weights.parallel, "expert columns")
        columns = length(own)
        parts = [WeightRows(name, intermediate, own) for name in form.inputs]
        for expert in {0, experts - 1}:
            weights.at(str(expert)).check("weight", parts, hidden)
        empty = torch.empty(0, dtype=weights.dtype, device=weights.device)
        self.gate_up = frozen(empty.new_empty(experts, len(form.inputs) * columns, hidden))
        self.down = frozen(empty.new_empty(experts, hidden, columns))
        for expert in range(experts):
            one = weights.at(str(expert))
            one.fill(self.gate_up[expert], "weight", parts)
            self.down[expert].copy_(one.take(f"{form.output}.weight", hidden, intermediate, columns=own))
        self._form = form

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, added: AddedTerms = NOTHING) -> Tensor:
        """``x [tokens, hidden]``, ``topk_ids [tokens, k]`` and ``topk_weights [tokens, k]`` float32.

        On a GPU this does not synchronize, so that a step can be captured.
        """
        if self._form.fused and usable(x):
            from attnplug_engine.kernels.experts import fused_experts

            return fused_experts(
                x,
                topk_ids,
                topk_weights,
                self.gate_up,
                self.down,
                gated=len(self._form.inputs) == 2,
                shared=added.shared,
                gate=added.gate,
                onto=added.onto,
                every=added.every,
                invariant=active(),
            )
        return added.to(self._one_by_one(x, topk_ids, topk_weights))

    def like(self, mlp: MLP) -> bool:
        """Return True if an MLP is the sum of experts of this width and form."""
        return (
            mlp.form.activate is self._form.activate
            and mlp.gate_up.bias is None
            and mlp.down.bias is None
            and mlp.down.weight.shape[1] % self.down.shape[2] == 0
        )

    def _one_by_one(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run expert by expert. Rows are sorted by expert once, so that each expert works on a view."""
        per_token = topk_ids.shape[1]
        flat = topk_ids.flatten()
        order = flat.argsort(stable=True)
        grouped = x.index_select(0, order.div(per_token, rounding_mode="floor"))
        results = torch.empty_like(grouped)
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.gate_up.shape[0]).tolist()):
            if count == 0:
                continue
            stop = start + count
            inner = self._form.activate(F.linear(grouped[start:stop], self.gate_up[expert]))
            torch.mm(inner, self.down[expert].t(), out=results[start:stop])
            start = stop
        # Back in token order, so that a token's sum has a fixed order: index_add_ has none on a GPU.
        per_slot = torch.empty_like(results).index_copy_(0, order, results).unflatten(0, topk_ids.shape)
        if active():  # a batched product may depend on the number of tokens
            return cast(Tensor, (topk_weights.unsqueeze(2) * per_slot.float()).sum(1).to(x.dtype))
        return torch.bmm(topk_weights.unsqueeze(1), per_slot.float()).squeeze(1).to(x.dtype)


class LatentExperts(nn.Module):
    """Experts in a narrower space: tokens are projected there once for all of them, and their sum is projected back
    (Nemotron-H)."""

    def __init__(self, down: Linear, experts: Experts, up: Linear) -> None:
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
                return AddedTerms(onto, gate=gate, every=(shared.gate_up.weight, shared.down.weight))
        return AddedTerms(shared(x, onto=onto)) if gate is None else AddedTerms(onto, shared(x), gate)
