"""Ranks as processes: their inputs, and how they end, no matter which one is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug import UsageError
from attnplug.host import TINY_CONFIGS, AttnplugError
from attnplug_engine.cli.prompts import read_prompts
from attnplug_engine.parallel.collectives import ProcessGroupParallel, RankLost
from attnplug_engine.parallel.ranks import _Rank, _wait, join_ranks, prompts_for_ranks, prompts_path
from attnplug_engine.request import SamplingParams
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import having, missing_values, naming

LINES = [{"prompt": "hello"}, {"prompt": "hi", "id": "x"}]
TEXT = "".join(json.dumps(line) + "\n" for line in LINES)

# ---- how they end ----

WAITING = """
import os, sys, threading
from attnplug.machine import interrupt
from attnplug import UsageError
from attnplug.host import AttnplugError
from attnplug.cli.app import add_command
from attnplug_engine.parallel import ranks

ranks._PATIENCE = 0.5


def declare(commands):
    add_command(commands, "wait", "Two ranks that wait.", run)


def declare_fail(commands):
    parser = add_command(commands, "fail", "Two ranks, of which one fails.", fail)
    parser.add_argument("how")


def fail(parsed):
    if not ranks.started_as_rank():
        return ranks.run_ranks(2, sys.argv[1:])
    if parsed.how == "mistake":
        raise UsageError("an empty prompt")
    if os.environ["RANK"] == "0":
        return 1 if parsed.how == "agree" else ranks._LOST
    if parsed.how == "refuse":
        print("a warning", file=sys.stderr)
        raise AttnplugError("the second rank refuses\\nfor a reason")
    if parsed.how == "break":
        raise RuntimeError("the second rank breaks")
    return 1


def run(parsed):
    if not ranks.started_as_rank():
        return ranks.run_ranks(2, sys.argv[1:])
    ranks._end_with_parent()
    try:
        with interrupt.raise_on_sigterm():
            print("waiting", flush=True)
            threading.Event().wait()
    finally:
        print("written", flush=True)
"""


ENTRY_POINTS = "[attnplug.commands]\nwait = waiting_command:declare\nfail = waiting_command:declare_fail\n"


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A folder with a command of two ranks that wait for ever, as an installed package would bring it: no torch."""
    (tmp_path / "waiting_command.py").write_text(WAITING)
    info = tmp_path / "waiting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


