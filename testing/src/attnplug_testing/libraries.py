"""Fake kernel libraries: metadata as pip writes it, and modules that a test provides."""

from __future__ import annotations

from pathlib import Path


def install_library(folder: Path, distribution: str, version: str, modules: dict[str, str] | None = None) -> None:
    """Write a distribution into a folder on the path. ``modules`` maps dotted names to source text."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    for name, source in (modules or {}).items():
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
