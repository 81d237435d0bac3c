"""The round: verify what was proposed, accept what the target chose itself, propose again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, to_device
from attnplug_engine.request import Step, StepEntry
from attnplug_engine.runner import ModelRunner
from attnplug_engine.sampler import sample
from attnplug_engine.speculation.accept import Accepted, accept, moves
from attnplug_engine.speculation.batches import Batches, EagerBatches
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from attnplug_engine.speculation.launched import Brought, LaunchedRounds
from attnplug_engine.speculation.options import Speculation
from attnplug_engine.speculation.state import Members, RoundState
from attnplug_engine.speculation.timing import Timing
from attnplug_engine.speculation.tree import ancestors, depths


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a target's verify found."""

    lengths: Tensor
    """``[requests]``: rows that were committed before."""
    accepted: Accepted
    hidden: Tensor | None
    """``[requests * N, width]``: what the draft takes of the target."""
    logits: Tensor
    """``[requests * N, vocab]`` of the nodes."""


class RoundRunner:
    """Runs the steps of a speculating engine on the target's runner and, where there is one, on the draft's.

    A round is verify, accept, draft; nothing of it waits for the device. What the draft proposes stays there for the
    next round. A step with prefills runs its round first, then the extend, which ends with a draft, too.
    """

    def __init__(self, runner: ModelRunner, draft: DraftRunner | None, speculation: Speculation) -> None:
        self.runner, self.draft, self.speculation = runner, draft, speculation
        self._nodes = speculation.nodes
        self.state = RoundState(runner.tokens, speculation.nodes, trees=speculation.topk > 1)
        self.drafter: Drafter
        if draft is None:
            capacity = runner.capacity
            context = capacity.context_length + capacity.spare
            self.drafter = NgramDrafter(speculation, capacity.max_batch, context, runner.device)
        else:
            self.drafter = ModelDrafter(draft, speculation, runner.table)
        self._exact = runner.backend.claims.needs_cpu_seq_lens

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedRounds:
        """Run a step: asks everything of the device and waits for nothing, unless a backend needs exact lengths."""
        if step.copies:
            self.runner.pools.copy_pages(step.copies)
            if self.draft is not None:
                self.draft.pools.copy_pages(step.copies)
        parts: list[Brought] = []
        timing = None
        if step.rounds:
            timing = Timing(self.runner.device)
            parts.append(self._round(step, timing))
        if step.rounds < len(step.entries):
            parts.append(self._prefill(step))
        launched = LaunchedRounds(parts, timing, replayed=False)
        states = self.runner.pools.linear
        if step.snapshots and states is not None:
            for source, target in step.snapshots:
                states.copy(source, target)
        return launched

    # Rounds

    def _round(self, step: Step, timing: Timing) -> Brought:
        entries, rows = step.entries[: step.rounds], step.rows[: step.rounds]
        members = self._members(entries, rows, step.state_slots[: step.rounds])
        verified = self.verify(self._eager(members))
        timing.mark()
        self.propose(members, verified, timing)
        return self.brought(entries, verified)

    def brought(self, entries: Sequence[StepEntry], verified: Verified) -> Brought:
        """What the host is told of a round, with the logits of the accepted nodes in their order."""
        requests, accepted, logits = [entry.request for entry in entries], verified.accepted, verified.logits
        if self.state.trees and any(request.params.logprobs is not None for request in requests):
            first = torch.arange(0, logits.shape[0], self._nodes, device=logits.device)
            logits = logits.index_select(0, (accepted.path + first.unsqueeze(1)).flatten())
        count = len(requests)
        return Brought(requests, accepted.tokens[:count], accepted.counts[:count], logits)

    def verify(self, batches: Batches) -> Verified:
        """Run the target over all nodes of the members, and take what it chose."""
        members, state, nodes = batches.members, self.state, self._nodes
        newest, lengths = members.begin(state)
        proposal = state.proposal(members.rows)
        depth, tree = torch.arange(nodes, device=lengths.device).unsqueeze(0), None
        if proposal.parents is not None:
            depth, tree = depths(proposal.parents), ancestors(proposal.parents)
        positions = lengths.unsqueeze(1) + depth
        batch = batches.make(ForwardMode.TARGET_VERIFY, lengths + nodes, positions, tree=tree)
        batch.input_ids = torch.cat([newest.unsqueeze(1), proposal.tokens.clamp(min=0)], 1).flatten()
        batches.begin(batch)
        hidden, taken = self._target(batch)
        logits = self.runner.model.logits(hidden)
        chosen = sample(logits, members.sampled_at(positions)).view(-1, nodes)
        accepted = accept(proposal, chosen)
        last = accepted.tokens.gather(1, accepted.counts.unsqueeze(1) - 1)[:, 0]
        state.commit(members.rows, lengths + accepted.counts, last)
        if proposal.parents is not None:
            slots = batch.geometry.new_slots().view(-1, nodes)
            self.runner.pools.move_rows(*moves(accepted, slots))
        self.runner.attention.commit_states(batch, accepted.counts)
        return Verified(lengths, accepted, taken, logits)

    def propose(self, members: Members, verified: Verified, timing: Timing) -> None:
        """Have the drafter propose for the members' next round."""
        batches = self._draft_batches(members)
        proposal = self.drafter.after_round(batches, verified.lengths, verified.accepted, verified.hidden, timing.mark)
        self.state.propose(members.rows, proposal)
        timing.mark()

    def _target(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The target's hidden states of a batch, and what the draft takes of them."""
        takes, model = self.drafter.takes, self.runner.model
        if not takes.layers:
            hidden = self.runner.forward(batch)
            return hidden, hidden if takes.last else None
        assert batch.input_ids is not None and batch.positions is not None
        with self.runner.attention.running() as attention:
            attention.plan(batch)
            hidden, tapped = model.forward(batch.input_ids, batch.positions, batch, takes.layers)
        return hidden, torch.cat([tapped, hidden], 1) if takes.last else tapped

    # Prefills

    def _prefill(self, step: Step) -> Brought:
        """Extend, sample where a prefill ends, and draft."""
        runner, first = self.runner, step.rounds
        part = Step(
            ForwardMode.EXTEND, step.entries[first:], (), step.rows[first:], step.state_slots[first:], step.snapshots
        )
        batch = runner.prepare(part)
        hidden, taken = self._target(batch)
        entries = [entry for entry in part.entries if entry.sampled]
        rows = [row for row, entry in zip(part.rows, part.entries, strict=True) if entry.sampled]
        ended, sampled = None, runner.tokens[:0]
        logits = hidden[:0]
        if entries:
            members = self._members(entries, rows, (), prefilled=True)
            ended = self._draft_batches(members)
            logits = runner.model.logits(hidden.index_select(0, to_device(part.sampled_rows, runner.device)))
            sampled = sample(logits, members.sampled_at(members.committed.unsqueeze(1) - 1))
            self.state.commit(members.rows, members.committed, sampled)
        proposal = self.drafter.after_prefill(part.entries, part.rows, batch.geometry.page_table, taken, ended, sampled)
        if ended is not None and proposal is not None:
            self.state.propose(ended.members.rows, proposal)
        counts = torch.ones_like(sampled)
        return Brought([entry.request for entry in entries], sampled.unsqueeze(1), counts, logits)

    # Who takes part

    def _members(
        self, entries: Sequence[StepEntry], rows: Sequence[int], slots: Sequence[int], *, prefilled: bool = False
    ) -> Members:
        runner = self.runner
        page_table, _ = runner.table.batch(rows)
        longest = max(runner.table.lengths_cpu(rows).tolist())
        return Members.of(entries, rows, page_table, longest, runner.sampler.seed_of, slots, prefilled=prefilled)

    def _eager(self, members: Members) -> Batches:
        runner = self.runner
        return EagerBatches(runner.attention, members, runner.capacity.page_size, exact=self._exact)

    def _draft_batches(self, members: Members) -> Batches:
        draft = self.draft
        if draft is None:
            return self._eager(members)
        return EagerBatches(draft.attention, members, draft.capacity.page_size, exact=draft.exact)
