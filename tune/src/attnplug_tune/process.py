"""Jobs in separate processes, so that a crash or an illegal memory access affects only one backend.

It also gives all backends the same initial state, on which CPU times depend.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from attnplug.machine.runtime import open_device
from attnplug.registry.registry import load_registry
from attnplug_tune.clock import clock_for
from attnplug_tune.measure import Failed, Job, Outcome, Timed, run_job
from attnplug_tune.shapes import Task

RunJob = Callable[[Job], Iterator[Outcome]]
SILENT_S = 900.0
"""Time-out for one outcome. Compiling a library's kernels takes minutes."""


def in_own_process(job: Job) -> Iterator[Outcome]:
    """Yield the outcomes of a job. If its process fails, a new one continues with other roles and layer shapes."""
    while job.tasks and job.seconds > 0:
        outcomes = list[Outcome]()
        for outcome in _in_one_process(job):
            outcomes.append(outcome)
            yield outcome
        if not (outcomes and isinstance(outcomes[-1], Failed) and outcomes[-1].last):
            return
        spent = sum(each.seconds for each in outcomes if isinstance(each, Timed))
        job = replace(job, tasks=_following(job, outcomes), seconds=job.seconds - spent)


def _in_one_process(job: Job) -> Iterator[Outcome]:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use its parent's CUDA context
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, sender))  # not a daemon, which may not start compilers
    process.start()
    sender.close()
    done, hangs, outcomes = False, False, list[Outcome]()
    try:
        while not done:
            if hangs := not receiver.poll(SILENT_S):
                process.kill()
                break
            try:
                outcome = receiver.recv()
            except (EOFError, OSError):  # OSError: the process ended while it sent an outcome
                break
            if outcome is None:
                done = True
            else:
                outcomes.append(outcome)
                yield outcome
        process.join()
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    if hangs:  # the remaining tasks are likely to hang, too
        yield Failed(job.backend, _running(job, outcomes), f"nothing came of it for {SILENT_S:.0f} s, so it was ended")
    elif not done:
        code = process.exitcode or 0
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield Failed(job.backend, _running(job, outcomes), f"its process ended with {ended}", last=True)


def _running(job: Job, outcomes: list[Outcome]) -> Task:
    """Task at which a process ended: the first that follows its last outcome."""
    return next(iter(_following(job, outcomes)), job.tasks[-1])


def _following(job: Job, outcomes: list[Outcome]) -> tuple[Task, ...]:
    """Tasks that follow the last outcome, without those skipped because of a failure."""
    failed = [each.task for each in outcomes if isinstance(each, Failed) and each.side == job.backend]
    broken = {(task.point.role, task.shape) for task in failed}
    following = job.tasks[job.tasks.index(outcomes[-1].task) + 1 :] if outcomes else job.tasks
    return tuple(task for task in following if (task.point.role, task.shape) not in broken)


def _work(job: Job, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    registry = load_registry()
    open_device(job.device.partition(":")[0], registry.device)  # a plugin's device exists in processes that open it
    clock = clock_for(torch.device(job.device))
    gc.collect()
    gc.freeze()  # every capture collects garbage first; exempt what was imported
    try:
        for outcome in run_job(job, registry, clock):
            sender.send(outcome)
    except KeyboardInterrupt:  # raised by the backend; SIGINT is ignored here
        raise SystemExit(130) from None
    sender.send(None)
