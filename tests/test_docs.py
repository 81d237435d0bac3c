"""What the documentation shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "writing-a-backend.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the guide's plugin is installed, file by file as the guide gives them."""
    site = tmp_path_factory.mktemp("site")
    plugin, backend = blocks(GUIDE, "python")
    package = site / "my_attention"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(plugin)
    (package / "backend.py").write_text(backend)
    (toml,) = blocks(GUIDE, "toml")
    (group,) = re.findall(r'\[project\.entry-points\."(.+)"\]', toml)
    (point,) = re.findall(r'my_attention = "(.+)"', toml)
    metadata = site / "my_attention-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-attention\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nmy_attention = {point}\n")
    return {**os.environ, "PYTHONPATH": str(site), "ATTNPLUG_STRICT": "1"}


def attnplug(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnplug", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_guides_plugin_is_selectable(environment):
    """D1"""
    done = attnplug(environment, "backends")
    assert done.returncode == 0, done.stderr
    assert "my-attention 0.1.0" in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", ["1", "16"])
def test_the_guides_backend_is_right(environment, dtype, page_size):
    done = attnplug(
        environment, "check", "--attention-backend", "my_attention", "--dtype", dtype, "--page-size", page_size
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 checks hold" in done.stdout


def test_the_readmes_plugin_is_the_guides():
    assert blocks(README, "python")[1] == blocks(GUIDE, "python")[0]


def test_the_readmes_plugin_has_ten_lines():
    assert len([line for line in blocks(README, "python")[1].splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize(("block", "printed"), [(0, r"\[(\d+, ){7}\d+\]\n"), (2, "torch_native 64\n")])
def test_the_readmes_python_runs(capsys, block, printed):
    exec(compile(blocks(README, "python")[block], "README.md", "exec"), {})
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_the_first_screen_of_the_guide_is_a_whole_plugin():
    """All of it comes before the first heading below the title."""
    assert len(re.findall(r"```(?:python|toml)\n", GUIDE.split("\n## ")[0])) == 3


def test_no_placeholder_is_left():
    for text in (GUIDE, README):
        assert not re.findall(r"MAKE_RUN|TODO|FIXME|XXX", text)


def test_samples_that_are_not_generated_know_every_backend():
    """Their times are of one run; which backends there are is of this repository."""
    names = re.findall(r"^\| `(\w+)` \| `attnplug", README, re.MULTILINE)
    run, check = (
        next(b for b in blocks(README, "console") if b.startswith(f"$ {c}\n")) for c in ("make run", "attnplug check")
    )
    assert [name for name in names if f"{name} (attnplug" not in " ".join(check.split())] == []
    assert set(re.findall(r"(\d+) refused", run + check)) == {str(len(names) - 1)}
