"""The report of changes in hosts, over two versions of a package that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OLD = """
from acme.base import Base
class Backend(Base):
    def kept(self, a, *, b): ...
    def unused(self, a): ...
def function(a): ...
"""
NEW = """
from acme.base import Base
class Backend(Base):
    def kept(self, a, *, b): ...
"""


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "testing"))
    import host_watch

    yield host_watch
    for name in ("host_watch", "unpack"):
        sys.modules.pop(name, None)


def version(folder: Path, text: str, base: str) -> Path:
    (folder / "acme").mkdir(parents=True)
    (folder / "acme" / "backends.py").write_text(text)
    (folder / "acme" / "base.py").write_text(base)
    return folder


def test_apis_that_a_bridge_uses_are_compared(watch, tmp_path, monkeypatch):
    """Removed functions and changed signatures, inherited ones included; nothing that the bridge does not mention."""
    bridge = tmp_path / "bridges" / "acme"
    (bridge / "src").mkdir(parents=True)
    (bridge / "tests").mkdir()
    (bridge / "src" / "bridge.py").write_text(
        "from acme.backends import Backend, function\nclass Ours(Backend):\n    def inherited(self, a): ...\n"
        "def call(backend):\n    backend.kept(1, b=2)\n"
    )
    (bridge / "tests" / "test_signatures.py").write_text('CONFIGS = {("acme.base", "Base"): ("inherited",)}\n')
    monkeypatch.setattr(watch, "ROOT", tmp_path)
    host = watch.Host("acme", ("acme",))
    old = version(tmp_path / "1", OLD, "class Base:\n    def inherited(self, a): ...\n")
    new = version(tmp_path / "2", NEW, "class Base:\n    def inherited(self, a, b): ...\n")
    count, lines = watch.changes(host, old, new)
    assert count == 6
    assert lines == [
        "- changed: `acme.backends.Backend.inherited(self, a)` → `(self, a, b)`",
        "- removed: `acme.backends.function`",
        "- changed: `acme.base.Base.inherited(self, a)` → `(self, a, b)`",
    ]
    assert watch.changes(host, old, old) == (count, [])


def test_a_release_within_the_supported_range_is_compared_too(watch, tmp_path, monkeypatch):
    """A patch release that no test has read."""
    bridge = tmp_path / "bridges" / "acme"
    (bridge / "src").mkdir(parents=True)
    (bridge / "tests").mkdir()
    (bridge / "src" / "host.py").write_text('from acme.backends import function\nHOST = HostSpec(versions=">=1,<2")\n')
    (bridge / "tests" / "test_signatures.py").write_text("")
    monkeypatch.setattr(watch, "ROOT", tmp_path)
    monkeypatch.setattr(watch, "releases", lambda name: [watch.Version("1.0.1"), watch.Version("1.0")])
    unpacked: list[str] = []
    monkeypatch.setattr(watch, "unpack", lambda folder, *given: unpacked.extend(given))
    version(tmp_path / "acme" / "1.0", OLD, "class Base: ...\n")
    version(tmp_path / "acme" / "1.0.1", NEW, "class Base: ...\n")
    host = watch.Host("acme", ("acme",))
    text, changed = watch.report(host, tmp_path, watch.Version("1.0"))
    assert changed and "- removed: `acme.backends.function`" in text
    assert sorted(unpacked) == ["acme:acme==1.0", "acme:acme==1.0.1"]
    assert not watch.report(host, tmp_path, watch.Version("1.0.1"))[1]


@pytest.mark.parametrize("package", ["vllm", "sglang", "transformers"])
def test_every_bridge_uses_apis_of_its_host(watch, package):
    (host,) = (each for each in watch.HOSTS if each.package == package)
    assert len(watch.used_names(host)) > 3 and str(host.supported)
