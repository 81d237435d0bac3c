"""``attnplug doctor``: a report on the environment.

Design constraints, to preserve when editing: every probe is guarded separately; libraries are imported in a process of
their own; all probes run at the same time; the report always prints, and the command never fails. It takes at most 3 s
on two cores without a GPU: torch is imported once (2 s), and FlashInfer (3.3 s) only if a usable backend needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import importlib_metadata as metadata

from attnplug.auto.table_store import (
    CACHE_VARIABLE,
    TABLES_VARIABLE,
    MeasuredTable,
    Plugins,
    cache_folder,
    cache_folders,
    load_tables,
    table_files,
)
from attnplug.cli import output
from attnplug.cli.backends import listing
from attnplug.declare.device import Processor
from attnplug.declare.errors import describe_error
from attnplug.declare.installed import installed_version
from attnplug.declare.spec import Source
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.registry.loading import GROUP, canonical_name, find_entry_points
from attnplug.registry.registry import ALLOW_VARIABLE, STRICT_VARIABLE, load_registry

Findings = dict[str, Any]
TIMEOUT_SECONDS = 120.0
_FOR_TESTS = {"test", "tests", "dev"}
"""Extras that no backend needs at run time."""

_VARIABLES = (
    *(ALLOW_VARIABLE, STRICT_VARIABLE, CACHE_VARIABLE, TABLES_VARIABLE),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TRITON_CACHE_DIR", "HF_HOME"),
)
_FILES_COUNTED = 10_000  # of a cache folder, in about 50 ms
_THREADS = 10  # one per section, and those of the shared probes: plugins and torch


class Probes:
    """Runs probes in separate processes, at most one per core at a time. ``terminal`` shows progress; None shows none.

    Libraries are imported only there: on import some raise AssertionError or RuntimeError, some print, some crash.
    """

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal
        self._slots = threading.BoundedSemaphore(max(os.cpu_count() or 1, 2))  # the torch probe waits for the plugins'
        self._lock = threading.RLock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started = self._finished = 0
        self._stopped = False

    def run(self, name: str, code: str, stdin: Callable[[], object] = dict) -> Findings:
        """Run Python code in a new process and return its variable ``answer``, a dict, or ``{"failed": reason}``.

        ``stdin`` is called once the process runs. Its result is written to the standard input as JSON.
        """
        script = (  # what the code prints goes to standard error
            "import json, os\nout = os.dup(1)\nos.dup2(2, 1)\ntry:\n    scope = {}\n"
            f"    exec({code!r}, scope)\n    answer = scope['answer']\n"
            "except BaseException as error:\n    answer = {'failed': f'{type(error).__name__}: {error}'}\n"
            "os.write(out, json.dumps(answer).encode())\nos._exit(0)"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, "-c", script], subprocess.PIPE
        with self._lock:
            self._started += 1
        with self._slots:
            with self._lock:
                if self._stopped:
                    return {"failed": "interrupted"}
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
                self._running[name] = process
                self._show()
            try:
                out, _ = process.communicate(json.dumps(stdin()).encode(), timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                return {"failed": f"no answer within {TIMEOUT_SECONDS:g} s"}
            finally:
                with self._lock:
                    self._running.pop(name, None)
                    self._finished += 1
                    self._show()
        status = process.returncode
        ended = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
        answer: Findings = {"failed": f"the process ended during the import ({ended})"}
        return json.loads(out) if out else answer

    def stop(self) -> None:
        """Kill running probes and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running.values():
                process.kill()

    def print(self, text: str) -> None:
        """Print a part of the report above the progress line."""
        with self._lock:
            self._write("")
            print(text, flush=True)
            self._show()

    def _show(self) -> None:
        progress = f"probing {', '.join(self._running)} … {self._finished}/{self._started}"
        self._write(progress if self._running else "")

    def _write(self, line: str) -> None:
        if self._terminal is not None:
            # A wrapped line could not be cleared.
            self._terminal.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            self._terminal.flush()


