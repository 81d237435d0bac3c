"""The command: what each subcommand prints and returns, and that no mistake of a person ends in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnplug.cli.main import main
from attnplug.tiny import TINY_CONFIGS

Attnplug = Callable[..., "Outcome"]
Package = Callable[..., None]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as JSON that any parser reads: it holds nothing else, and no NaN."""
        return json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNPLUG_PLUGINS", "ATTNPLUG_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is refused here must not depend on the machine
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own; this puts it back


@pytest.fixture
def attnplug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attnplug:
    """Runs the command in this process. An exception that would be a traceback fails the test."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["attnplug", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = exit.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run


def in_own_process(*arguments: str, path: Path | None = None, **environment: str) -> Outcome:
    """Runs the command as a user's shell does, with what is under ``path`` installed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "attnplug", *arguments],
        env={**inherited, **({"PYTHONPATH": str(path)} if path else {}), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=60,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


PLUGIN = """
from attnplug import BackendSpec, Capabilities, Problem, Refusal, hookimpl

@hookimpl
def attnplug_backends():
    fields = dict(name={name!r}, summary="a backend of a test", contract="1.0", factory="nowhere:build")
    capabilities = dict(kinds=["mha"], devices=["cpu"], dtypes=["float32"])
    capabilities.update({capabilities})
    fields.update({fields})
    return [BackendSpec(capabilities=Capabilities(**capabilities), **fields)]
"""


OPTIONS = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Options:
    split: int = 1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Installs a distribution with one plugin module: real metadata in a folder on the path, as pip writes it."""
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def install(
        name: str, source: str | None = None, *, version: str = "1.2.3", fields: str = "{}", capabilities: str = "{}"
    ) -> None:
        module = f"plugin_module_{name}"
        modules.append(module)
        if source is None:
            source = PLUGIN.format(name=name, fields=fields, capabilities=capabilities)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name}_dist-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[attnplug.plugins]\n{name} = {module}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def config_file(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY_CONFIGS["llama"], **changes}))
    return path


# ---- every command ----


@pytest.mark.parametrize("command", [[], ["backends"], ["explain"], ["doctor"], ["check"]])
def test_every_command_has_help(attnplug: Attnplug, command: list[str]) -> None:
    outcome = attnplug(*command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: attnplug {' '.join(command)}".rstrip())
    assert outcome.err == ""


def test_the_version_is_that_of_the_distribution_and_the_contract(attnplug: Attnplug) -> None:
    """D4"""
    outcome = attnplug("--version")
    assert outcome.code == 0
    assert outcome.out == "attnplug 0.1.0, contract 1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        [""],
        ["backends", "--jsno"],
        ["backends", "extra"],
        ["explain"],
        ["explain", "--model"],
        ["explain", "--model", "tiny:llama", "--page-size", "many"],
        ["explain", "--model", "tiny:llama", "--sm", ""],
        ["check", "--seed", "x"],
        ["--nosuch"],
    ],
)
def test_a_command_line_that_cannot_be_read_is_wrong_usage(attnplug: Attnplug, arguments: list[str]) -> None:
    outcome = attnplug(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err


def test_python_m_attnplug_is_the_command() -> None:
    outcome = in_own_process("--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("attnplug ")


@pytest.mark.parametrize(
    "arguments", [["backends"], ["backends", "--json"], ["explain", "--model", "tiny:llama"], ["--help"]]
)
def test_a_reader_that_goes_away_gets_no_traceback(arguments: list[str]) -> None:
    """As in 'attnplug backends | head -1'."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", *arguments],
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""


def test_a_full_disk_is_an_error_for_a_person() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", "backends"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize("arguments", [["backends"], ["explain", "--model", "tiny:llama"]])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_its_answer(arguments: list[str], encoding: str) -> None:
    outcome = in_own_process(*arguments, PYTHONIOENCODING=encoding)
    assert outcome.code == 0
    assert "torch_native" in outcome.out
    assert "Traceback" not in outcome.err


