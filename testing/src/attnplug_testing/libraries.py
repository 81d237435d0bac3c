"""Kernel libraries as pip installs them, made of metadata and of what modules a test gives them."""

from __future__ import annotations

from pathlib import Path


def install_library(folder: Path, distribution: str, version: str, modules: dict[str, str] | None = None) -> None:
    """Write a distribution into a folder that is on the path; ``modules`` are source texts by dotted name."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    for name, source in (modules or {}).items():
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
