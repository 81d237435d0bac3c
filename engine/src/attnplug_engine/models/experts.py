"""Mixture of experts: which experts a token goes to, and the block that joins them to the shared ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.host import Config
from attnplug_engine.kernels import usable
from attnplug_engine.models.layers import GATED, MLP, Linear, MLPForm, RMSNorm, frozen
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, length


class Router(nn.Module):
    """Which experts a token goes to, and in which shares; what all routers have in common.

    Scores are float32 whatever the model's type. Experts are chosen by score plus ``bias``, and of the best ``groups``
    alone if there are groups. Shares are the scores without the bias, scaled; before that they are ``normalised`` so
    that they add up to one.
    """

    def __init__(self, weights: Weights, config: Config, experts: int) -> None:
        super().__init__()
        hidden = config.integer("hidden_size")
        # Through the model's type first, as transformers has it; the product is float32 then. A GPU multiplies the
        # narrow type as exactly.
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
        """Let one more product of the input, with ``row`` ``[1, hidden]``, follow the logits."""
        self.weight = frozen(torch.cat((self.weight, row.to(self.weight.dtype))))

    def logits(self, x: Tensor, norm: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """``x`` normed, and the scores before their activation: ``[tokens, experts (+ 1)]`` float32."""
        if usable(x):
            from attnplug_engine.kernels.routing import FEW, score

            if 0 < x.shape[0] <= FEW:
                return score(x, self.weight) if norm is None else score(x, self.weight, norm.weight, norm.eps)
        x = x if norm is None else norm(x)
        if self.weight.dtype != torch.float32:
            return x, torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return x, F.linear(x.float(), self.weight)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts ``[tokens, k]`` and their shares ``[tokens, k]`` float32."""
        groups = self.groups
        if usable(logits):
            from attnplug_engine.kernels.routing import MOST_EXPERTS, choose

            if self.experts <= MOST_EXPERTS:
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
        judged = scores if self.bias is None else scores + self.bias
        if groups is not None:
            judged = judged.masked_fill(groups.excluded(judged), float("-inf"))
        shares, chosen = judged.topk(self.per_token, dim=-1, sorted=False)
        if self.bias is not None:
            shares = scores.gather(1, chosen)
        if self.normalised:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, shares if self.scaling == 1.0 else shares * self.scaling


class TopKRouter(Router):
    """Mixtral's: the most probable experts; with ``normalised`` their shares add up to one."""

    def __init__(self, weights: Weights, config: Config, experts: int, *, normalised: bool) -> None:
        super().__init__(weights, config, experts)
        self.normalised = normalised


class SoftmaxRouter(Router):
    """DeepSeek-V2's: most probable experts of all (``greedy``), or of the best groups (``group_limited_greedy``)."""

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
    """DeepSeek-V3's: a learned bias takes part in the choice, but not in the shares."""

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
                raise config.wrong("n_group", f"at most {experts // 2}: a group is judged by its two best experts")
            self.groups = groups


