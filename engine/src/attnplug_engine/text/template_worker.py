"""Worker process that renders chat templates. Runs as a script and imports only Jinja and the standard library.

A template is untrusted code. It runs in Jinja's sandbox, with the names that transformers provides, so that the same
text is rendered. The sandbox bounds neither time nor memory: ``'x'.ljust(10**9)`` and nested loops are allowed. So the
kernel ends this process if a template takes too long, and allocations fail beyond the memory limit.

Protocol: one JSON object per line on standard input, ``{"template", "variables", "seconds"}``, and one on standard
output for each, with one key: ``text``, or the message of an error as ``invalid`` (the template cannot be compiled),
``refused`` (it raised a TemplateError) or ``failed`` (any other exception). An exceeded limit ends the process without
an answer: by SIGALRM for the time, with the exit code ``out_of_memory`` for the memory.

Arguments: the memory limit in bytes, the exit code ``out_of_memory``, and the parent's ``sys.path`` as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

if __name__ == "__main__":
    # Started with -I -S: the parent's import path replaces the one that site would compute.
    sys.path[:] = json.loads(sys.argv[3])

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_CHARACTERS = 1 << 24
_WATCH_SECONDS = 0.05


class _Generation(Extension):
    """``{% generation %}``, which marks training targets: renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Namespace without names that begin with an underscore, which would lead out of the sandbox."""

    def __init__(*args: object, **attributes: object) -> None:
        self, *rest = args
        assert isinstance(self, _PlainNamespace)
        values: dict[str, object] = dict(*rest, **attributes)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: names with an underscore in front are not allowed")


class _Dict:
    """``dict`` for templates: a constructor without access to its class."""

    def __call__(self, *args: object, **values: object) -> dict[str, object]:
        return dict(*args, **values)

    def fromkeys(self, *args: object) -> dict[object, object]:
        return dict.fromkeys(*args)  # type: ignore[call-overload, no-any-return]


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize without Jinja's escaping of HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda text: datetime.now().strftime(text),
        "dict": _Dict(),
        "namespace": _PlainNamespace,
    }
    return environment.from_string(text)


def answer(template: str, variables: Mapping[str, object]) -> dict[str, str]:
    """Render a template; return the answer of the protocol. Raises MemoryError."""
    try:
        compiled = _compiled(template)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return {"invalid": f"is wrong in line {error.lineno}: {error.message}"}
    except Exception as error:  # e.g. RecursionError for thousands of brackets
        return {"invalid": f"cannot be compiled: {_message(error)}"}
    parts, count = [], 0
    try:
        for part in compiled.generate(variables):
            parts.append(part)
            count += len(part)
            if count > _MAX_CHARACTERS:
                raise TemplateError(f"it writes more than {_MAX_CHARACTERS} characters")
    except MemoryError:
        raise
    except TemplateError as error:  # includes raise_exception() of the template
        return {"refused": str(error.message)[:2000]}
    except Exception as error:
        return {"failed": _message(error)}
    return {"text": "".join(parts)}


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:2000]}"


def limit_memory(more: int, out_of_memory: int) -> None:
    """Limit this process to ``more`` bytes beyond what it has now.

    Linux enforces the limit of the address space. macOS does not, so the resident memory is also checked after every
    50 ms of CPU time, which a single large allocation may exceed.
    """
    total, resident = _used_bytes()
    watch_memory(resident + more, out_of_memory)
    with suppress(OSError, ValueError):  # a lower limit is set already, or there is none
        resource.setrlimit(resource.RLIMIT_AS, (total + more, total + more))


def watch_memory(most: int, out_of_memory: int) -> None:
    """End this process with exit code ``out_of_memory`` when its resident memory exceeds ``most`` bytes."""

    def check(*_: object) -> None:
        if _used_bytes()[1] > most:
            os._exit(out_of_memory)

    signal.signal(signal.SIGPROF, check)
    signal.setitimer(signal.ITIMER_PROF, _WATCH_SECONDS, _WATCH_SECONDS)


def _used_bytes() -> tuple[int, int]:
    """Return the bytes of the address space and of the resident memory."""
    try:
        with open("/proc/self/statm") as file:
            total, resident = map(int, file.read().split()[:2])
    except OSError:  # macOS, where the peak is in bytes; that of Linux begins with the parent's
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, peak
    return total * resource.getpagesize(), resident * resource.getpagesize()


def main() -> None:
    """Answer requests until standard input ends."""
    out_of_memory = int(sys.argv[2])
    limit_memory(int(sys.argv[1]), out_of_memory)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a parent that ignores or blocks it has passed that on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
    try:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            # SIGALRM has no handler: it ends the process, even if the parent has exited.
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            text = json.dumps(answer(request["template"], request["variables"]), ensure_ascii=False)
            answered = text.encode(errors="surrogatepass")
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.buffer.write(answered + b"\n")
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(out_of_memory)


if __name__ == "__main__":
    main()
