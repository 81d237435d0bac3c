"""Mixture of experts: which experts a token goes to, and the block that joins them to the shared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.host import Config
from attnplug_engine.models.layers import GATED, MLP, Linear, MLPForm, RMSNorm, frozen
from attnplug_engine.models.weights import Rows, Weights
from attnplug_engine.parallel import even_part, length


class Router(nn.Module):
    """Scores of the experts for a token, in float32 whatever the model's type; what all routers share.

    Subclass contract: ``choose`` turns scores before their activation, ``[tokens, experts]`` float32, into experts and
    shares.
    """

    def __init__(self, weights: Weights, config: Config, experts: int) -> None:
        super().__init__()
        hidden = config.integer("hidden_size")
        # Through the model's type first, as transformers has it; the product is float32 then.
        self.weight = frozen(weights.take("weight", experts, hidden).float())
        self.per_token = config.integer("num_experts_per_tok", most=experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts ``[tokens, k]`` and their shares ``[tokens, k]`` float32."""
        return self.choose(F.linear(x.float(), self.weight))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class TopKRouter(Router):
    """Mixtral's: the most probable experts; with ``normalised`` their shares add up to one."""

    def __init__(self, weights: Weights, config: Config, experts: int, *, normalised: bool) -> None:
        super().__init__(weights, config, experts)
        self.normalised = normalised

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = logits.softmax(dim=-1).topk(self.per_token, dim=-1, sorted=False)
        return chosen, shares / shares.sum(dim=-1, keepdim=True) if self.normalised else shares


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
        self.groups = _Groups(config, experts) if method == "group_limited_greedy" else None

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(dim=-1)
        if self.groups is not None:
            best = scores.unflatten(1, self.groups.shape).amax(dim=-1)
            scores = scores.masked_fill(self.groups.excluded(best), 0.0)
        shares, chosen = scores.topk(self.per_token, dim=-1, sorted=False)
        return chosen, shares * self.scaling


class SigmoidRouter(Router):
    """DeepSeek-V3's: a learned bias takes part in the choice, but not in the shares."""

    def __init__(
        self, weights: Weights, config: Config, experts: int, *, bias: str = "e_score_correction_bias"
    ) -> None:
        super().__init__(weights, config, experts)
        self.scaling = config.number("routed_scaling_factor")
        self.bias = frozen(weights.take(bias, experts, exact=True))
        self.normalised = config.flag("norm_topk_prob")
        self.groups = _Groups(config, experts)
        if not self.groups.all_taken and self.groups.shape[1] < 2:
            raise config.wrong("n_group", f"at most {experts // 2}: a group is judged by its two best experts")

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        biased = scores + self.bias
        if not self.groups.all_taken:
            best = biased.unflatten(1, self.groups.shape).topk(2, dim=-1).values.sum(dim=-1)
            biased = biased.masked_fill(self.groups.excluded(best), float("-inf"))
        chosen = biased.topk(self.per_token, dim=-1, sorted=False).indices
        shares = scores.gather(1, chosen)
        if self.normalised:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, shares * self.scaling


class _Groups:
    """Experts in groups of one size, of which only the best are open to a token."""

    def __init__(self, config: Config, experts: int) -> None:
        groups = config.integer("n_group", most=experts)
        if experts % groups:
            raise config.wrong("n_group", f"a divisor of the number of experts, which is {experts}")
        self.shape = (groups, experts // groups)
        self.taken = config.integer("topk_group", most=groups)
        per_token = config.integer("num_experts_per_tok")
        if per_token > self.taken * self.shape[1]:
            raise config.wrong("topk_group", f"enough for {per_token} experts in groups of {self.shape[1]}")
        self.all_taken = self.taken == groups

    def excluded(self, best: Tensor) -> Tensor:
        """``[tokens, experts]``: which experts are in none of the best groups, by ``best`` ``[tokens, groups]``."""
        open_groups = best.topk(self.taken, dim=-1, sorted=False).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, open_groups, False)
        return closed.repeat_interleave(self.shape[1], dim=1)


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
        parts = [Rows(name, intermediate, own) for name in form.inputs]
        for expert in {0, experts - 1}:
            weights.at(str(expert)).check("weight", parts, hidden)
        empty = torch.empty(0, dtype=weights.dtype, device=weights.device)
        self.gate_up = frozen(empty.new_empty(experts, len(form.inputs) * columns, hidden))
        self.down = frozen(empty.new_empty(experts, hidden, columns))
        for expert in range(experts):
            one = weights.at(str(expert))
            one.fill(self.gate_up[expert], "weight", parts)
            self.down[expert].copy_(one.take(f"{form.output}.weight", hidden, intermediate, columns=own))
        self._activate = form.activate

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """``x`` ``[tokens, hidden]``; ``chosen`` experts ``[tokens, k]`` and their ``shares`` float32 ``[tokens, k]``.

        Rows are brought together by expert once, so that each expert that has any works on a view of them.
        """
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
            inner = self._activate(F.linear(grouped[start:stop], self.gate_up[expert]))
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

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return cast(Tensor, self.up(self.experts(self.down(x), chosen, shares)))


class WeighedExpert(nn.Module):
    """A shared expert that each token takes in a share of its own, between 0 and 1 (Qwen3-Next)."""

    def __init__(self, expert: MLP, gate: Linear) -> None:
        super().__init__()
        self.expert, self.gate = expert, gate

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.expert(x) * self.gate(x).sigmoid())


MakeRouter = Callable[[Weights, Config, int], Router]
"""A router for so many experts, from the weights under ``gate``."""


class MixtureOfExperts(nn.Module):
    """Routed experts and, where there are any, those that every token goes to: a sum to be reduced over the ranks."""

    def __init__(
        self, router: Router, experts: Experts | LatentExperts, shared: nn.Module | None = None, *, adds: bool
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self._adds = adds

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
        x = x if norm is None else norm(x)
        chosen, shares = self.router(x)
        routed = cast(Tensor, self.experts(x, chosen, shares))
        if self.shared is not None:
            routed.add_(self.shared(x))
        return routed if onto is None or not self._adds else routed.add_(onto)
