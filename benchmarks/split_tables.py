"""Distribute measured tables over the packages whose backends they measure, in a checkout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from attnplug_tune.table_writing import write_tables

from attnplug.auto.table_store import read_tables
from attnplug.host import load_registry


def main(path: Path) -> None:
    registry, file = load_registry(), read_tables(path)
    folders = {folder.source: folder.value for folder in registry.table_folders}
    measured = [table for table in file.tables if not table.failed]  # a failure says nothing about other machines
    for backend in sorted({table.backend for table in measured}):
        source = registry.get(backend).source
        if source not in folders:
            sys.exit(f"{source} has no hook attnplug_rankings, so the tables of {backend} have no place")
        target = folders[source] / path.name
        write_tables(target, [table for table in measured if table.backend == backend])
        target.with_name(f"{target.name}.lock").unlink()
        print(f"{backend}: {target}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a file that attnplug tune --tables wrote")
    main(parser.parse_args().file)
