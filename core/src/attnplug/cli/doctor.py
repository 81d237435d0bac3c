"""``attnplug doctor``: a report on the environment.

Design constraints, to preserve when editing: every probe is guarded on its own; whatever imports a library does so in
a process of its own, because some raise AssertionError or RuntimeError on import, some print, some take the process
down; the report always prints, and the command never fails.
"""

from __future__ import annotations

import importlib.util
import json as jsonlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from attnplug.cli import output
from attnplug.cli.backends import listing
from attnplug.contract import CONTRACT_VERSION
from attnplug.errors import describe_error
from attnplug.hardware import visible_gpus
from attnplug.registry import ALLOW_VARIABLE, STRICT_VARIABLE, load_registry

KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_mla", "fla", "tokenspeed_mla", "cutlass", "sgl_kernel")
_VARIABLES = (ALLOW_VARIABLE, STRICT_VARIABLE, "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TRITON_CACHE_DIR", "HF_HOME")
_PROBE_SECONDS = 120

Findings = Mapping[str, str]


def report(*, json: bool) -> int:
    sections: dict[str, Callable[[], Findings]] = {
        "environment": _environment,
        "torch": _torch,
        "GPUs": _gpus,
        "kernel libraries": _kernel_libraries,
        "plugins": _plugins,
        "variables": _variables,
        "cache folders": _caches,
    }
    if json:
        output.write_json({title: _guarded(probe) for title, probe in sections.items()})
        return 0
    for title, probe in sections.items():
        print(f"{title}")
        findings = _guarded(probe)
        width = max(map(len, findings), default=0)
        for name, text in findings.items():
            print(f"  {name.ljust(width)}  " + text.replace("\n", "\n" + " " * (width + 4)))
        if not findings:
            print("  none")
        sys.stdout.flush()
    return 0


def _guarded(probe: Callable[[], Findings]) -> Findings:
    try:
        return probe()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"probe failed": describe_error(error)}


def _environment() -> Findings:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "attnplug": f"{metadata.version('attnplug')}, contract {CONTRACT_VERSION}",
    }


def _torch() -> Findings:
    code = """
import torch
answer = {"version": torch.__version__, "CUDA build": str(torch.version.cuda)}
answer["CUDA available"] = str(torch.cuda.is_available())
for number in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(number)
    answer[f"cuda:{number}"] = f"{gpu.name}, SM {gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
"""
    found = _in_own_process(code)
    return {"import failed": found["failed"]} if "failed" in found else found


def _gpus() -> Findings:
    return {f"GPU {number}": f"{gpu.name}, SM {gpu.sm}" for number, gpu in enumerate(visible_gpus())}


def _kernel_libraries() -> Findings:
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return dict(zip(KERNEL_LIBRARIES, pool.map(_library, KERNEL_LIBRARIES), strict=True))


def _library(name: str) -> str:
    try:
        if importlib.util.find_spec(name) is None:
            return "not installed"
    except Exception as error:
        return f"cannot be looked up: {describe_error(error)}"
    version = _version_of(name)
    failure = _in_own_process(f"import {name}; answer = {{}}").get("failed")
    return version if failure is None else f"{version}; import failed: {failure}"


def _version_of(module: str) -> str:
    try:
        owners = sorted(set(metadata.packages_distributions().get(module, [])))
        return ", ".join(f"{owner} {metadata.version(owner)}" for owner in owners) or "no distribution"
    except Exception as error:
        return f"version unknown ({describe_error(error)})"


def _in_own_process(code: str) -> Findings:
    """What code leaves in ``answer``, run apart from us; ``{"failed": why}`` where it does not get that far."""
    mark = f"attnplug-{os.urandom(8).hex()}"  # its own prints, at exit too, are not the answer
    script = (
        "import json, os\ntry:\n    scope = {}\n"
        f"    exec({code!r}, scope)\n    answer = scope['answer']\n"
        "except BaseException as error:\n    answer = {'failed': f'{type(error).__name__}: {error}'}\n"
        f"os.write(1, ('\\n{mark}' + json.dumps(answer) + '\\n').encode())\nos._exit(0)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {_PROBE_SECONDS} s"}
    for line in reversed(done.stdout.decode(errors="replace").splitlines()):
        if line.startswith(mark):
            return {str(name): str(text) for name, text in jsonlib.loads(line.removeprefix(mark)).items()}
    ended = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"failed": f"the process ended during the import ({ended})"}


def _plugins() -> Findings:
    """Listed in a process of their own: a plugin that takes its process down shall not take the report along."""
    code = "from attnplug.cli.doctor import plugin_findings; answer = plugin_findings()"
    return _in_own_process(code)


def plugin_findings() -> Findings:
    """Every plugin, whatever its state, and names in the allow-list that no plugin answers to."""
    environment = {name: value for name, value in os.environ.items() if name != STRICT_VARIABLE}
    registry = load_registry(environment=environment)
    rows = [(row.name, f"{row.distribution} {row.version}: {row.text}") for row in listing(registry, every=True)]
    rows += [(name, f"named in {ALLOW_VARIABLE}, but no installed plugin answers to it") for name in registry.unmatched]
    findings: dict[str, str] = {}
    for name, text in rows:
        findings[name] = f"{findings[name]}\n{text}" if name in findings else text
    return findings


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