class _Groups:
    """Experts in groups of one size, of which only the best by their ``judges`` best experts are open to a token."""

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

    def excluded(self, judged: Tensor) -> Tensor:
        """``[tokens, experts]``: which experts are in none of the best groups, by ``judged`` ``[tokens, experts]``."""
        inside = judged.unflatten(1, self.shape)
        best = inside.amax(dim=-1) if self.judges == 1 else inside.topk(self.judges, dim=-1).values.sum(dim=-1)
        open_groups = best.topk(self.taken, dim=-1, sorted=False).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, open_groups, False)
        return closed.repeat_interleave(self.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class Added:
    """What the routed experts' sum is added to: ``onto``, and ``shared`` in the share ``sigmoid(gate)``.

    ``onto`` and ``shared`` are ``[tokens, hidden]``, ``gate`` is ``[tokens]`` float32. For kernels alone ``every`` may
    stand in for ``shared``: the two matrices of the shared expert.
    """

    onto: Tensor | None = None
    shared: Tensor | None = None
    gate: Tensor | None = None
    every: tuple[Tensor, Tensor] | None = None

    def to(self, routed: Tensor) -> Tensor:
        """``routed`` with it, in place."""
        if self.shared is not None and self.gate is not None:
            routed.addcmul_(self.shared, self.gate.sigmoid().to(routed.dtype).unsqueeze(1))
        return routed if self.onto is None else routed.add_(self.onto)


NOTHING = Added()


class Experts(nn.Module):
    """The routed experts' MLPs; each rank has a part of every expert's columns, so that no rank waits for another.

    ``gate_up`` is ``[experts, 2 * own columns, hidden]`` (once the columns where the form has no gate), ``down``
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

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, added: Added = NOTHING) -> Tensor:
        """``x`` ``[tokens, hidden]``; ``chosen`` experts ``[tokens, k]`` and their ``shares`` float32 ``[tokens, k]``.

        On a GPU nothing is read back, so that the step can be captured.
        """
        if self._form.fused and usable(x):
            from attnplug_engine.kernels.experts import mix

            return mix(
                x,
                chosen,
                shares,
                self.gate_up,
                self.down,
                gated=len(self._form.inputs) == 2,
                shared=added.shared,
                gate=added.gate,
                onto=added.onto,
                every=added.every,
            )
        return added.to(self._one_by_one(x, chosen, shares))

    def like(self, mlp: MLP) -> bool:
        """Whether an MLP is the sum of some experts of this width and form."""
        return (
            mlp.form.activate is self._form.activate
            and mlp.gate_up.bias is None
            and mlp.down.bias is None
            and mlp.down.weight.shape[1] % self.down.shape[2] == 0
        )

    def _one_by_one(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Rows are brought together by expert once, so that each expert that has any works on a view of them."""
        per_token = chosen.shape[1]
        flat = chosen.flatten()
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
        # Back in the order of the tokens, so that a token's sum has one order: index_add_ has none on a GPU.
        per_slot = torch.empty_like(results).index_copy_(0, order, results).unflatten(0, chosen.shape)
        return torch.bmm(shares.unsqueeze(1), per_slot.float()).squeeze(1).to(x.dtype)


class LatentExperts(nn.Module):
    """Experts of a narrower space: tokens are brought there once for all of them, and their sum back (Nemotron-H)."""

    def __init__(self, down: Linear, experts: Experts, up: Linear) -> None:
        super().__init__()
        self.down, self.experts, self.up = down, experts, up

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, added: Added = NOTHING) -> Tensor:
        return added.to(self.up(self.experts(self.down(x), chosen, shares)))


def expert_layers(config: Config) -> list[bool]:
    """Which layers have experts: those that ``mlp_layer_types`` lists so, or all after the first dense ones."""
    count = config.layer_count()
    listed = config.choices("mlp_layer_types", {"dense": False, "sparse": True}, count)
    first = config.integer("first_k_dense_replace", least=0)
    return listed or [index >= first for index in range(count)]


MakeRouter = Callable[[Weights, Config, int], Router]
"""A router for so many experts, from the weights under ``gate``."""


class MixtureOfExperts(nn.Module):
    """Routed experts and, where there are any, those that every token goes to: a sum to be reduced over the ranks.

    With ``gate`` ``[1, hidden]`` each token takes the shared expert in a share of its own (Qwen3-Next). It is one more
    row of the router's weight.
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
        """DeepSeek's, and that of models like it: shared experts are one MLP as wide as all of them.

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
        chosen, shares = self.router.choose(logits[:, : self.router.experts])
        onto = onto if self._adds else None
        gate = logits[:, -1] if self._gated else None
        return cast(Tensor, self.experts(x, chosen, shares, self._added(x, onto, gate)))

    def _added(self, x: Tensor, onto: Tensor | None, gate: Tensor | None) -> Added:
        shared = self.shared
        if shared is None:
            return Added(onto)
        if self._alike and usable(x):
            from attnplug_engine.kernels.experts import ALONE

            if x.shape[0] <= ALONE:
                return Added(onto, gate=gate, every=(shared.gate_up.weight, shared.down.weight))
        return Added(shared(x, onto=onto)) if gate is None else Added(onto, shared(x), gate)
