"""Real wheels and fresh environments, without network, for the tests that install plugins."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnplug_testing.environments import Environment, link_dependencies, link_pip, run

sys.path.insert(0, str(Path(__file__).parent))  # for modules that test files share

from tiny_plugins import GOOD, TINY

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything installed here but attnplug, its plugins and their kernel libraries."""
    return link_dependencies(tmp_path_factory.mktemp("dependencies"))


@pytest.fixture(scope="session")
def pip_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pip that is installed here."""
    return link_pip(tmp_path_factory.mktemp("pip"))


@pytest.fixture(scope="session")
def build_wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build the wheels of attnplug, of its conformance kit, which requires attnplug-sparse, and of some projects."""

    def build(*projects: Path) -> Path:
        wheels = tmp_path_factory.mktemp("wheels")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        own = (ROOT / "core", ROOT / "plugins" / "sparse", ROOT / "conformance")
        run([*pip, "wheel", *offline, "--wheel-dir", wheels, *own, *projects], wheels, {})
        return wheels

    return build


@pytest.fixture(scope="session")
def fresh_environment(
    tmp_path_factory: pytest.TempPathFactory, dependencies: Path, pip_alone: Path
) -> Callable[..., Environment]:
    """Make an environment with attnplug, its kit and the distributions named, from a folder of wheels.

    The kit's commands need attnplug-sparse too, which a test that runs them names.
    """

    def make(wheels: Path, *distributions: str) -> Environment:
        environment = Environment.make(tmp_path_factory.mktemp("environment"), wheels, pip_alone, dependencies)
        environment.install("attnplug", "attnplug-conformance", *distributions)
        return environment

    return make


@pytest.fixture(scope="session")
def wheels(build_wheels: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good plugin and ours, built from their projects, and all tiny ones."""
    good = shutil.copytree(Path(__file__).parent / "wheels" / GOOD, tmp_path_factory.mktemp("sources") / GOOD)
    folder = build_wheels(good, ROOT / "plugins" / "flashinfer_mla", ROOT / "tune")
    for plugin in TINY:
        plugin.write(folder)
    return folder
