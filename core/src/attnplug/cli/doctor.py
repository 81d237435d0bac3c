"""``attnplug doctor``: a report on the environment.

Design constraints, to preserve when editing: every probe is guarded separately; libraries are imported in a process of
their own; all probes run at the same time; the report always prints, and the command never fails.
"""

from __future__ import annotations

import importlib.util
import json as jsonlib
import operator
import os
import platform
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import importlib_metadata as metadata

from attnplug.auto.table_store import CACHE_VARIABLE, TABLES_VARIABLE, cache_folder, file_states
from attnplug.choose.registry import ALLOW_VARIABLE, STRICT_VARIABLE, Registry, load_registry
from attnplug.cli import output
from attnplug.cli.backends import listing
from attnplug.cli.probe import Findings, Probes
from attnplug.declare.errors import describe_error
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.machine.hardware import this_processor, visible_gpus

KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_mla", "fla", "tokenspeed_mla", "cutlass", "sgl_kernel")
_VARIABLES = (
    ALLOW_VARIABLE,
    STRICT_VARIABLE,
    CACHE_VARIABLE,
    TABLES_VARIABLE,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "TRITON_CACHE_DIR",
    "HF_HOME",
)
_AT_ONCE = 9
"""A thread for each section, and one to ask about plugins."""


def report(*, json: bool) -> int:
    probes = Probes(sys.stderr if sys.stderr.isatty() and not json else None)
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        plugins = pool.submit(_ask_plugins, probes)
        sections: dict[str, Callable[[], Findings]] = {
            "environment": _environment,
            "torch": partial(_torch, probes),
            "GPUs": _gpus,
            "kernel libraries": partial(_kernel_libraries, probes),
            "plugins": partial(_plugins, probes, plugins),
            "measured tables": partial(_tables, plugins),
            "variables": _variables,
            "cache folders": _caches,
        }
        try:
            found = {title: pool.submit(_guarded, probe) for title, probe in sections.items()}
            if json:
                output.write_json({title: future.result() for title, future in found.items()})
            else:
                for title, future in found.items():
                    probes.print(_section(title, future.result()))
        except BaseException:  # an interrupt, or output that cannot be written: nobody waits for the rest
            probes.stop()
            raise
    return 0


def _section(title: str, findings: Findings) -> str:
    width = max(map(len, findings), default=0)
    lines = [
        f"  {name.ljust(width)}  " + text.replace("\n", "\n" + " " * (width + 4)) for name, text in findings.items()
    ]
    return "\n".join([title, *(lines or ["  none"])])


def _guarded(probe: Callable[[], Findings]) -> Findings:
    try:
        return probe()
    except BaseException as error:
        return {"probe failed": describe_error(error)}


def _environment() -> Findings:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "attnplug": f"{metadata.version('attnplug')}, contract {CONTRACT_VERSION}",
    }


def _torch(probes: Probes) -> Findings:
    code = """
import torch
answer = {"version": torch.__version__, "CUDA build": str(torch.version.cuda)}
answer["CUDA available"] = str(torch.cuda.is_available())
for number in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(number)
    answer[f"cuda:{number}"] = f"{gpu.name}, SM {gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
"""
    found = probes.ask("torch", code)
    return {"import failed": found["failed"]} if "failed" in found else found


def _gpus() -> Findings:
    return {f"GPU {number}": f"{gpu.name}, SM {gpu.sm}" for number, gpu in enumerate(visible_gpus())}


def _kernel_libraries(probes: Probes) -> Findings:
    owners = _owners()
    with ThreadPoolExecutor(max_workers=len(KERNEL_LIBRARIES)) as pool:
        states = pool.map(partial(_library, probes, owners), KERNEL_LIBRARIES)
        return dict(zip(KERNEL_LIBRARIES, states, strict=True))


def _owners() -> Mapping[str, list[str]]:
    """The distributions that each module belongs to; empty if damaged metadata keeps Python from telling."""
    try:
        return metadata.packages_distributions()
    except Exception:
        return {}


def _library(probes: Probes, owners: Mapping[str, list[str]], name: str) -> str:
    try:
        if importlib.util.find_spec(name) is None:
            return "not installed"
    except Exception as error:
        return f"cannot be looked up: {describe_error(error)}"
    version = _version_of(owners.get(name, []))
    failure = probes.ask(name, f"import {name}; answer = {{}}").get("failed")
    return version if failure is None else f"{version}; import failed: {failure}"