@contextmanager
def started(
    *arguments: str, path: Path | None = None, stderr: int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a command in its own session and the process ids of its ranks, after the first rank has written output."""
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, "-m", "attnplug", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            if not children.exists():
                pytest.skip("this system does not tell a process's children")
            assert process.stdout is not None
            process.stdout.read(1)
            yield process, [int(child) for child in children.read_text().split()]
        finally:
            process.kill()


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(ranks: list[int]) -> None:
    assert len(ranks) == 2
    deadline = time.monotonic() + 120
    while any(running(rank) for rank in ranks):
        assert time.monotonic() < deadline, "ranks are still there"
        time.sleep(0.05)


def test_ranks_end_with_the_process_that_started_them_even_if_that_was_killed(waiting):
    """A SIGKILL runs no handler. By themselves these would wait for ever."""
    with started("wait", path=waiting) as (process, ranks):
        process.kill()
        process.wait()
        wait_until_gone(ranks)


def test_who_joins_as_a_rank_ends_with_the_process_that_started_it(monkeypatch):
    """Its end of the pipe closes, however it ended."""
    ended, (theirs, ours) = threading.Event(), os.pipe()
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    monkeypatch.setenv("ATTNPLUG_PARENT_PIPE", str(theirs))
    join_ranks(1, "cpu")
    assert not ended.is_set()
    os.close(ours)
    assert ended.wait(timeout=120)
    os.close(theirs)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.sample(1)
def test_a_rank_that_a_signal_ended_is_named(waiting, rank):
    with started("wait", path=waiting) as (process, ranks):
        os.kill(ranks[rank], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert errors.splitlines() == [
            f"error: rank {rank} of 2 was ended by SIGKILL; the system does that where memory runs out"
        ]
        wait_until_gone(ranks)


@pytest.mark.parametrize(
    ("how", "code", "fragment"),
    [
        ("refuse", 1, "error: rank 1 of 2 failed: the second rank refuses\nfor a reason\n"),
        ("break", 1, "error: rank 1 of 2 failed: RuntimeError: the second rank breaks\n"),
        ("agree", 1, ""),  # such as an error of one prompt, which the first rank reports
        ("mistake", 2, "error: an empty prompt\n"),  # both ranks find it
    ],
)
@pytest.mark.sample(2)
def test_output_of_ranks_is_printed_once(waiting, how, code, fragment):
    process = subprocess.run(
        [sys.executable, "-m", "attnplug", "fail", how],
        env={**os.environ, "PYTHONPATH": str(waiting)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (process.returncode, process.stderr) == (code, fragment)


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def ended_ranks(*codes: int, fragment: bytes = b"error: no such prompt\n") -> list[Any]:
    return [_Rank(number, Ended(code), io.BytesIO(fragment) if number else None) for number, code in enumerate(codes)]


@pytest.mark.parametrize("fragment", [b"error: no such prompt\n", b""])
def test_an_abort_of_a_rank_following_an_error_is_not_reported(fragment):
    """Timing decides which ranks torch still listens to after the first has exited."""
    assert _wait(ended_ranks(2, -signal.SIGABRT, fragment=fragment)) == 2


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (1, AttnplugError)])
@pytest.mark.parametrize("first", [69, -signal.SIGABRT])
def test_an_error_keeps_its_exit_code_whichever_rank_survives(first, code, kind):
    with pytest.raises(kind, check=naming("rank 1", "no such prompt")) as caught:
        _wait(ended_ranks(first, code))
    assert caught.value.exit_code == code


def test_ranks_that_all_abort_are_reported():
    with pytest.raises(AttnplugError, check=naming("rank 0", "SIGABRT")):
        _wait(ended_ranks(-signal.SIGABRT, -signal.SIGABRT))


def test_a_rank_that_lost_the_others_leaves_the_report_to_its_parent(monkeypatch):
    """Without such a parent, as under torchrun, it raises RankLost."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer\nC++ frames")

    for name, result in (("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_, result=result: result)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(f"torch.distributed.{name}", fail)
    parallel = ProcessGroupParallel()
    for collective in (parallel.all_reduce, lambda tensor: parallel.all_gather(tensor, 0)):
        parallel.exit_code_when_lost = None
        with pytest.raises(RankLost, check=having("Connection closed by peer", rank=1)):
            collective(torch.zeros(2))
        parallel.exit_code_when_lost = 69
        with pytest.raises(SystemExit) as caught:
            collective(torch.zeros(2))
        assert caught.value.code == 69


def test_ending_the_command_ends_its_ranks(waiting):
    """``timeout`` and batch systems do this."""
    with started("wait", path=waiting) as (process, ranks):
        process.terminate()
        written, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (143, "")
        assert written.endswith("written\n"), "the first rank could not write what it held"
        wait_until_gone(ranks)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_all_processes_is_reported_once(waiting):
    """In a terminal, Ctrl-C also reaches the ranks."""
    with started("wait", path=waiting) as (process, ranks):
        os.killpg(process.pid, signal.SIGINT)
        written, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (130, "interrupted\n")
        assert written.endswith("written\n"), "the first rank could not write what it held"
        wait_until_gone(ranks)


@pytest.mark.usefixtures("interruptible")
def test_a_terminal_whose_rank_was_ended_shows_its_cursor_again(waiting):
    """Progress bars hide it, and a process that is killed cannot bring it back."""
    ours, theirs = os.openpty()
    with started("wait", path=waiting, stderr=theirs) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130
    os.close(theirs)
    assert os.read(ours, 100) == b"\x1b[?25hinterrupted\r\n"
    os.close(ours)


# ---- what is refused before any is started ----


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug_engine.cli.arguments.run_ranks", lambda *_: pytest.fail("ranks are started"))


@pytest.mark.parametrize("command", ["run", "embed"])
def test_heads_that_ranks_cannot_divide_are_refused_before_any_is_started(attnplug: Attnplug, no_process, command):
    arguments = ("--model", "tiny:llama", "--prompt", "x", "--tensor-parallel", "3", "--device", "cpu")
    outcome = attnplug(command, *arguments)
    assert outcome.code == 1
    assert not missing_values(outcome.err, "4 heads", "3 ranks", "1, 2 or 4") and outcome.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "0"}, ["RANK='0'", "WORLD_SIZE"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'"]),
        ({"RANK": "²", "WORLD_SIZE": "2"}, ["RANK='²'"]),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE"]),
        ({"RANK": "0", "WORLD_SIZE": "3"}, [3, "--tensor-parallel"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0", "MASTER_ADDR"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, ["MASTER_PORT"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"},
            ["MASTER_PORT='70000'", 65535],
        ),
    ],
)
def test_an_incomplete_rank_environment_gives_one_message(
    attnplug: Attnplug, no_process, monkeypatch, environment, named
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ProcessGroupParallel, "join", lambda *_: pytest.fail("it waits for other ranks"))
    arguments = ("--model", "tiny:llama", "--prompt", "x", "--tensor-parallel", "2", "--device", "cpu")
    outcome = attnplug("run", *arguments)
    assert outcome.code == 2 and not missing_values(outcome.err, *named) and outcome.err.count("error: ") == 1


