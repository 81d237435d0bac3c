"""Mailbox of captured steps, inputs and outputs: the ring, and the kernels that read and write it, in Triton's
interpreter or on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refilled_native import build
from test_kernels import BY_KERNEL
from torch import Tensor

from attnplug import PlanError
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.graphs import decode
from attnplug_engine.graphs.mailbox import SLOTS, Mailbox
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_testing.devices import INTERPRETED

pytestmark = pytest.mark.long

SIZE, PAGES = 7, 41


def fields(slot: Tensor) -> tuple[Any, Any]:
    """Rows in int64 and lengths in int32."""
    return slot[: 8 * SIZE].view(torch.int64).numpy(), slot[8 * SIZE : 12 * SIZE].view(torch.int32).numpy()


def make(device: str) -> tuple[Mailbox[tuple[Any, Any]], Tensor, Tensor]:
    """Mailbox, and the device memory of rows and lengths."""
    mailbox = Mailbox(16 * SIZE, SIZE, torch.device(device), fields)
    return mailbox, mailbox.memory[: 8 * SIZE].view(torch.int64), mailbox.memory[8 * SIZE :].view(torch.int32)[:SIZE]


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("pages", [1, 37, 1500])
def test_a_captured_step_begins_and_ends_by_kernels_as_by_torch(pages: int, device: str) -> None:
    """Rows of the table are in any order, padded requests share one, and the page table is part of a wider one. Every
    step uses its own mailbox slot for inputs and tokens."""
    from attnplug_engine.kernels import step_io

    random = torch.Generator().manual_seed(pages)
    mirror = torch.randint(0, 1 << 30, (9, pages + 3), dtype=torch.int32, generator=random).to(device)[:, :pages]
    mailbox, rows, lens = make(device)
    for turn in range(2 * SLOTS + 1):
        tokens = torch.arange(100, 109, device=device)
        chosen = torch.tensor([3, -1, 5, 6 + turn, 6 + turn], device=device)
        with mailbox.write() as (given_rows, given_lens):
            given_rows[:5], given_lens[:5] = [4, turn, 7, 8, 8], [1, 90 + turn, 5, 0, 0]
        found = []
        for begin, end in (
            (lambda *given: step_io.begin(mailbox, *given), lambda *given: step_io.end(mailbox, *given)),
            (decode._begin, decode.store_tokens),  # reads the kernel's output in device memory
        ):
            table = torch.full((7, pages), -5, dtype=torch.int32, device=device)
            ids, positions = torch.zeros(5, dtype=torch.int64, device=device), torch.full_like(lens[:5], -5)
            begin(table[:5], ids, positions, rows[:5], lens[:5], mirror, tokens)
            sampled, kept = torch.full((7,), -5, device=device), tokens.clone()
            end(sampled, kept, rows[:5], chosen)
            found.append((table, ids, positions, sampled, kept))
        assert all(map(torch.equal, *found))
        assert found[0][1].tolist() == [104, 100 + turn, 107, 108, 108]
        assert found[0][2].tolist() == [0, 89 + turn, 4, 0, 0]
        assert mailbox.step_output(5).tokens() == [3, -1, 5, 6 + turn, 6 + turn]


@pytest.mark.parametrize("device", BY_KERNEL)
def test_a_step_ends_for_any_number_of_requests(device: str) -> None:
    """Requests fill more than one program's block. Nothing behind them is written."""
    from attnplug_engine.kernels import step_io

    count = 600
    mailbox: Mailbox[None] = Mailbox(8, count + 5, torch.device(device), lambda _: None)
    mailbox.output_slots.fill_(-7)
    rows, chosen = torch.arange(count, device=device).flip(0), torch.arange(count, device=device) - 1
    sampled, tokens = torch.full((count + 5,), -7, device=device), torch.full((count + 5,), -7, device=device)
    step_io.end(mailbox, sampled, tokens, rows, chosen)
    assert mailbox.step_output(count).tokens() == chosen.tolist() == sampled[:count].tolist()
    assert tokens[:count].tolist() == chosen.clamp(min=0).flip(0).tolist()
    assert sampled[count:].tolist() == tokens[count:].tolist() == mailbox.output_slots[0, count:].tolist() == [-7] * 5
    assert mailbox.output_slots[1].tolist() == [-7] * (count + 5)


def answer(mailbox: Mailbox[Any], *tokens: int) -> Any:
    """Write these sampled tokens to the mailbox, as a step does."""
    turn = int(mailbox.slot)
    mailbox.output_slots[turn, : len(tokens)] = torch.tensor(tokens)
    mailbox.slot.fill_((turn + 1) % SLOTS)
    return mailbox.step_output(len(tokens))


def test_an_answer_that_nobody_has_read_outlives_the_steps_after_it() -> None:
    mailbox = make("cpu")[0]
    outputs = []
    for step in range(3 * SLOTS):
        with mailbox.write():
            outputs.append(answer(mailbox, step, -step))
    assert [output.tokens() for output in outputs] == [[step, -step] for step in range(3 * SLOTS)]


