"""Reports shared by the GPU benchmarks: environment, errors, and a result file that is always complete."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


@dataclass
class Report:
    """All results so far; the file is rewritten with every result."""

    path: Path | None
    found: dict[str, Any]
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def put(self, name: str, value: Any) -> None:
        self.found[name], self.found["seconds"] = value, self.seconds
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def attempt(measure: Callable[[], Any]) -> Any:
    """Return the measurement, or its error."""
    try:
        return measure()
    except Exception as error:  # a failing kernel may raise anything; continue with the other cases
        trace = traceback.format_exc(limit=-4)
        print(trace, file=sys.stderr, flush=True)
        return {"error": f"{type(error).__name__}: {error}"[:400], "traceback": trace[-4000:]}


def describe(what: str, packages: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Describe a run: subject, device and versions."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    file = Path(__file__).resolve().parents[1] / ".gpu" / "commit"
    if commit is None and file.exists():
        commit = file.read_text().strip()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return {
        "what": what,
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "versions": versions,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
