"""Step loop: runs a scheduler's steps and delivers their tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from attnplug_engine.execution.in_flight import StepInFlight
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.request import FinishReason, Request, TokenLogprobs
from attnplug_engine.scheduling.scheduler import Scheduler
from attnplug_engine.scheduling.step import RoundResult, Step, StepResult
from attnplug_engine.serving.statistics import Statistics
from attnplug_engine.speculation.in_flight import RoundsInFlight
from attnplug_engine.speculation.rounds import RoundRunner
from attnplug_engine.speculation.scheduler import RoundScheduler
from attnplug_engine.speculation.statistics import RoundStatistics


class StepLoop:
    """Runs a scheduler's steps and gives each request and its followers their tokens. One thread at a time.

    ``depth`` steps are in flight: with 2, the next one is launched before this one is awaited. ``rounds`` runs the
    steps of an engine that speculates.
    """

    def __init__(self, runner: ModelRunner, rounds: RoundRunner | None, scheduler: Scheduler, depth: int) -> None:
        self.runner, self.rounds, self.scheduler = runner, rounds, scheduler
        self.statistics = Statistics(
            rounds=None if rounds is None else RoundStatistics(rounds.speculation.steps),
            backend_usage=runner.backend_usage,
        )
        self._depth = depth
        self.in_flight: deque[tuple[Step, StepInFlight | RoundsInFlight]] = deque()
        """Launched steps whose tokens are not read yet, oldest first."""
        self._stepping = False
        self._leaving: list[Request] = []  # aborted; the scheduler does not know yet
        self._observed: set[Request] = set()  # unfinished, with stop texts or log probabilities

    def add(self, request: Request) -> None:
        """Queue a request for the next step. Raises UsageError or PoolError."""
        self.scheduler.add(request)
        if request.transcript is not None or request.params.logprobs is not None:
            self._observed.add(request)

    def abort(self, request: Request) -> None:
        """End a request now; it keeps the tokens that it has."""
        self._leaving.append(request)
        if not self._stepping:  # a garbage-collected iterator may call this within a step
            self._abort_leaving()
            self._drop_unwanted()

    def step(self) -> StepResult | RoundResult | None:
        """Run one step; return None if there is no work. See :meth:`Engine.step`."""
        self._stepping = True
        try:
            return self._step()
        except BaseException:
            self._drop()
            raise
        finally:
            self._abort_leaving()
            self._stepping = False
            self._drop_unwanted()

    def _step(self) -> StepResult | RoundResult | None:
        started = time.perf_counter()
        launched = self.in_flight
        while len(launched) < self._depth and (step := self.scheduler.next_step()) is not None:
            launched.append((step, self.runner.launch(step) if self.rounds is None else self.rounds.launch(step)))
        if not launched:
            return None
        step, running = launched[0]
        if isinstance(running, RoundsInFlight):
            return self._finish_round(step, running, started)
        tokens = running.tokens()
        logprobs = running.logprobs() if self._observed else {}
        launched.popleft()
        self._abort_leaving()
        result = self.scheduler.finish_step(step, tokens)
        self.statistics.add(step, len(result.tokens), time.perf_counter() - started, replayed=running.replayed)
        if self._observed:
            result = self._observe(result, step.sampled_requests, logprobs)
        self._notify(step, result)
        return result

    def _finish_round(self, step: Step, running: RoundsInFlight, started: float) -> RoundResult:
        """Finish a step of speculative rounds, which may give a request several tokens."""
        scheduler, counts = self.scheduler, self.statistics
        assert isinstance(scheduler, RoundScheduler) and counts.rounds is not None
        tokens = running.tokens()
        logprobs = running.logprobs() if self._observed else {}
        self.in_flight.popleft()
        self._abort_leaving()
        result = scheduler.finish_round(step, tokens, _completes_stop if self._observed else None)
        seconds, prefill = time.perf_counter() - started, running.replayed_prefill
        counts.add_rounds(step, result.tokens, seconds, replayed=running.replayed, replayed_prefill=prefill)
        if running.timing is not None:
            counts.rounds.add([len(new) for new in tokens[: step.rounds]], running.timing)
        for entry in step.entries:
            request = entry.request
            new = result.tokens.get(request.id, [])
            request.logprobs += logprobs.get(request.id, [])[: len(new)]
            for token in new:
                for follower in tuple(request.followers):
                    follower.notify(request, token)
        for request in result.finished:
            self._end(request)
        return result

    def _abort_leaving(self) -> None:
        """Abort requests between calls of the scheduler, never within one."""
        while self._leaving:
            request = self._leaving.pop()
            if self.scheduler.holds(request):
                self.scheduler.abort(request.id)
                self._end(request)

    def _drop_unwanted(self) -> None:
        """Drop the steps in flight if all their requests have ended."""
        if self.in_flight and not self.scheduler.has_work:
            self._drop()

    def _drop(self) -> None:
        self.in_flight.clear()
        self.scheduler.drop_steps()

    def _observe(
        self, result: StepResult, requests: Sequence[Request], logprobs: Mapping[int, TokenLogprobs]
    ) -> StepResult:
        """Record log probabilities, and end the requests whose new token completes a stop text."""
        finished = list(result.finished)
        for request in requests:
            token = result.tokens.get(request.id)
            if token is None:  # aborted in flight
                continue
            if request.id in logprobs:
                request.logprobs.append(logprobs[request.id])
            if request.transcript is None:
                continue
            request.transcript.push(token)
            if request.transcript.stopped:
                if self.scheduler.abort(request.id, FinishReason.STOP) is not None:
                    finished.append(request)
                request.finish_reason = FinishReason.STOP  # even if it has max_tokens tokens
        return StepResult(result.tokens, tuple(finished))

    def _notify(self, step: Step, result: StepResult) -> None:
        tokens = result.tokens
        for entry in step.entries:
            request = entry.request
            if request.followers and (token := tokens.get(request.id)) is not None:
                for follower in tuple(request.followers):  # copied: a garbage-collected iterator leaves the list
                    follower.notify(request, token)
        for request in result.finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        """Notify followers of a finished request."""
        self._observed.discard(request)
        if request.transcript is not None:
            request.transcript.finish()
        for follower in tuple(request.followers):
            follower.notify(request, None)


def _completes_stop(request: Request, token: int) -> bool:
    """Push a new token; return True if it completes one of the request's stop texts."""
    transcript = request.transcript
    if transcript is None:
        return False
    transcript.push(token)
    return transcript.stopped
