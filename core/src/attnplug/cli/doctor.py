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

from attnplug.cli.backends import listing
from attnplug.contract import CONTRACT_VERSION
from attnplug.hardware import visible_gpus
from attnplug.registry import ALLOW_VARIABLE, STRICT_VARIABLE, load_registry

KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_mla", "fla", "tokenspeed_mla", "cutlass", "sgl_kernel")
_VARIABLES = (ALLOW_VARIABLE, STRICT_VARIABLE, "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TRITON_CACHE_DIR", "HF_HOME")
_PROBE_SECONDS = 120

Findings = Mapping[str, str]


def report(*, json: bool) -> None:
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
        print(jsonlib.dumps({title: _guarded(probe) for title, probe in sections.items()}, indent=2))
        return
    for title, probe in sections.items():
        print(f"{title}")
        findings = _guarded(probe)
        width = max(map(len, findings), default=0)
        for name, text in findings.items():
            print(f"  {name.ljust(width)}  " + text.replace("\n", "\n" + " " * (width + 4)))
        if not findings:
            print("  none")
        sys.stdout.flush()


def _guarded(probe: Callable[[], Findings]) -> Findings:
    try:
        return probe()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return {"probe failed": f"{type(error).__name__}: {error}"}


def _environment() -> Findings:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "attnplug": f"{metadata.version('attnplug')}, contract {CONTRACT_VERSION}",
    }


def _torch() -> Findings:
    code = (
        "import torch, json; f = {'version': torch.__version__, 'CUDA build': str(torch.version.cuda), "
        "'CUDA available': str(torch.cuda.is_available())}\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    p = torch.cuda.get_device_properties(i)\n"
        "    f[f'cuda:{i}'] = f'{p.name}, SM {p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB'\n"
        "print(json.dumps(f))"
    )
    found, error = _in_own_process(code)
    if error is not None:
        return {"import failed": error}
    return {str(name): str(text) for name, text in jsonlib.loads(found).items()}


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
        return f"cannot be looked up: {type(error).__name__}: {error}"
    owners = metadata.packages_distributions().get(name, [])
    version = ", ".join(sorted({f"{owner} {metadata.version(owner)}" for owner in owners})) or "no distribution"
    _, error_text = _in_own_process(f"import {name}")
    return version if error_text is None else f"{version}; import failed: {error_text}"


def _in_own_process(code: str) -> tuple[str, str | None]:
    """Run Python code apart from us: the last line it printed, and its error if it had one."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PROBE_SECONDS} s"
    lines = done.stdout.strip().splitlines() or [""]
    if done.returncode == 0:
        return lines[-1], None
    if done.returncode < 0:
        return "", f"killed by signal {-done.returncode}"
    errors = done.stderr.strip().splitlines() or ["no message"]
    return "", f"{errors[-1]} (exit code {done.returncode})"


def _plugins() -> Findings:
    environment = {name: value for name, value in os.environ.items() if name != STRICT_VARIABLE}
    registry = load_registry(environment=environment)
    findings: dict[str, str] = {}
    for row in listing(registry, every=True):
        key = row.name if row.name not in findings else f"{row.name} [{row.distribution}]"
        findings[key] = f"{row.distribution} {row.version}: {row.text}"
    for name in registry.unmatched:
        findings[name] = f"named in {ALLOW_VARIABLE}, but no installed plugin answers to it"
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
