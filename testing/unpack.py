"""Unpack the sources of libraries that tests read, and that need not be importable.

Usage: python unpack.py FOLDER NAME:DISTRIBUTION==VERSION …, which fills FOLDER/NAME/VERSION. FlashInfer's wheel is
440 MB unpacked, of which 110 are extracted.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

READ = re.compile(
    r"\.py$|^flashinfer/data/include/flashinfer/|^flashinfer/data/csrc/[^/]+$|^flash_mla/_C_legacy.*\.so$"
)


def unpack(wheel: Path, folder: Path) -> None:
    """Extract a wheel's sources to a folder, which is complete as soon as it exists."""
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(partial, [name for name in files.namelist() if READ.search(name)])
    partial.rename(folder)


def main(folder: Path, *wanted: str) -> None:
    parts = [re.split(":|==", text) for text in wanted]
    missing = [(name, distribution, version) for name, distribution, version in parts
               if not (folder / name / version).exists()]  # fmt: skip
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    while missing:
        # Each start of pip takes a second, and it downloads one version of a distribution at a time.
        together = {distribution: (name, version) for name, distribution, version in reversed(missing)}
        with tempfile.TemporaryDirectory() as wheels:
            exact = [f"{distribution}=={version}" for distribution, (_, version) in together.items()]
            subprocess.run([*pip, "--only-binary", ":all:", "--dest", wheels, *exact], check=True)
            for distribution, (name, version) in together.items():
                (wheel,) = Path(wheels).glob(f"{distribution.replace('-', '_')}-{version}*.whl")
                unpack(wheel, folder / name / version)
        missing = [one for one in missing if together[one[1]] != (one[0], one[2])]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
