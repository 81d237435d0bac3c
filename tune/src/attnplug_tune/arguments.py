"""Checks of the options of ``tune`` and ``bench``. Imports no torch, so that mistakes are reported at once."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from attnplug.cli.app import option
from attnplug.declare.errors import Setting, UsageError
from attnplug.declare.options import split_settings
from attnplug.declare.problem import DType, ExtendPath, Problem
from attnplug.registry.registry import load_registry
from attnplug_tune.points import check_requests, parse_points
from attnplug_tune.shapes import parse_shapes

_MEASURING_OPTIONS = (
    *("model", "shapes", "host", "points", "backends", "device", "dtype", "kv_dtype", "page_size", "backend_option"),
    *("max_batch", "max_context", "speculative_tokens", "mla_extend", "against", "out", "plot"),
)
_LIBRARIES = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}  # distributions by module


def check_tune(parsed: argparse.Namespace) -> None:
    """Raise UsageError if an option of ``tune`` is wrong."""
    if not parsed.budget > 0:
        raise UsageError(f"--budget {parsed.budget:g} is too short; give seconds above 0")
    _check_measuring(parsed)
    if mixed := [point for point in parse_points(parsed.points or "1x1") if point.decodes]:
        raise UsageError(
            f"--points: {mixed[0]} is a mixed batch, and tables have none: auto estimates them from others, such as "
            "32x4k+1; leave it out, or measure it with 'attnplug bench'"
        )
    _check_plotted("--report", parsed.report, ".html")


def check_bench(parsed: argparse.Namespace) -> None:
    """Raise UsageError if an option of ``bench`` is wrong."""
    if parsed.compare is not None:
        given = [name for name in _MEASURING_OPTIONS if getattr(parsed, name)]
        given += ["tensor_parallel"] if parsed.tensor_parallel != 1 else []
        if given:
            raise UsageError(f"--compare measures nothing; leave out {', '.join(map(option, given))}")
        return
    if parsed.against not in (None, "raw"):
        raise UsageError(f"--against {parsed.against!r} is unknown; use raw, the backends' libraries called directly")
    _check_measuring(parsed)
    _check_plotted("--plot", parsed.plot, ".svg", ".html")
    _check_file(parsed.out)


def _check_measuring(parsed: argparse.Namespace) -> None:
    """Check the options that both commands share."""
    if (parsed.model is None) == (parsed.shapes is None):
        raise UsageError("give one of --model and --shapes")
    if parsed.shapes is not None:
        parse_shapes(parsed.shapes)
    if parsed.points is not None:
        parse_points(parsed.points)
    if parsed.mla_extend is not None:
        ExtendPath.parse(parsed.mla_extend)
        if parsed.host is not None:
            raise UsageError(f"--mla-extend is for our own engine; {parsed.host} prefills MLA itself. Leave one out")
    if parsed.max_batch is not None:
        check_requests(parsed.max_batch)
    if parsed.device is not None:
        load_registry().device(parsed.device)
    if parsed.dtype is not None:
        DType.parse(parsed.dtype, Setting.DTYPE)
    if parsed.kv_dtype is not None and DType.spelled(parsed.kv_dtype) is None:
        load_registry().kv_format(parsed.kv_dtype)
    sizes = {name: getattr(parsed, name) for name in ("page_size", "speculative_tokens", "tensor_parallel")}
    Problem(**sizes)  # raises if a size is wrong
    split_settings(parsed.backend_option)


def _check_plotted(name: str, path: str | None, *suffixes: str) -> None:
    """Check a file with plots: its format, which the suffix chooses, and the plotting libraries."""
    if path is None:
        return
    missing = [library for library in _LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise UsageError(f"{name} needs {' and '.join(missing)}; pip install {' '.join(_LIBRARIES.values())}")
    _check_file(path)
    if Path(path).suffix.lower() not in suffixes:
        raise UsageError(f"{name} {path} is not a {' or '.join(suffixes)} file; end its name with {suffixes[0]}")


def _check_file(path: str | None) -> None:
    """Check that a file can be written, before anything is measured."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        wrong = "Is a directory"
    elif not os.path.isdir(folder):
        wrong = f"there is no folder {folder}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        wrong = "Permission denied"
    else:
        return
    raise UsageError(f"{path} cannot be written: {wrong}")
