"""Output of ``attnplug run``: completions, each written as soon as possible so that none is lost."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from attnplug.cli import output
from attnplug_engine.cli.prompts import PromptLine
from attnplug_engine.completion import Completion
from attnplug_engine.execution import signals
from attnplug_engine.execution.backend_usage import BackendUsage
from attnplug_engine.request import LikelyToken
from attnplug_engine.text.tokenizer import Tokenizer

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def for_terminal(text: str) -> str:
    """Return ``text``, with control characters escaped if standard output is a terminal, which would obey them."""
    return text.translate(_ESCAPES) if sys.stdout.isatty() else text


def logprob_lines(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a line per token of a completion with log probabilities: the sampled token, then the most likely ones."""

    def shown(token_id: int, logprob: float) -> str:
        text = "" if tokenizer is None else f" {tokenizer.decode([token_id])!r}"
        return f"{token_id}{text} {logprob:.4f}"

    for one in completion.logprobs or ():
        top = ", ".join(shown(likely.token_id, likely.logprob) for likely in one.top)
        yield f"  {shown(one.token_id, one.logprob)}" + f"  (most likely: {top})" * bool(top)


class CompletionWriter:
    """Writes JSON lines as their prompts finish, and texts in the order of the prompts."""

    def __init__(
        self, lines: Sequence[PromptLine], served: BackendUsage, tokenizer: Tokenizer | None, *, json: bool
    ) -> None:
        self._lines, self._served, self._tokenizer = lines, served, tokenizer
        self._json = json
        self._waiting: dict[int, Completion] = {}
        self._next = 0
        self.written = 0

    def add(self, completion: Completion) -> None:
        """Write a completion, or keep its text until the preceding ones are written."""
        line = self._lines[completion.index]
        if completion.error is not None:
            print(f"error: {line.where}: {completion.error}", file=sys.stderr)
        if self._json:
            self._write(_json_line(completion, line, self._served.by_backend()))
            return
        self._waiting[completion.index] = completion
        while self._next in self._waiting:
            self._write(self._text(self._waiting.pop(self._next)))
            self._next += 1

    def close(self) -> None:
        """Write the texts that still wait for preceding prompts, which will not finish."""
        while self._waiting:
            self._write(self._text(self._waiting.pop(min(self._waiting))))

    def _text(self, completion: Completion) -> str:
        text = completion.text if completion.text is not None else " ".join(map(str, completion.token_ids))
        line = for_terminal(f"[{completion.index}] {text}")
        return "\n".join([line, *logprob_lines(completion, self._tokenizer)])

    def _write(self, line: str) -> None:
        with signals.deferred():  # users tend to interrupt when they have seen a line
            if self._json:
                output.write_line(line)
            else:
                print(line, flush=True)
            self.written += 1


def _json_line(completion: Completion, line: PromptLine, steps: Mapping[str, Mapping[str, int]]) -> str:
    """``steps`` are the engine's steps so far by backend; empty if one backend served all."""
    usage = completion.usage
    values: dict[str, object] = {"index": completion.index}
    if line.id is not None:
        values["id"] = line.id
    values |= {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "error": completion.error,
    }
    if completion.logprobs is not None:
        values["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [_likely(likely) for likely in one.top]}
            for one in completion.logprobs
        ]
    if steps:
        values["steps"] = steps
    return jsonlib.dumps(values)


def _likely(likely: LikelyToken) -> dict[str, object]:
    return {"token_id": likely.token_id, "logprob": likely.logprob}


@contextmanager
def progress_bar(
    console: Console, what: str, shown: bool, total: int | None = None
) -> Iterator[tuple[Progress, TaskID]]:
    """Progress bar on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = shown and console.is_terminal and not console.quiet
    # The bar must not redirect standard output, which may be a file.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as bar:
        yield bar, bar.add_task(what, total=total)