def test_each_slot_is_another_one_and_holds_what_was_written_a_ring_ago() -> None:
    mailbox = make("cpu")[0]
    for step in range(3 * SLOTS):
        with mailbox.write() as (rows, _):
            assert rows[0] == max(step - SLOTS + 1, 0)
            rows[0] = step + 1
        assert int(mailbox.input_slots[int(mailbox.slot)].view(torch.int64)[0]) == step + 1, (
            "the device takes another one"
        )
        answer(mailbox, step)


def test_memory_is_given_back_when_no_step_reads_or_writes_it_any_more() -> None:
    """torch reuses pinned memory immediately, because it does not know the kernels that use it."""
    mailbox, waited = make("cpu")[0], []
    for step in range(SLOTS):
        input_slots = weakref.ref(mailbox.input_slots)
        done: Any = SimpleNamespace(
            synchronize=lambda step=step, input_slots=input_slots: waited.append((step, input_slots() is None))
        )
        answer(mailbox, step)._done = done
    del mailbox
    assert waited == [(step, False) for step in range(SLOTS)]


def test_host_and_device_agree_on_the_current_slot_following_a_capture() -> None:
    mailbox = make("cpu")[0]
    answer(mailbox, 1)
    mailbox.slot.fill_(1)  # one more warm-up than answers
    mailbox.reset()
    for step in (5, 6, 7):
        with mailbox.write():
            assert answer(mailbox, step).tokens() == [step]


# Engines whose captured steps read the mailbox, with a fake capture that runs the same calls again

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 1, 4, 1, 5], [9, 2, 6]]
DRAWN = {"temperature": 0.9, "top_k": 20, "seed": 3}


def made(monkeypatch: pytest.MonkeyPatch, model: str, **settings: Any) -> Engine:
    """An engine that replays batches of 1, 2 and 4 by kernels."""
    monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
    monkeypatch.setattr("attnplug_engine.graphs.step_inputs.kernels", SimpleNamespace(usable=lambda _: True))

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        for _ in range(SLOTS + 1):  # after an odd number of captures the device is at the other slot
            run()
        return run

    engine = Engine(model, device="cpu", page_size=4, max_batch=5, prefix_cache=False, **settings)
    capture_steps(engine.runner, (1, 2, 4), capture)
    return engine


def asked(number: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12 - 2 * number, **(DRAWN if number % 2 else {}), **more)


def generated(engine: Engine, **more: Any) -> list[Any]:
    """Outputs of requests that end one after the other. Some of their tokens are drawn."""
    return engine.generate(PROMPTS, [asked(number, **more) for number in range(len(PROMPTS))])


def finish(engine: Engine) -> None:
    while engine.step() is not None:
        pass


@INTERPRETED
@pytest.mark.parametrize(
    ("model", "overlap"),
    [("tiny:llama", False), ("tiny:llama", True), ("tiny:deepseek_v3", False), ("tiny:kimi_linear", True)],
)
def test_steps_that_read_the_mailbox_give_the_tokens_of_eager_ones(model, overlap, monkeypatch):
    """Batches of 5 run eagerly in between, and those of 3 are padded."""
    engine = made(monkeypatch, model, overlap=overlap)
    eager = Engine(model, device="cpu", page_size=4, max_batch=5, prefix_cache=False)
    assert [one.token_ids for one in generated(engine)] == [one.token_ids for one in generated(eager)]
    assert engine.statistics.replayed_steps > engine.statistics.eager_steps > 0


@INTERPRETED
def test_log_probabilities_are_those_of_the_tokens_in_the_answer(monkeypatch):
    for one in generated(made(monkeypatch, "tiny:llama", overlap=True), logprobs=2):
        assert [each.token_id for each in one.logprobs] == one.token_ids


@INTERPRETED
def test_steps_are_captured_with_padding_alone(monkeypatch):
    """This holds in every slot: warm-ups take the slots in turn and write to the rows that these name."""
    engine = made(monkeypatch, "tiny:kimi_linear")
    inputs, table = engine.runner.graphs.decode.inputs, engine.runner.table
    for host in inputs.mailbox.host_slots:
        assert set(host.rows) == {table.max_requests} and set(host.state_slots) == {-1} and not host.seq_lens.any()
    assert set(inputs.rows.tolist()) == {table.max_requests}
    assert not engine.runner.tokens[:-1].any()


@INTERPRETED
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_between_its_inputs_and_its_replay_takes_no_slot(failing, monkeypatch):
    engine = made(monkeypatch, "tiny:llama", overlap=True)
    wanted = [one.token_ids for one in generated(engine)]
    plan, calls = engine.runner.attention.capture, []

    def capture(batch: Any, **how: Any) -> Any:
        calls.append(batch)
        if len(calls) == failing:
            raise PlanError("not this time")
        return plan(batch, **how)

    monkeypatch.setattr(engine.runner.attention, "capture", capture)
    requests = [engine.add(prompt, asked(number)) for number, prompt in enumerate(PROMPTS)]
    with pytest.raises(PlanError, match="not this time"):
        finish(engine)
    finish(engine)
    assert [request.output for request in requests] == wanted and len(calls) > failing + 2
