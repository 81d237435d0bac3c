"""Round runner: verify proposed tokens, accept the target's choices, propose again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode
from attnplug.host import ModelAttention
from attnplug.kernels import to_device
from attnplug_engine.execution.runner import ModelRunner, Phase
from attnplug_engine.execution.sampler import sample
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.graphs.capture_check import CaptureCheck
from attnplug_engine.graphs.decode import CapturedStep
from attnplug_engine.graphs.prefill import PrefillGraphs, captures_extends
from attnplug_engine.graphs.step_graphs import CaptureJob, capture_all, capture_check, prefill_graphs, prefill_job
from attnplug_engine.kernels.invariant import arithmetic
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_engine.settings.speculation import Speculation
from attnplug_engine.speculation.acceptance import Accepted, accept_and_commit, moves
from attnplug_engine.speculation.batches import Batches, EagerBatches, RoundShapes
from attnplug_engine.speculation.draft_prefills import DraftPrefillGraphs
from attnplug_engine.speculation.draft_runner import DraftRunner, needs_lengths
from attnplug_engine.speculation.frozen_kv import FrozenKVProposer
from attnplug_engine.speculation.in_flight import RoundOutput, RoundsInFlight
from attnplug_engine.speculation.next_verify import NextVerify
from attnplug_engine.speculation.plan_stream import PlanStream
from attnplug_engine.speculation.proposers import DraftModelProposer, NgramProposer, Prefill, Proposer
from attnplug_engine.speculation.round_graphs import CapturedRound, RoundGraphs
from attnplug_engine.speculation.round_state import Members, RoundState
from attnplug_engine.speculation.timing import Timing
from attnplug_engine.speculation.verify_rows import VerifyRows
from attnplug_engine.speculation.window import WindowProposer


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """Result of the target's verify."""

    lengths: Tensor
    """Rows ``[requests]`` that were committed before."""
    committed: Tensor
    """Rows ``[requests]`` that are committed now."""
    accepted: Accepted
    hidden: Tensor | None
    """Hidden states ``[requests * N, width]`` that the draft reads."""
    logits: Tensor
    """Logits ``[requests * N, vocab]`` of the nodes."""


@dataclass(slots=True, eq=False)
class _CapturedResults:
    """Results of captured graphs that the next graph reads."""

    verified: Verified | None = None
    newest: Tensor | None = None