def test_listing_and_explaining_import_no_torch() -> None:
    """What lists plugins must start quickly and touch no CUDA state."""
    code = (
        "import sys\nfrom attnplug.cli.main import main\n"
        "for arguments in (['backends'], ['backends', '--json'], ['explain', '--model', 'tiny:deepseek_v3']):\n"
        "    sys.argv = ['attnplug', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'triton', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- backends ----


def test_backends_shows_name_distribution_contract_and_status(attnplug: Attnplug) -> None:
    """D1"""
    outcome = attnplug("backends")
    assert outcome.code == 0
    assert outcome.err == ""
    for text in ("torch_native", "attnplug 0.1.0", "1.0", "mha/mla", "usable here"):
        assert text in outcome.out


def test_an_installed_plugin_is_listed_and_gone_without_it(attnplug: Attnplug, package: Package) -> None:
    """D1"""
    assert [row["name"] for row in attnplug("backends", "--json").json] == ["torch_native"]
    package("fast")
    rows = attnplug("backends", "--json").json
    assert [row["name"] for row in rows] == ["fast", "torch_native"]
    assert rows[0] == {
        "name": "fast",
        "distribution": "fast-dist",
        "version": "1.2.3",
        "contract": "1.0",
        "status": "usable",
        "reasons": [],
        "error": None,
    }


def test_a_backend_that_is_refused_here_says_why(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", capabilities='{"devices": ["cuda"], "min_sm": 90}', fields='{"requires": ["no-such-library>=2"]}')
    row = attnplug("backends", "--json").json[0]
    assert row["status"] == "refused"
    assert {reason["code"] for reason in row["reasons"]} == {"device", "requirement"}
    assert set(row["reasons"][0]) == {"code", "message", "value", "allowed", "option"}
    assert "refused here" in attnplug("backends").out


def test_broken_and_blocked_plugins_are_counted_and_shown_with_all(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    package("extra")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "odd-dist")
    short = attnplug("backends", "--json")
    assert short.code == 0
    assert [row["name"] for row in short.json] == ["torch_native"]
    assert "1 broken and 1 blocked" in short.err
    rows = {row["name"]: row for row in attnplug("backends", "--all", "--json").json}
    assert (rows["odd"]["status"], rows["odd"]["distribution"], rows["odd"]["version"]) == (
        "broken",
        "odd-dist",
        "1.2.3",
    )
    assert "RuntimeError: no driver" in rows["odd"]["error"]
    assert rows["extra"]["status"] == "blocked"
    assert "ATTNPLUG_PLUGINS" in rows["extra"]["error"]
    assert "broken: RuntimeError: no driver" in attnplug("backends", "--all").out


def test_a_name_in_the_allow_list_that_matches_nothing_is_a_warning(
    attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "fsat")
    outcome = attnplug("backends", "--json")
    assert outcome.code == 0
    assert "'fsat'" in outcome.err
    assert outcome.json


def test_in_strict_mode_a_broken_plugin_ends_the_command(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    for command in (["backends"], ["explain", "--model", "tiny:llama"], ["check"]):
        outcome = attnplug(*command)
        assert outcome.code == 1
        assert outcome.out == ""
        assert "odd-dist 1.2.3" in outcome.err and "no driver" in outcome.err


@pytest.mark.parametrize("arguments", [["backends", "--json"], ["explain", "--model", "tiny:llama", "--json"]])
@pytest.mark.parametrize(
    ("on_import", "in_check"),
    [("print('hello')", "None"), ("import os; os.write(1, b'hello')", "None"), ("", "print('hello')")],
    ids=["on import", "on import, below Python", "in its check"],
)
def test_a_plugin_that_prints_does_not_spoil_json(
    package: Package, tmp_path: Path, arguments: list[str], on_import: str, in_check: str
) -> None:
    """Below Python too: what prints on import is mostly a C library."""
    fields = f'{{"check": lambda problem, role: {in_check} or []}}'
    package("noisy", on_import + PLUGIN.format(name="noisy", capabilities="{}", fields=fields))
    outcome = in_own_process(*arguments, path=tmp_path)
    assert outcome.json
    assert "hello" in outcome.err


def test_a_plugin_s_odd_values_do_not_spoil_json(attnplug: Attnplug, package: Package) -> None:
    """D2: one plugin's set must not take the report with it."""
    package("odd", fields='{"check": lambda problem, role: [Refusal("own", "own", value={1, 2}, allowed=object())]}')
    assert len(attnplug("backends", "--json").json) == 2
    assert attnplug("explain", "--model", "tiny:llama", "--json").json["prefill"]["chosen"] == "torch_native"


def test_a_plugin_s_check_cannot_end_the_command(attnplug: Attnplug, package: Package) -> None:
    """D2"""
    package("odd", fields='{"check": lambda problem, role: exit(0)}')
    assert "torch_native" in attnplug("backends").out


def test_damaged_metadata_of_another_installation_disturbs_nobody(package: Package, tmp_path: Path) -> None:
    """D2: an interrupted pip leaves such a folder behind."""
    package("fast")
    damaged = tmp_path / "gone_dist-1.0.dist-info"
    damaged.mkdir()
    (damaged / "entry_points.txt").write_text("[attnplug.plugins]\ngone = plugin_module_gone\n")
    for command in (["backends"], ["explain", "--model", "tiny:llama"]):
        outcome = in_own_process(*command, path=tmp_path)
        assert outcome.code == 0, outcome.err
        assert "fast-dist" in outcome.out


def test_a_file_of_entry_points_that_cannot_be_read_is_named(package: Package, tmp_path: Path) -> None:
    """Python itself gives up there; a person must learn that it is not attnplug, and which file."""
    package("fast")
    (tmp_path / "fast_dist-1.2.3.dist-info" / "entry_points.txt").write_text("[attnplug.plugins]\nno equals sign\n")
    outcome = in_own_process("backends", "--all", path=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert "fast" in outcome.out and "its entry points" in outcome.out


# ---- explain ----


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v2", "deepseek_v3"])
def test_explain_serves_tiny_models_of_full_attention(attnplug: Attnplug, name: str) -> None:
    outcome = attnplug("explain", "--model", f"tiny:{name}")
    assert (outcome.code, outcome.err) == (0, "")
    assert "prefill: torch_native" in outcome.out and "decode: torch_native" in outcome.out


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "qwen3_5_text", "minimax", "mamba2", "nemotron_h"])
def test_explain_says_where_nothing_serves_linear_layers(attnplug: Attnplug, name: str) -> None:
    """D3"""
    outcome = attnplug("explain", "--model", f"tiny:{name}", "--json")
    assert outcome.code == 1
    assert outcome.json["linear"]["chosen"] is None
    codes = {refusal["code"] for refusal in outcome.json["linear"]["candidates"][0]["refusals"]}
    assert codes == {"role", "kind"}


def test_explain_reads_a_file_and_its_folder(attnplug: Attnplug, tmp_path: Path) -> None:
    path = config_file(tmp_path)
    by_file, by_folder = attnplug("explain", "--model", str(path)), attnplug("explain", "--model", str(tmp_path))
    assert by_file == by_folder
    assert by_file.code == 0


def test_explain_as_json_has_a_fixed_shape(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", capabilities='{"devices": ["cuda"], "min_sm": 90, "head_dims": [(128, 128)]}')
    outcome = attnplug("explain", "--model", "tiny:llama", "--device", "cpu", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert set(outcome.json) == {"prefill", "decode"}
    for role in outcome.json.values():
        assert role["chosen"] == "torch_native"
        candidates = {candidate["name"]: candidate["refusals"] for candidate in role["candidates"]}
        assert candidates["torch_native"] == []
        assert {refusal["code"] for refusal in candidates["fast"]} == {"device", "head_dim"}
        for refusal in candidates["fast"]:
            assert set(refusal) == {"code", "message", "value", "allowed", "option"}


def test_explain_works_for_hardware_that_is_not_here(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("blackwell", capabilities='{"devices": ["cuda"], "min_sm": 100}', fields='{"preference": 100}')
    for arguments in (["--sm", "100"], ["--device", "cuda", "--sm", "100"]):
        outcome = attnplug("explain", "--model", "tiny:llama", *arguments, "--json")
        assert outcome.code == 0
        assert outcome.json["prefill"]["chosen"] == "blackwell"
    older = attnplug("explain", "--model", "tiny:llama", "--sm", "90", "--json").json["prefill"]
    assert older["chosen"] == "torch_native"


def test_explain_takes_a_backend_for_each_role(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", fields='{"preference": -1}')
    found = attnplug("explain", "--model", "tiny:llama", "--decode-attention-backend", "fast", "--json").json
    assert {role: choice["chosen"] for role, choice in found.items()} == {"prefill": "torch_native", "decode": "fast"}


def test_a_backend_asked_for_and_refused_is_exit_code_1_with_every_reason(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", capabilities='{"devices": ["cuda"], "min_sm": 90, "dtypes": ["bfloat16"]}')
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "fast")
    assert outcome.code == 1
    for text in ("fast was asked for and cannot serve", "--device", "--dtype", "--kv-dtype", "fast-dist 1.2.3"):
        assert text in outcome.out
    assert "torch_native (attnplug 0.1.0): usable" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["--device", "cuda"], ["--device cuda", "--sm"]),
        (["--device", "tpu"], ["'tpu'", "cpu, cuda"]),
        (["--device", ""], ["''", "cpu, cuda"]),
        (["--device", "cpu", "--sm", "90"], ["--sm 90", "--device"]),
        (["--sm", "9"], ["--sm 9", "90"]),
        (["--sm", "-1"], ["--sm -1"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "bfloat16"]),
        (["--dtype", ""], ["--dtype", "''", "bfloat16"]),
        (["--kv-dtype", "int4"], ["--kv-dtype", "'int4'", "float8_e4m3fn"]),
        (["--page-size", "0"], ["--page-size 0"]),
        (["--page-size", "-16"], ["--page-size -16"]),
        (["--speculative-tokens", "-1"], ["--speculative-tokens -1"]),
        (["--tensor-parallel", "0"], ["--tensor-parallel 0"]),
        (["--cuda-graph", "sometimes"], ["--cuda-graph", "'sometimes'", "always"]),
        (["--attention-backend", "torch_nativ"], ["'torch_nativ'", "did you mean torch_native?"]),
        (["--attention-backend", ""], ["''", "torch_native"]),
        (["--attention-backend", "é✨"], ["'é✨'", "torch_native"]),
        (["--decode-attention-backend", "x" * 3000], ["xxx", "torch_native"]),
        (["--linear-attention-backend", "torch_native"], ["--linear-attention-backend", "no linear"]),
        (["--draft-attention-backend", "torch_native"], ["--draft-attention-backend", "--speculative-tokens"]),
        (["--backend-option", "torch_native.x=1"], ["torch_native.x", "no options"]),
        (["--backend-option", "="], ["'='", "NAME.KEY=VALUE"]),
        (["--backend-option", ""], ["''", "NAME.KEY=VALUE"]),
        (["--backend-option", "nosuch.x=1"], ["'nosuch'", "torch_native"]),
        (["--backend-option", "a.x=1", "--backend-option", "a.x=2"], ["a.x", "twice"]),
    ],
)
def test_a_wrong_option_is_exit_code_2_with_value_and_allowed(
    attnplug: Attnplug, arguments: list[str], needs: list[str]
) -> None:
    """D3"""
    outcome = attnplug("explain", "--model", "tiny:llama", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    for text in needs:
        assert text in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--tensor-parallel", "3"], "tensor_parallel"),
        (["--speculative-tokens", "1000"], "speculation"),
        (["--cuda-graph", "decode"], "cuda_graph"),
        (["--dtype", "fp8"], "dtype"),
    ],
)
def test_what_nothing_serves_is_exit_code_1_with_the_code(attnplug: Attnplug, arguments: list[str], code: str) -> None:
    """D3"""
    outcome = attnplug("explain", "--model", "tiny:llama", *arguments, "--json")
    assert outcome.code == 1
    refusals = outcome.json["prefill"]["candidates"][0]["refusals"]
    assert [refusal["code"] for refusal in refusals] == [code]
    assert refusals[0]["option"] == arguments[0]


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        (b"", ["not JSON", "line 1"]),
        (b"{", ["not JSON"]),
        (b"hidden_size: 64", ["not JSON"]),
        (b"[1, 2]", ["not an object"]),
        (bytes(range(256)), ["not UTF-8"]),
        (b"{}", ["'model_type'", "missing"]),
        (b'{"model_type": "llama"}', ["missing"]),
        (b'{"model_type": 7}', ["'model_type'", "7"]),
    ],
)
def test_a_config_that_cannot_be_read_is_exit_code_2_with_the_file_and_the_key(
    attnplug: Attnplug, tmp_path: Path, content: bytes, needs: list[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    outcome = attnplug("explain", "--model", str(path))
    assert outcome.code == 2
    assert outcome.out == ""
    for text in (str(path), *needs):
        assert text in outcome.err


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_attention_heads"])
def test_a_key_that_is_missing_is_named(attnplug: Attnplug, tmp_path: Path, key: str) -> None:
    """D3: a latent-attention model without its latent width must not be explained as one of plain heads."""
    config = {name: value for name, value in TINY_CONFIGS["deepseek_v3"].items() if name != key}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    outcome = attnplug("explain", "--model", str(path))
    assert outcome.code == 2
    assert f"{key!r} is missing" in outcome.err


@pytest.mark.parametrize("reference", ["", "nosuch/config.json", "tiny:", "tiny:lama", "a\nb", "é✨", "x" * 5000, "\0"])
def test_a_model_that_does_not_exist_is_exit_code_2(attnplug: Attnplug, reference: str) -> None:
    outcome = attnplug("explain", "--model", reference)
    assert outcome.code == 2
    assert "tiny:llama" in outcome.err


def test_a_folder_without_config_says_what_it_lacks(attnplug: Attnplug, tmp_path: Path) -> None:
    outcome = attnplug("explain", "--model", str(tmp_path))
    assert outcome.code == 2
    assert "config.json" in outcome.err and str(tmp_path) in outcome.err


def test_a_data_type_of_the_model_that_is_unknown_asks_for_one(attnplug: Attnplug, tmp_path: Path) -> None:
    path = config_file(tmp_path, dtype="int8")
    outcome = attnplug("explain", "--model", str(path))
    assert outcome.code == 2
    assert "'int8'" in outcome.err and "--dtype" in outcome.err
    assert attnplug("explain", "--model", str(path), "--dtype", "float32").code == 0


def test_a_folder_whose_name_is_no_text_can_be_explained(tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"odd\xff")
    os.mkdir(folder)
    config_file(Path(os.fsdecode(folder)))
    outcome = in_own_process("explain", "--model", os.fsdecode(folder), PYTHONIOENCODING="utf-8:strict")
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err


def test_a_broken_plugin_is_a_warning_that_leaves_stdout_clean(attnplug: Attnplug, package: Package) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    outcome = attnplug("explain", "--model", "tiny:llama", "--json")
    assert outcome.code == 0
    assert set(outcome.json) == {"prefill", "decode"}
    for text in ("warning", "odd-dist 1.2.3", "no driver"):
        assert text in outcome.err


def test_an_unknown_backend_beside_a_broken_plugin_warns_of_it_too(attnplug: Attnplug, package: Package) -> None:
    """D2: a backend that is missing must not look like a wrong name; it need not be called as its entry point."""
    package("odd", "raise RuntimeError('no driver')")
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "odd_mla")
    assert outcome.code == 2
    assert "no driver" in outcome.err


def test_asking_for_a_broken_backend_is_exit_code_1(attnplug: Attnplug, package: Package) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "odd")
    assert outcome.code == 1
    assert "installed but broken" in outcome.err and "no driver" in outcome.err


def test_an_option_of_a_backend_reaches_its_class(attnplug: Attnplug, package: Package) -> None:
    package("fast", OPTIONS + PLUGIN.format(name="fast", capabilities="{}", fields='{"options": Options}'))
    base = ["explain", "--model", "tiny:llama", "--attention-backend", "fast", "--backend-option"]
    assert attnplug(*base, "fast.split=2").code == 0
    for wrong in ("fast.splt=2", "fast.split=two"):
        outcome = attnplug(*base, wrong)
        assert outcome.code == 2
        assert "split: int = 1" in outcome.err


def test_an_option_for_a_backend_that_is_not_chosen_is_exit_code_2(attnplug: Attnplug, package: Package) -> None:
    package(
        "slow", OPTIONS + PLUGIN.format(name="slow", capabilities="{}", fields='{"options": Options, "preference": -1}')
    )
    outcome = attnplug("explain", "--model", "tiny:llama", "--backend-option", "slow.split=2")
    assert outcome.code == 2
    assert "slow.split" in outcome.err and "--attention-backend slow" in outcome.err