def run(parsed: argparse.Namespace) -> int:
    json = parsed.json
    probes = Probes(sys.stderr if sys.stderr.isatty() and not json else None)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        plugins = pool.submit(_probe_plugins, probes)
        torch = pool.submit(_probe_torch, probes, lambda: plugins.result().get("factories", {}))
        sections: dict[str, Callable[[], Findings]] = {
            "environment": lambda: {
                "python": f"{platform.python_version()} ({sys.executable})",
                "platform": platform.platform(),
                "cores": str(os.cpu_count()),
                "attnplug": f"{metadata.version('attnplug')}, contract {CONTRACT_VERSION}",
            },
            "torch": partial(_torch, probes, torch),
            "devices": partial(_probed, plugins, "devices"),
            "kernel libraries": partial(_kernel_libraries, probes, plugins),
            "plugins": partial(_plugins, probes, plugins, torch),
            "measured tables": partial(_probed, plugins, "tables"),
            "variables": lambda: {name: repr(os.environ[name]) for name in _VARIABLES if name in os.environ},
            "cache folders": lambda: {name: _folder_state(path) for name, path in cache_folders().items()},
        }
        try:
            found = {title: pool.submit(_guarded, probe) for title, probe in sections.items()}
            if json:
                output.write_json({title: future.result() for title, future in found.items()})
            else:
                for title, future in found.items():
                    findings = future.result()
                    width = max(map(len, findings), default=0)
                    indented = {name: text.replace("\n", "\n" + " " * (width + 4)) for name, text in findings.items()}
                    lines = [f"  {name.ljust(width)}  {text}" for name, text in indented.items()] or ["  none"]
                    probes.print("\n".join([title, *lines]))
        except BaseException:  # an interrupt, or output that cannot be written
            probes.stop()
            raise
    return 0


def _guarded(probe: Callable[[], Findings], failed: str = "probe failed") -> Findings:
    try:
        return probe()
    except BaseException as error:
        return {failed: describe_error(error)}


def _probe_torch(probes: Probes, factories: Callable[[], Mapping[str, str]], name: str = "torch") -> Findings:
    """Import torch, then factories of backends. All of these need torch, and importing it again would take 2 s."""
    return probes.run(name, f"from {__name__} import torch_answer; answer = torch_answer()", factories)


def torch_answer() -> Findings:
    """Return findings about torch, and the import errors of the factories that standard input names by backend."""
    answer: Findings = {"torch": _guarded(_torch_findings, "import failed"), "failures": {}}
    for name, factory in json.load(sys.stdin).items():
        try:
            pkgutil.resolve_name(factory)
        except BaseException as error:  # libraries raise anything on import, even SystemExit
            answer["failures"][name] = describe_error(error)
    return answer


def _torch_findings() -> Findings:
    import torch

    available = {"CUDA build": str(torch.version.cuda), "CUDA available": str(torch.cuda.is_available())}
    memory = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return {"version": torch.__version__, **available, **{f"cuda:{n}": f"{b >> 30} GiB" for n, b in enumerate(memory)}}


def _torch(probes: Probes, probed: Future[Findings]) -> Findings:
    answer = probed.result()
    if "failed" in answer:  # torch crashed the process, or a factory did
        answer = _probe_torch(probes, dict)
    return {"import failed": answer["failed"]} if "failed" in answer else answer["torch"]


def _kernel_libraries(probes: Probes, plugins: Future[Findings]) -> Findings:
    """Return the state of each library. Those that no usable backend requires are not imported, which saves seconds."""
    libraries, usable = _required_libraries(), plugins.result().get("usable")  # None: plugins could not be listed

    def state(name: str) -> str:
        version = installed_version(name)
        if version is None:
            return "not installed"
        if usable is not None and libraries[name].isdisjoint(usable):
            return f"{version}; not imported, because no backend that requires it is usable here"
        public: set[str] = set()
        with suppress(Exception):  # damaged metadata
            found = metadata.distribution(name)
            files = (path.parts[0].removesuffix(".py") for path in found.files or () if path.suffix == ".py")
            declared = (found.read_text("top_level.txt") or "").split()
            public = {module for module in declared or files if module.isidentifier() and not module.startswith("_")}
        code = f"import {', '.join(sorted(public))}; answer = {{}}" if public else "answer = {}"
        failure = probes.run(name, code).get("failed")
        return version if failure is None else f"{version}; import failed: {failure}"

    with ThreadPoolExecutor(max_workers=len(libraries) or 1) as pool:
        return dict(zip(libraries, pool.map(state, libraries), strict=True))


def _required_libraries() -> dict[str, set[str]]:
    """Return what installed plugins require beyond core's requirements, options included: plugins by library."""
    from packaging.requirements import InvalidRequirement, Requirement

    own = {canonical_name(Requirement(text).name) for text in metadata.distribution("attnplug").requires or ()}
    found: dict[str, set[str]] = {}
    for point in find_entry_points(GROUP)[0]:
        for text in (point.dist.requires if point.dist is not None else None) or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            extras = re.findall(r"""extra == ["']([^"']+)["']""", str(requirement.marker or ""))
            if canonical_name(requirement.name) not in own and _FOR_TESTS.isdisjoint(extras):
                found.setdefault(requirement.name, set()).add(Source.of(point).distribution)
    return {name: found[name] for name in sorted(found) if not canonical_name(name).startswith("attnplug")}