def test_ranks_that_do_not_meet_are_an_error_with_the_address(attnplug: Attnplug, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)

    def fail(*_: object) -> None:
        raise RuntimeError("the client socket has timed out\nC++ frames")

    monkeypatch.setattr(ProcessGroupParallel, "join", fail)
    arguments = ("--model", "tiny:llama", "--prompt", "x", "--tensor-parallel", "2", "--device", "cpu")
    outcome = attnplug("run", *arguments)
    assert outcome.code == 1
    assert not missing_values(outcome.err, "rank 1 of 2", "127.0.0.1:1234", "the client socket has timed out")
    assert "C++" not in outcome.err


def test_a_stray_rank_means_nothing_to_one_process(attnplug: Attnplug, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert attnplug("embed", "--model", "tiny:llama", "--prompt", "x", "--device", "cpu").code == 0


# ---- what can be read only once ----


@pytest.fixture(params=["-", "a named pipe"])
def read_once(request, tmp_path, monkeypatch) -> Iterator[str]:
    """Prompts that a user passes through a pipe, which can be read once."""
    if request.param == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        yield "-"
        return
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(TEXT,))
    writer.start()
    yield str(path)
    writer.join()


@pytest.mark.parametrize("command", ["run", "embed"])
def test_ranks_read_what_their_parent_has_read_from_a_pipe(attnplug: Attnplug, monkeypatch, read_once, command):
    """Ranks read a copy of the pipe's content, but their messages name the path that the user gave."""
    found: list[list[str]] = []
    copies: list[str] = []

    def ranks(*_: object) -> int:
        copies.append(prompts_path(read_once))
        found.extend([line.where for line in read_prompts(read_once, SamplingParams(1))] for _ in range(2))
        return 0

    monkeypatch.setattr("attnplug_engine.cli.arguments.run_ranks", ranks)
    arguments = ("--model", "tiny:llama", "--prompts", read_once, "--tensor-parallel", "2", "--device", "cpu")
    assert attnplug(command, *arguments).code == 0
    assert found[0] == found[1] and len(found[0]) == len(LINES)
    assert not any(copies[0] in where for where in found[0])
    assert not Path(copies[0]).exists() and prompts_path(read_once) == read_once


def test_a_file_is_read_where_it_is(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(TEXT)
    for given in (None, str(path), str(tmp_path), str(tmp_path / "nowhere")):
        with prompts_for_ranks(given):
            assert prompts_path(str(given)) == str(given)


@pytest.mark.long
def test_two_ranks_embed_what_one_process_does_from_standard_input(attnplug: Attnplug, tmp_path):
    """Launched by the command itself, with prompts from a pipe."""
    (tmp_path / "prompts").write_text(TEXT)
    arguments = ["--model", "tiny:deepseek_v3", "--json", "--device", "cpu"]
    one = attnplug("embed", *arguments, "--prompts", str(tmp_path / "prompts"))
    command = [sys.executable, "-m", "attnplug", "embed", *arguments, "--prompts", "-", "--tensor-parallel", "2"]
    two = subprocess.run(command, input=TEXT, capture_output=True, text=True, timeout=300, check=False)
    assert (one.code, two.returncode) == (0, 0), two.stderr
    ours, theirs = ([json.loads(line) for line in out.splitlines()] for out in (one.out, two.stdout))
    assert [line.get("id") for line in theirs] == [None, "x"]
    for alone, shared in zip(ours, theirs, strict=True):
        assert shared["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)


def test_the_rank_counts_of_a_refusal_are_those_that_divide_the_draft_too(attnplug: Attnplug, no_process, tmp_path):
    """E5. The target alone could use 4 ranks."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], "intermediate_size": 98}))
    draft = ("--speculative-algorithm", "standalone", "--speculative-draft-model", str(tmp_path), "--random-weights")
    arguments = ("--model", "tiny:llama", "--prompt", "x", "--tensor-parallel", "3", "--device", "cpu")
    outcome = attnplug("run", *arguments, *draft)
    assert not missing_values(outcome.err, "4 heads", "3 ranks", "--tensor-parallel 1 or 2"), outcome.err


@pytest.mark.parametrize(
    ("draft", "named"),
    [
        (("mtp",), ("'llama'", "multi-token prediction")),
        (("eagle", "--speculative-draft-model", "nowhere"), ("'nowhere'", "--speculative-draft-model")),
    ],
)
def test_a_draft_that_no_number_of_ranks_can_run_is_named_instead(draft, named, attnplug: Attnplug, no_process):
    """E5"""
    arguments = ("--model", "tiny:llama", "--prompt", "x", "--tensor-parallel", "3", "--device", "cpu")
    outcome = attnplug("run", *arguments, "--speculative-algorithm", *draft)
    assert outcome.code == 2 and not missing_values(outcome.err, *named), outcome.err
