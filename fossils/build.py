"""Build the fossils: reproducible wheels of ``sources/``, plugins and a host that use one version of the contract.

python fossils/build.py 1.0    write fossils/1.0/*.whl and SHA256SUMS

Once a contract is released, its fossils are never rebuilt: they test that later cores still run them (README.md).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EPOCH = "1580601600"  # hatchling's default
_BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


def build(folder: Path, sources: Path = HERE / "sources") -> list[Path]:
    """Write the wheel of every source and their SHA256SUMS to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"SOURCE_DATE_EPOCH": EPOCH}
    with tempfile.TemporaryDirectory() as copies:  # copies, because file modes of a checkout depend on the umask
        for project in sorted(path.parent for path in sources.glob("*/pyproject.toml")):
            copy = Path(copies) / project.name
            shutil.copytree(project, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for path in copy.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            subprocess.run([sys.executable, "-c", _BUILD, str(folder.resolve())], cwd=copy, env=environment, check=True)
    wheels = sorted(folder.glob("*.whl"))
    sums = "".join(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels)
    (folder / "SHA256SUMS").write_text(sums)
    return wheels


if __name__ == "__main__":
    for wheel in build(HERE / sys.argv[1]):
        print(wheel, wheel.stat().st_size)