def _version_of(owners: list[str]) -> str:
    try:
        return ", ".join(f"{owner} {metadata.version(owner)}" for owner in sorted(set(owners))) or "no distribution"
    except Exception as error:
        return f"version unknown ({describe_error(error)})"


def _ask_plugins(probes: Probes) -> Findings:
    """Listed in a process of its own: a plugin that crashes its process must not take the report along."""
    return probes.ask("plugins", "from attnplug.cli.doctor import plugin_answer; answer = plugin_answer()")


def _plugins(probes: Probes, asked: Future[Findings]) -> Findings:
    answer = asked.result()
    if "failed" in answer:
        return answer
    findings, factories = jsonlib.loads(answer["findings"]), jsonlib.loads(answer["factories"])
    for name, failure in _factory_failures(probes, factories).items():
        findings[name] += f", but its factory {factories[name]} cannot be imported: {failure}"
    return {str(name): str(text) for name, text in findings.items()}


def _factory_failures(probes: Probes, factories: Mapping[str, str]) -> Findings:
    """Why the factories of usable backends cannot be imported. Metadata does not tell."""
    failures = probes.ask("factories", _importing(factories)) if factories else {}
    if "failed" not in failures:
        return failures
    found: dict[str, str] = {}
    for name, factory in factories.items():  # one of them crashed the process
        alone = probes.ask(name, _importing({name: factory}))
        found |= {name: alone["failed"]} if "failed" in alone else alone
    return found


def _importing(factories: Mapping[str, str]) -> str:
    return f"from attnplug.cli.doctor import import_factories; answer = import_factories({dict(factories)!r})"


def import_factories(factories: Mapping[str, str]) -> Findings:
    """Import each, and return what the failing ones raise."""
    failures = {}
    for name, factory in factories.items():
        module, _, attribute = factory.partition(":")
        try:
            operator.attrgetter(attribute)(importlib.import_module(module))
        except BaseException as error:  # libraries raise anything on import, even SystemExit
            failures[name] = describe_error(error)
    return failures


def plugin_answer() -> Findings:
    """What to say about each plugin, where the factories of usable backends are, and which tables are measured."""
    environment = {name: value for name, value in os.environ.items() if name != STRICT_VARIABLE}
    registry = load_registry(environment=environment)
    rows = list(listing(registry, every=True))
    texts = [(row.name, f"{row.distribution} {row.version}: {row.text}") for row in rows]
    texts += [(name, f"named in {ALLOW_VARIABLE}, but no installed plugin matches it") for name in registry.unmatched]
    findings: dict[str, str] = {}
    for name, text in texts:
        findings[name] = f"{findings[name]}\n{text}" if name in findings else text
    factories = {row.name: registry.backends[row.name].spec.factory for row in rows if row.status == "usable"}
    tables = _guarded(partial(_table_states, registry))
    answers = {"findings": findings, "factories": factories, "tables": tables}
    return {name: jsonlib.dumps(answer) for name, answer in answers.items()}


def _tables(asked: Future[Findings]) -> Findings:
    answer = asked.result()
    return answer if "failed" in answer else {str(k): str(text) for k, text in jsonlib.loads(answer["tables"]).items()}


def _table_states(registry: Registry) -> Findings:
    """What to say about each file of measured tables of this machine, and about each plugin that brings some."""
    processors = [found for device in ("cuda", "cpu") if (found := this_processor(device)) is not None]
    states = [f for processor in processors for f in file_states(registry, processor).items()]
    return dict(states) or {"of this user": f"none in {cache_folder()}; 'attnplug tune' measures"}


def _variables() -> Findings:
    return {name: repr(os.environ[name]) for name in _VARIABLES if name in os.environ}


def _caches() -> Findings:
    home = Path.home()
    flashinfer = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", str(home))) / ".cache" / "flashinfer"
    folders = {
        "flashinfer": flashinfer,
        "triton": Path(os.environ.get("TRITON_CACHE_DIR", str(home / ".triton" / "cache"))),
        "hugging face": Path(os.environ.get("HF_HOME", str(home / ".cache" / "huggingface"))),
    }
    return {name: f"{folder} ({_folder_state(folder)})" for name, folder in folders.items()}


def _folder_state(folder: Path) -> str:
    try:
        if not folder.is_dir():
            return "not there"
        return "writable" if os.access(folder, os.W_OK) else "not writable"
    except OSError as error:
        return f"cannot be read: {error}"