def _probe_plugins(probes: Probes) -> Findings:
    """List plugins in a separate process, because a plugin may crash it."""
    return probes.run("plugins", f"from {__name__} import plugin_answer; answer = plugin_answer()")


def _plugins(probes: Probes, probed: Future[Findings], torch: Future[Findings]) -> Findings:
    answer = probed.result()
    if "failed" in answer:
        return answer
    findings: Findings = answer["findings"]
    factories, imported = answer["factories"], torch.result()
    failures = imported.get("failures", {})
    if "failed" in imported:  # one of the factories crashed the process: import each separately
        for name, factory in factories.items():
            alone = _probe_torch(probes, partial(dict, {name: factory}), name)
            failures |= {name: alone["failed"]} if "failed" in alone else alone["failures"]
    for name, failure in failures.items():
        findings[name] += f", but its factory {factories[name]} cannot be imported: {failure}"
    return findings


def plugin_answer() -> Findings:
    """Return findings about plugins, usable backends' factories and distributions, and states of measured tables."""
    environment = {name: value for name, value in os.environ.items() if name != STRICT_VARIABLE}
    registry = load_registry(environment=environment)
    rows = list(listing(registry, every=True))
    texts = [(row.name, f"{row.source}: {row.text}") for row in rows]
    texts += [(name, f"listed in {ALLOW_VARIABLE}, but no installed plugin matches it") for name in registry.unmatched]
    findings: dict[str, str] = {}
    for name, text in texts:
        findings[name] = f"{findings[name]}\n{text}" if name in findings else text
    usable = [row for row in rows if row.status == "usable"]

    def table_states() -> Findings:
        """Return the state of each file of measured tables for this machine, and of each plugin's tables."""
        here = [found[0] for device in registry.devices if (found := registry.processors(device))]
        states = dict(state for processor in here for state in file_states(registry, processor).items())
        return states or {"of this user": f"none in {cache_folder()}; 'attnplug tune' measures"}

    return {
        "findings": findings,
        "factories": {row.name: registry.backends[row.name].spec.factory for row in usable},
        "usable": [row.source.distribution for row in usable],
        "devices": _guarded(
            lambda: {
                name: "\n".join(map(str, registry.processors(name))) or f"none ({device.source})"
                for name, device in registry.devices.items()
            }
        ),
        "tables": _guarded(table_states),
    }


def _probed(probed: Future[Findings], part: str) -> Findings:
    answer = probed.result()
    return answer if "failed" in answer else answer[part]


def _folder_state(folder: Path) -> str:
    """Return a folder, whether it is writable, and its files and size. Counts at most ``_FILES_COUNTED`` files."""
    try:
        if not folder.is_dir():
            return f"{folder} (not there)"
        paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
        sizes = [os.lstat(path).st_size for path in islice(paths, _FILES_COUNTED)]
        least = "at least " if len(sizes) == _FILES_COUNTED else ""
        state = "writable" if os.access(folder, os.W_OK) else "not writable"
        return f"{folder} ({state}, {least}{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB)"
    except OSError as error:
        return f"{folder} (cannot be read: {error})"


def file_states(plugins: Plugins, processor: Processor) -> Mapping[str, str]:
    """Status lines of each file of a processor, by path."""
    tables = load_tables(plugins, processor)
    states: dict[str, list[MeasuredTable]] = {each.path: [] for each in table_files(plugins.table_folders, processor)}
    for found in tables.found:
        states.setdefault(found.origin.path, []).append(found.table)
    texts = {}
    for path, used in states.items():
        times = [table.backend for table in used if not table.failed]
        lines = [] if used else ["nothing of it is used"]
        if times:
            lines.append(f"used: {len(times)} table{'s' * (len(times) != 1)} of {', '.join(sorted(set(times)))}")
        failed = [table for table in used if table.failed]
        lines += [f"not taken by auto: {t.backend} for {t.role} of {t.shape}, which failed {t.failed}" for t in failed]
        texts[path] = "\n".join([*lines, *(fault for fault in tables.faults if fault.startswith(path))])
    return texts
