"""Plugins of one module, good and broken, as wheels, and what commands print about plugins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from zipfile import ZipFile

from attnplug.declare.version import CONTRACT_VERSION

GOOD = "acme-attention"
"""Distribution that tests build from its project."""


@dataclass(frozen=True)
class TinyPlugin:
    """A distribution with one module: its name, version, entry point and source."""

    distribution: str
    version: str
    entry_point: str
    body: str

    def write(self, folder: Path) -> None:
        """Write its wheel. A builder takes longer for all of them than the tests that they are for."""
        module = self.distribution.replace("-", "_")
        info = f"{module}-{self.version}.dist-info"
        files = {
            f"{module}.py": self.body,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {self.version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[attnplug.plugins]\n{self.entry_point} = {module}\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
        with ZipFile(folder / f"{module}-{self.version}-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)


_SPEC = """
from attnplug import AttentionKind, BackendSpec, Capabilities, DType, hookimpl

def spec(name, contract="1.0", devices=("cpu",), dtypes=(DType.FLOAT32,), requires=(), **more):
    can = Capabilities(kinds={AttentionKind.MHA}, devices=devices, dtypes=dtypes, **more)
    return BackendSpec(name, "nothing runs", contract, "attnplug:nothing", can, requires)
"""

_HOOK = """
@hookimpl
def attnplug_backends():
    return [{spec}]
"""


def _returning(specs: str) -> str:
    """Source of a plugin whose hook returns them."""
    return _SPEC + _HOOK.format(spec=specs)


def _tiny(distribution: str, version: str, body: str) -> TinyPlugin:
    return TinyPlugin(distribution, version, distribution.replace("-", "_"), body)


# Plugins that cannot be used, and the text that each one's error must contain.
BROKEN: dict[TinyPlugin, tuple[str, ...]] = {
    _tiny("bad-import", "0.1", "import a_kernel_library_nobody_has"): (
        "ModuleNotFoundError",
        "a_kernel_library_nobody_has",
    ),
    _tiny("bad-syntax", "0.2", "def attnplug_backends(:"): ("SyntaxError", "bad_syntax.py"),
    _tiny("bad-assertion", "0.3", "assert 1 == 2, 'needs a newer GPU'"): ("AssertionError", "needs a newer GPU"),
    _tiny("bad-exit", "0.4", "import sys; sys.exit('no GPU, goodbye')"): ("SystemExit", "no GPU, goodbye"),
    _tiny("bad-type", "0.5", _returning("{'name': 'bad_type'}")): (
        "def attnplug_backends()",
        "bad_type.py:8",
        "{'name': 'bad_type'} (dict)",
        "not a BackendSpec",
    ),
    _tiny("bad-list", "0.6", _returning("").replace("[]", "spec('bad_list')")): (
        "def attnplug_backends()",
        "return a list",
    ),
    _tiny("bad-contract", "0.7", _returning("spec('bad_contract', '2.0')")): (
        "contract 2.0",
        f"this attnplug has contract {CONTRACT_VERSION}",
    ),
    _tiny("bad-hook", "0.8", _returning("spec('bad_hook')").replace("attnplug_backends", "attnplug_backend")): (
        "def attnplug_backend()",
        "bad_hook.py:8",
        "did you mean attnplug_backends?",
    ),
    _tiny("bad-default", "0.9", _returning("spec('bad_default')").replace("backends()", "backends(sm=90)")): (
        "def attnplug_backends(sm=90)",
        "bad_default.py:8",
        "sm would never be passed",
    ),
    _tiny("bad-mark", "0.10", _returning("spec('bad_mark')").replace("@hookimpl", "")): (
        "def attnplug_backends()",
        "not marked",
        "@attnplug.hookimpl",
    ),
    _tiny("bad-claims", "0.11", _returning("spec('bad_claims', devices={'cuda'}, min_sm=100, max_sm=90)")): (
        "'bad_claims'",
        "min_sm 100 is above max_sm 90",
    ),
}

CHATTY = _tiny("chatty", "2.0", "print('hello from chatty')" + _returning("spec('chatty')"))
NEEDY = _tiny("needy", "3.0", _returning("spec('needy', requires=('unobtainium>=7',))"))
IMPOSTOR = TinyPlugin("impostor", "6.6.6", "other", _returning("spec('acme')"))
USURPER = _tiny("usurper", "6.6.7", _returning("spec('torch_native')"))
TINY = (*BROKEN, CHATTY, NEEDY, IMPOSTOR, USURPER)


def by_status(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{row['name']} from {row['distribution']}": row["status"] for row in rows}


def refused_politely(done: CompletedProcess[str], exit_code: int) -> str:
    """Error message of a command that fails: one message, nothing on standard output, no traceback."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    return done.stderr