class RoundRunner:
    """Runs the steps of a speculating engine on the target's runner and on the draft's, if there is one.

    A round is verify, accept, draft; nothing in it waits for the device. Proposals stay on the device for the next
    round. A step with prefills runs its round first, then the extend, which ends with a draft as well.

    With a ``plan_stream``, the batches of eager rounds are planned ahead: the draft's extend before verify runs; the
    draft's further steps and the next round's verify before the draft's extend runs. There is none if a backend needs
    exact lengths on the host, because planning then waits for the device.
    """

    def __init__(
        self, runner: ModelRunner, draft: DraftRunner | None, speculation: Speculation, *, plan_stream: bool = False
    ) -> None:
        self.runner, self.draft, self.speculation = runner, draft, speculation
        self._nodes = speculation.nodes
        self.state = RoundState(runner.tokens, speculation.nodes, trees=speculation.topk > 1)
        self.proposer: Proposer
        if draft is None:
            capacity = runner.capacity
            context = capacity.context_length + capacity.lookahead
            self.proposer = NgramProposer(speculation, capacity.max_batch, context, runner.device)
        elif draft.model.reads_target:
            self.proposer = FrozenKVProposer(draft, speculation, runner.tokens)
        elif draft.model.models > 1:
            self.proposer = WindowProposer(draft, speculation)
        else:
            self.proposer = DraftModelProposer(draft, speculation)
        self.graphs: RoundGraphs | None = None
        self._verified: dict[CapturedRound, _CapturedResults] = {}
        self.prefill_graphs: PrefillGraphs | None = None
        """Captured prefills of the target."""
        self._taken: dict[ForwardBatch, Tensor | None] = {}
        """Hidden states ``[tokens, width]`` that the draft reads, by the batch of a captured prefill."""
        self.draft_prefills: DraftPrefillGraphs | None = None
        """Captured prefills of the draft."""
        self._exact = needs_lengths(runner.backend, runner.pools)
        self.plan_stream: PlanStream | None = None
        self.planned_in_order: list[str] = []
        """Backends that prevent a requested plan stream."""
        if plan_stream:
            exact = [runner.backend] * self._exact + ([draft.backend] if draft is not None and draft.exact else [])
            self.planned_in_order = [backend.backend_id.name for backend in exact]
            self.plan_stream = None if exact else PlanStream(runner.device)
        self._extends = RoundShapes(self.proposer.extends, runner.device)
        self._further = RoundShapes(self.proposer.further, runner.device)
        self._next_verify = NextVerify(speculation, runner.table)

    # Capturing

    @torch.inference_mode()
    def capture(
        self,
        sizes: Sequence[int],
        capture: CaptureFunction,
        progress: Callable[[int, int], None] | None = None,
        *,
        prefills: Sequence[int] = (),
        keep_all: bool = True,
    ) -> RoundGraphs:
        """Capture rounds of these batch sizes and the target's prefills of these numbers of tokens, the largest first,
        so that the others reuse its memory.

        Unless ``keep_all``, a prefill is kept only if its graph saves time. Each graph is compared with eager attention
        before it is used. The workspace does not grow afterwards.
        """
        runner, draft, capacity = self.runner, self.draft, self.runner.capacity
        runner.enter(Phase.WARM_UP, "capture graphs once, before the first step")
        graphs = RoundGraphs(
            runner.attention,
            None if draft is None else draft.attention,
            runner.table,
            capacity.page_size,
            capacity.context_length + capacity.lookahead,
            largest=max(sizes),
            rows=self._nodes,
            draft_rows=self.speculation.most_draft_rows,
            draft_shapes=[*self.proposer.extends, *self.proposer.further],
            has_states=runner.pools.linear is not None,
            device=runner.device,
        )
        checks = [capture_check(runner)]
        if draft is not None:
            own = (draft.model.spec, draft.attention, draft.pools, runner.allocator, draft.dtype, runner.device)
            checks.append(CaptureCheck(*own))
        prefill = drafts = None
        if prefills:
            prefill = prefill_graphs(runner, self._captured_target, largest=max(prefills), keep_all=keep_all)
            drafts = self.draft_prefills = self._draft_prefills(prefill)

        def follow(step: CapturedStep) -> None:
            if drafts is not None:
                checks[1].run(drafts.capture(step, partial(self._taken.get, step.batch), capture), capture)

        def capture_round(size: int) -> None:
            for captured in graphs.capture(size, capture, self._parts):
                for check, batches in zip(checks, (captured.target, captured.draft), strict=False):
                    for batch in batches.made:
                        check.run(batch, capture)

        jobs = [CaptureJob(sizes, capture_round, lambda: graphs.sizes)]
        if prefill is not None:
            job = prefill_job(runner, prefill, prefills, capture, checks[0], keep_all=keep_all, follow=follow)
            jobs.insert(0, job)
        reserved = () if prefill is None else (prefill.requests, prefill.largest, drafts.rows if drafts else 0)
        capture_all(runner, jobs, lambda: graphs.reserve(runner.allocator, *reserved), progress)
        self.graphs = graphs
        self.prefill_graphs = prefill if prefill is not None and prefill.sizes else None
        runner.enter(Phase.SERVE)
        return graphs

    def _parts(self, captured: CapturedRound) -> list[Callable[[], None]]:
        """Return the parts of a round, one graph each: verify, the draft's extend, its further steps."""
        found = self._verified[captured] = _CapturedResults()

        def verify() -> None:
            found.verified = self.verify(captured.target, captured.members.verify_rows(self.state))

        def extend() -> None:
            assert found.verified is not None
            found.newest = self._catch_up(captured.draft, found.verified)

        def ahead() -> None:
            assert found.verified is not None
            self._look_ahead(captured.draft, found.newest, found.verified)

        return [verify, extend, ahead]

    @property
    def why_no_draft_prefill(self) -> str:
        """Reason why prefills of the draft cannot be captured; empty if they can, or if it has none."""
        if self.draft is None or not isinstance(self.proposer, DraftModelProposer):
            return ""
        if isinstance(self.proposer, WindowProposer):
            return "its models choose tokens between their prefills"
        return "" if captures_extends(self.draft.backend) else f"{self.draft.backend.backend_id.name} cannot capture it"

    def _draft_prefills(self, prefill: PrefillGraphs) -> DraftPrefillGraphs | None:
        """Return the graphs of the draft's prefills; None if it has none, or they cannot be captured."""
        draft, proposer = self.draft, self.proposer
        if draft is None or not isinstance(proposer, DraftModelProposer) or self.why_no_draft_prefill:
            return None
        return DraftPrefillGraphs(draft, proposer.lay_out, prefill, more_rows=proposer.more_rows)

    def _captured_target(self, batch: ForwardBatch, rows: Tensor) -> Tensor:
        """Run the target over a captured prefill; return the logits of these rows."""
        hidden, self._taken[batch] = self._target(batch)
        return self.runner.model.logits(hidden.index_select(0, rows))

    # Steps

    @torch.inference_mode()
    def launch(self, step: Step) -> RoundsInFlight:
        """Launch a step on the device without waiting for it, unless a backend needs exact lengths."""
        self.runner.phase = Phase.SERVE
        if step.copies:
            self.runner.pools.copy_pages(step.copies)
            if self.draft is not None:
                self.draft.copy_pages(step.copies)
        self._join()
        parts: list[RoundOutput] = []
        timing = captured = None
        replayed_prefill = False
        if step.rounds:
            timing = Timing(self.runner.device)
            if self.graphs is not None:
                captured = self.graphs.fitting(step.rounds, step.entries[: step.rounds])
            parts.append(self._round(step, timing) if captured is None else self._replay(captured, step, timing))
        if step.rounds < len(step.entries):
            self._join()
            output, replayed_prefill = self._prefill(step)
            parts.append(output)
        states = self.runner.pools.linear
        if step.snapshots and states is not None:
            for source, target in step.snapshots:
                states.copy(source, target)
        return RoundsInFlight(parts, timing, replayed=captured is not None, replayed_prefill=replayed_prefill)

    def _join(self) -> None:
        """Join the plan stream. Plans made in order may reuse memory allocated on it, so it must be done."""
        if self.plan_stream is not None:
            self.plan_stream.join()

    def _round(self, step: Step, timing: Timing) -> RoundOutput:
        entries, rows = step.entries[: step.rounds], step.rows[: step.rounds]
        slots = step.state_slots[: step.rounds]
        members = self._members(entries, rows, slots)
        target, batches = self._eager(members), self._draft_batches(members)
        found = members.verify_rows(self.state)
        target.adopt(self._next_verify.take(entries, rows, slots, members.longest))
        batches.adopt(batches.plan_ahead(self._extends, found.lengths))
        verified = self.verify(target, found)
        timing.mark()
        output = self._round_output(entries, verified)
        batches.adopt(batches.plan_ahead(self._further, verified.committed))
        if not any(entry.sampled for entry in step.entries[step.rounds :]):  # otherwise the next round has more members
            self._next_verify.plan(target, entries, rows, slots, verified.committed, output)
        newest = self._catch_up(batches, verified)
        timing.mark()
        self._look_ahead(batches, newest, verified)
        timing.mark()
        return output

    def _replay(self, captured: CapturedRound, step: Step, timing: Timing) -> RoundOutput:
        assert self.graphs is not None
        self._next_verify.drop()
        entries, slots = step.entries[: step.rounds], step.state_slots[: step.rounds]
        self.graphs.begin(captured, entries, step.rows[: step.rounds], slots, self.runner.sampler.seed_of)
        verify, *drafting = captured.parts
        verify()
        self.runner.backend_usage.add(*captured.target.made)
        timing.mark()
        verified = self._verified[captured].verified  # a replay writes to the tensors of the capture
        assert verified is not None
        output = self._round_output(entries, verified)
        for replay in drafting:
            replay()
            timing.mark()
        return output

    def _round_output(self, entries: Sequence[StepEntry], verified: Verified) -> RoundOutput:
        """Return the output of a round, with the logits of the accepted nodes in their order."""
        requests, accepted, logits = [entry.request for entry in entries], verified.accepted, verified.logits
        if self.state.trees and any(request.params.logprobs is not None for request in requests):
            first = torch.arange(0, logits.shape[0], self._nodes, device=logits.device)
            logits = logits.index_select(0, (accepted.path + first.unsqueeze(1)).flatten())
        count = len(requests)
        with arithmetic(self.runner.model.batch_invariant):
            return RoundOutput(
                requests, accepted.tokens[:count], accepted.counts[:count], logits, verified.committed[:count]
            )

    def verify(self, batches: Batches, rows: VerifyRows) -> Verified:
        """Run the target over all nodes of the members, and accept what it chose."""
        members, state, nodes = batches.members, self.state, self._nodes
        positions = rows.positions.view(-1, nodes)
        batch = batches.make(ForwardMode.TARGET_VERIFY, rows.seq_lens, positions, tree=rows.tree)
        batch.input_ids = rows.ids
        batches.begin(batch)
        hidden, taken = self._target(batch)
        logits = self.runner.model.logits(hidden)
        with arithmetic(self.runner.model.batch_invariant):
            chosen = sample(logits, rows.sampling).view(-1, nodes)
        accepted = accept_and_commit(rows.proposal, chosen, members.rows, rows.lengths, state.lengths, state.tokens)
        if rows.tree is not None:
            slots = batch.geometry.new_slots().view(-1, nodes)
            self.runner.pools.move_rows(*moves(accepted, slots))
        self.runner.attention.commit_states(batch, accepted.counts)
        return Verified(rows.lengths, rows.lengths + accepted.counts, accepted, taken, logits)

    def _catch_up(self, batches: Batches, verified: Verified) -> Tensor | None:
        return self.proposer.catch_up(batches, verified.lengths, verified.accepted, verified.hidden)

    def _look_ahead(self, batches: Batches, newest: Tensor | None, verified: Verified) -> None:
        """Propose for the members' next round."""
        proposal = self.proposer.look_ahead(batches, newest, verified.committed)
        self.state.propose(batches.members.rows, proposal)

    def _target(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Return the target's hidden states of a batch, and those that the draft reads."""
        takes, model = self.proposer.hidden_inputs, self.runner.model
        if not takes.layers:
            hidden = self.runner.forward(batch)
            return hidden, hidden if takes.last else None
        assert batch.input_ids is not None and batch.positions is not None
        with self.runner.attention.running() as attention:
            attention.plan(batch)
            if not batch.geometry.captured:
                self.runner.backend_usage.add(batch)
            hidden, tapped = model.forward(batch.input_ids, batch.positions, batch, takes.layers)
        return hidden, torch.cat([tapped, hidden], 1) if takes.last else tapped

    # Prefills

    def _prefill(self, step: Step) -> tuple[RoundOutput, bool]:
        """Extend, sample where a prefill ends, and draft. Also return True if the target's extend was replayed."""
        runner, first = self.runner, step.rounds
        part = Step(
            ForwardMode.EXTEND, step.entries[first:], (), step.rows[first:], step.state_slots[first:], step.snapshots
        )
        graphs = self.prefill_graphs
        captured, newest = None if graphs is None else graphs.fitting(part), None
        if graphs is not None and captured is not None:
            replayed, logits = graphs.run(captured, part, runner.sampler), captured.logits[0]
            batch, taken = captured.batch, self._taken[captured.batch]
            taken = None if taken is None else taken[: part.num_tokens]
            runner.backend_usage.add(batch)
        else:
            batch = runner.batch(part)
            hidden, taken = self._target(batch)
            logits = hidden[:0]
        entries = [entry for entry in part.entries if entry.sampled]
        rows = [row for row, entry in zip(part.rows, part.entries, strict=True) if entry.sampled]
        ended, sampled = None, runner.tokens[:0]
        committed = sampled
        if entries:
            self._next_verify.drop()
            members = self._members(entries, rows, (), prefilled=True)
            ended = self._draft_batches(members)
            if captured is None:
                logits = runner.model.logits(hidden.index_select(0, to_device(part.sampled_rows, runner.device)))
                with arithmetic(runner.model.batch_invariant):
                    sampled = sample(logits, members.sampled(members.places(members.committed - 1)[0]))
            else:
                sampled = replayed
            committed = members.committed
            self.state.commit(members.rows, committed, sampled)
        requests, one = [entry.request for entry in entries], torch.ones_like(sampled)
        with arithmetic(runner.model.batch_invariant):
            output = RoundOutput(requests, sampled.unsqueeze(1), one, logits, committed)
        if captured is not None and self.draft_prefills is not None:
            newest = self.draft_prefills.run(captured.size, part)
        page_table = batch.geometry.page_table[: len(part.entries)]
        proposal = self.proposer.after_prefill(Prefill(part, page_table, taken, ended, sampled, newest))
        if ended is not None and proposal is not None:
            self.state.propose(ended.members.rows, proposal)
        return output, captured is not None

    # Members

    def _members(
        self, entries: Sequence[StepEntry], rows: Sequence[int], slots: Sequence[int], *, prefilled: bool = False
    ) -> Members:
        runner = self.runner
        page_table, _ = runner.table.batch(rows)
        longest = max(runner.table.lengths_cpu(rows).tolist())
        return Members.of(entries, rows, page_table, longest, runner.sampler.seed_of, slots, prefilled=prefilled)

    def _eager(self, members: Members) -> EagerBatches:
        runner = self.runner
        return self._batches(runner.attention, members, exact=self._exact)

    def _draft_batches(self, members: Members) -> EagerBatches:
        draft = self.draft
        if draft is None:
            return self._eager(members)
        return self._batches(draft.attention, members, exact=draft.exact)

    def _batches(self, attention: ModelAttention, members: Members, *, exact: bool) -> EagerBatches:
        page_size = self.runner.capacity.page_size
        return EagerBatches(attention, members, page_size, exact=exact, stream=self.plan_stream)
