"""Descriptions of GPUs as JSON files, so that ``attnplug warm`` can compile on a machine without the GPU."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnplug import UsageError
from attnplug_engine.execution.compile_ahead import GPU

_NEEDED = {"name": str, "major": int, "minor": int, "multi_processor_count": int}
"""Properties that kernels are chosen by in every case, with their types."""
_AGAIN = "write it with `attnplug warm --describe-gpu FILE` on a machine with the GPU"


def describe_gpu() -> dict[str, Any]:
    """Describe this machine's current GPU, and the versions and CPU for which its kernels are cached. Raises
    UsageError."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"--describe-gpu: torch {torch.__version__} finds no GPU here; run it on a machine with the GPU"
        )
    if torch.version.hip is not None:
        raise UsageError("--describe-gpu describes NVIDIA GPUs only; compile for this one on its own machine")
    return asdict(GPU.of(torch.device("cuda"))) | {"cpu": platform.machine()} | _versions()


def read_gpu(path: str) -> GPU:
    """Read the description of a GPU. Raises UsageError with the file's name and what to do."""
    try:
        given = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--gpu {path} cannot be read: {error.strerror}; {_AGAIN}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not text, or nested too deeply
        raise UsageError(f"--gpu {path} is not JSON: {error}; {_AGAIN}") from error
    if (problem := _problem(given)) is not None:
        raise UsageError(f"--gpu {path} {problem}")
    return GPU(given["properties"], given["memory"], tuple(given["target"]))


def _problem(given: Any) -> str | None:
    """Return why a file's content cannot be used, and what to do."""
    keys = {"properties", "memory", "target", "cpu", *_versions()}
    if not isinstance(given, dict) or given.keys() != keys:
        found = ", ".join(sorted(given)) if isinstance(given, dict) else type(given).__name__
        return f"does not describe a GPU: it has {found or 'nothing'}, not {', '.join(sorted(keys))}; {_AGAIN}"
    properties, target = given["properties"], given["target"]
    for name, kind in _NEEDED.items():
        value = properties.get(name) if isinstance(properties, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"does not describe a GPU: its property {name} is {value!r}; {_AGAIN}"
    if (count := properties["multi_processor_count"]) < 1:
        return f"does not describe a GPU: its property multi_processor_count is {count}; {_AGAIN}"
    if not isinstance(given["memory"], int) or given["memory"] <= 0:
        return f"does not describe a GPU: its memory is {given['memory']!r} bytes; {_AGAIN}"
    if target != ["cuda", sm := 10 * properties["major"] + properties["minor"], 32]:
        return f"has Triton's target {target!r}; only NVIDIA GPUs are supported, here ['cuda', {sm}, 32]; {_AGAIN}"
    if given["cpu"] != platform.machine():
        return (
            f"describes the GPU of a machine with CPU {given['cpu']}, which does not use what Triton compiles on "
            f"{platform.machine()}; compile on {given['cpu']}, or {_AGAIN} and CPU {platform.machine()}"
        )
    for name, here in _versions().items():
        if given[name] != here:
            return (
                f"was written with {name} {given[name]}, and {here} is installed here; install {given[name]}, or "
                f"{_AGAIN} and {name} {here}"
            )
    return None


def _versions() -> dict[str, str]:
    """Versions that decide which properties a GPU has, and whether a cached kernel is found. Without "+cu129"."""
    if find_spec("triton") is None:
        raise UsageError("Triton is not installed, and its kernels are what is compiled ahead; install Triton")
    return {name: version(name).partition("+")[0] for name in ("torch", "triton")}
