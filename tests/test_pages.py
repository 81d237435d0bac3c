"""Words, lists, links and commands of the documentation's pages."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from attnplug import ExtendPath, Feature, ForwardExtras, GraphLevel, RaggedCall, Role, UsageError
from attnplug.cli.app import parse
from attnplug.declare.errors import RefusalCode
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.host import (
    load_registry,
)
from documentation import DOCUMENTS, FENCED, GUIDE, README, ROOT, blocks, files


def test_commands_of_every_page_have_these_options() -> None:
    """Lines of console blocks that begin with attnplug are parsed, not run."""
    wrong = []
    for page in CURRENT:
        lines = [line for block in blocks(page.read_text(), "console") for line in block.splitlines()]
        for line in filter(lambda line: line.startswith("$ attnplug "), lines):
            try:
                parse(shlex.split(line.partition(" > ")[0], comments=True)[2:])
            except (SystemExit, UsageError) as error:
                if getattr(error, "code", 1):  # not --help or --version
                    wrong.append(f"{page.relative_to(ROOT)}: {line}")
    assert wrong == []


def test_code_from_files_is_the_example_packages() -> None:
    shown = {name for page in DOCUMENTS for name in re.findall(r"<!-- generated: file (\S+) -->", page.read_text())}
    package = ROOT / "examples" / "acme_attention" / "src" / "acme_attention"
    assert {ROOT / name for name in shown} == {*package.glob("*.py")} - {package / "__init__.py", package / "plugin.py"}


def test_every_refusal_code_has_a_cause_and_a_remedy() -> None:
    page = (ROOT / "docs" / "refusals.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", page.split("Plugins add codes")[0], re.MULTILINE)
    assert listed == [code.value for code in RefusalCode]
    sources = [path.read_text() for folder in ("plugins", "bridges") for path in (ROOT / folder).glob("*/src/**/*.py")]
    own = {code for text in sources for code in re.findall(r'Refusal\(\s*"(\w+)"', text)}
    assert own - {*listed} == {*re.findall(r"^\| `(\w+)` \|", page.split("Plugins add codes")[1], re.MULTILINE)}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("claims", [role.name for role in Role]),
        ("claims", [feature.name for feature in Feature]),
        ("claims", [level.name for level in GraphLevel]),
        ("claims", list(ForwardExtras.__slots__)),
        ("mla", [path.name for path in ExtendPath]),
        ("mla", [field.name for field in dataclasses.fields(RaggedCall)]),
    ],
    ids=["Role", "Feature", "GraphLevel", "ForwardExtras", "ExtendPath", "RaggedCall"],
)
def test_the_guide_explains_every_value(page: str, names: list[str]) -> None:
    text = (ROOT / "docs" / "guide" / f"{page}.md").read_text()
    assert [name for name in names if f"`{name}`" not in text and f".{name}`" not in text] == []


def test_every_measurement_has_its_command() -> None:
    """Every result is in the list of commands, whose scripts exist. Pages name no result that is not in it."""
    pages = [ROOT / "docs" / f"{name}.md" for name in ("measurements", "hosts", "auto", "sparse", "speculation")]
    rows = re.findall(r"^\| (`\w+\.json`.*?) \| (.+) \|$", pages[0].read_text(), re.MULTILINE)
    listed = [name for results, _ in rows for name in re.findall(r"`(\w+\.json)`", results)]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "benchmarks" / "results").iterdir())
    pages += ROOT.glob("*/*/README.md")
    named = {name for page in pages for name in re.findall(r"(\w+_(?:h200|arm|vllm|cpu)\.json)`", page.read_text())}
    read = {f"{name}.json" for name in re.findall(r'_read\("(\w+)"\)', (ROOT / "docs" / "measurements.py").read_text())}
    assert named | read <= {*listed}
    for results, command in rows:
        scripts = re.findall(r"`(?:python|bash) (benchmarks/\w+\.\w+)", command)
        assert scripts or re.search(r"`(?:make|attnplug) ", command), f"{results} has no command"
        assert [script for script in scripts if not (ROOT / script).exists()] == [], results


def test_reports_are_dated_and_cover_every_backend() -> None:
    """E4: on a CPU with the present contract. Reports of a GPU that name no kit are marked in the page's table."""
    reports = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs" / "conformance").glob("*.json")}
    ours = {name for name, each in load_registry().backends.items() if each.source.distribution.startswith("attnplug")}
    assert (
        {f"{name}-cpu" for name in ours}
        <= reports.keys()
        <= {f"{name}-{on}" for name in ours for on in ("cpu", "cuda")}
    )
    for name, report in reports.items():
        named = {"kit", "contract", "version", "digest"} & report.keys()
        if name.endswith("-cpu"):
            assert len(named) == 4 and report["contract"] == CONTRACT_VERSION, f"{name}: run python docs/reports.py"
        assert len(named) in (0, 4) and report["conforms"] and report["device"] == name.rpartition("-")[2]
    table = (ROOT / "docs" / "conformance.md").read_text().split("table of conformance -->")[1].split("<!-- end")[0]
    assert table.count("| not recorded |") == sum("kit" not in report for report in reports.values())


READINGS = {
    "guide": re.findall(
        r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().split("Write a backend:")[1].split("conformance.md")[0]
    ),
    "hosting": ["hosting.md"],
    "architecture": ["architecture.md"],
    "serve": ["getting-started/serve.md"],
}
"""Pages that are read one after the other."""
TERMS = {
    **{"absorbed": "absorbed", "batch": "batch(?:es)?", "capability": "capabilit(?:y|ies)", "prefix": "prefix(?:es)?"},
    **{"geometry": "geometr(?:y|ies)", "lse": "log-sum-exp", "page-table": "page tables?"},
    **{"slot-mapping": "slot mappings?", "bridge": "bridges?", "chunk": "chunks?", "coordinator": "coordinators?"},
    **{"extra": "extras?", "feature": "features?", "host": "hosts?", "lane": "lanes?", "layout": "layouts?"},
    **{"page": "pages?", "plugin": "plugins?", "pool": "pools?", "refusal": "refusals?", "role": "roles?"},
    **{"row": "rows?", "sink": "sinks?", "slot": "slots?", "tree": "trees?", "workspace": "workspaces?"},
    **{"wrapper": "wrappers?"},
}
"""Nouns of the glossary that mean nothing else on these pages. Others are also verbs, or common words."""


def first_use(text: str, term: str) -> re.Match[str] | None:
    """Find a term in the prose of a page, and the target of its link."""
    text = re.sub(r"^(?:#|\||<!--|    ).*$", "", FENCED.sub("", text), flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    if term in ("page", "slot"):
        text = re.sub(r"page (?:tables?|sizes?|allocator)|slot mappings?", "", text, flags=re.IGNORECASE)
    text = re.sub(r"\]\((?!\S*glossary)[^)]*\)", "]", text)
    links = r"(?:[^\[\]\n]*\]\(\S*glossary\.md#(?P<target>[\w-]+)\))?"
    return re.search(rf"(?<![\w/.#-])(?:{TERMS[term]})(?![\w/-]){links}", text, re.IGNORECASE)


@pytest.mark.parametrize("reading", READINGS)
def test_the_glossary_is_linked_from_first_uses(reading: str) -> None:
    missing = []
    for term in TERMS:
        uses = ((page, first_use((ROOT / "docs" / page).read_text(), term)) for page in READINGS[reading])
        page, use = next(((page, use) for page, use in uses if use), ("", None))
        if use is not None and use["target"] != term:
            missing.append(f"{page}: {term}")
    assert missing == []


def test_every_term_of_the_glossary_is_linked() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    terms = re.findall(r'<a id="([\w-]+)">', (ROOT / "docs" / "glossary.md").read_text())
    assert TERMS.keys() < {*terms} and [term for term in terms if f"glossary.md#{term})" not in pages] == []


def paragraphs(text: str) -> list[str]:
    """Paragraphs and items of lists, without tables, headings and code."""
    parts = [part for part in re.split(r"\n\s*\n", FENCED.sub("\n\n", text)) if not part.startswith(("|", "#", "    "))]
    return [" ".join(item.split()) for part in parts for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", part)]


def test_no_paragraph_has_more_than_80_words() -> None:
    long = {
        f"{page.relative_to(ROOT)}: {paragraph[:60]}"
        for page in DOCUMENTS
        for paragraph in paragraphs(page.read_text())
        if len(re.sub(r"\]\([^)]*\)", "]", paragraph).split()) > 80
    }
    assert not long


def test_the_first_screen_of_the_guide_is_a_whole_plugin():
    """All of it comes before the first heading below the title."""
    first = GUIDE.split("\n## ")[0]
    assert len(re.findall(r"```(?:python|toml)\n", first)) == 3
    assert len(files(first.split("Install it")[0])) == 4


def test_the_first_screen_of_the_guide_stays_short():
    """90 lines was the draft's, before backends stood on a base."""
    assert len(GUIDE.split("Install it")[0].splitlines()) <= 90


CODE_SPAN = re.compile(r"`([^`\n]+)`")
OTHERS = {
    *("_capture_cuda_graph", "_k_scale", "_replay_cuda_graph", "_v_scale", "custom_mask", "disable_compile"),
    *("flashinfer_mla_disable_ragged", "supports_", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "nvcc"),
    *("load_setuptools_entrypoints", "not_supported_reasons", "supports_head_size", "forward_metadata"),
    *("MyOptions", "arcee", "backnd", "seq_len", "CLONE", "auto_", "_h200", "org", "anything"),
    *("--index-url", "--gpu-memory-utilization", "my_int4", "trust_remote_code"),
}
"""Names of other projects, and of the examples."""
CURRENT = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]
"""Pages about the code as it is. The changelog also has names that are gone."""


def spans(page: Path) -> list[str]:
    """Texts between backticks on a page, without code blocks."""
    return CODE_SPAN.findall(FENCED.sub("", page.read_text()))


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every identifier and option in the code, and the parts of the names of its files."""
    folders = (
        "benchmarks",
        "bridges",
        "conformance",
        "core",
        "docs",
        "engine",
        "examples",
        "plugins",
        "testing",
        "tune",
    )
    files = [
        path for folder in (*folders, "tests") for path in (ROOT / folder).rglob("*") if path.name != "test_pages.py"
    ]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".pyi", ".toml")]
    texts += [(ROOT / name).read_text() for name in ("Makefile", "release.py")]
    texts += [path.name for path in files]
    return {word for text in texts for word in re.findall(r"--[a-z][a-z-]*|[A-Za-z_]\w*", text)}


def test_names_in_the_documentation_are_in_the_code(words: set[str]) -> None:
    known = words | OTHERS
    missing = [
        f"{page.relative_to(ROOT)}: {word} of `{span}`"
        for page in CURRENT
        for span in spans(page)
        for word in re.findall(r"--[a-z][a-z-]*|(?<![\w-])[A-Za-z_]\w*", span)
        if word not in known
    ]
    assert missing == []


def test_paths_in_the_documentation_can_be_imported() -> None:
    """``attnplug.kernels.merge_partial``, ``Geometry.tree``: a module, a name in one, or a public class's attribute."""
    public = [importlib.import_module(name) for name in MODULES]
    classes = {name: getattr(module, name) for module in public for name in module.__all__}
    missing = []
    for page in CURRENT:
        for span in spans(page):
            for path in re.findall(r"(?<![\w./])attnplug(?:_\w+)?(?:\.\w+)+(?![\w/]|\.py)", span):
                module, _, name = path.rpartition(".")
                if path not in GROUPS and not is_module(path) and not hasattr(importlib.import_module(module), name):
                    missing.append(f"{page.relative_to(ROOT)}: {path}")
            for owner, name in re.findall(r"(?<![\w.])([A-Z]\w+)\.(\w+)", span):
                kind = classes.get(owner)
                fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
                if kind is not None and not hasattr(kind, name) and name not in fields:
                    missing.append(f"{page.relative_to(ROOT)}: {owner}.{name}")
    assert missing == []


MODULES = ("attnplug", *(f"attnplug.{name}" for name in ("host", "kernels", "linear", "sparse", "tables")))

GROUPS = {f"attnplug.{name}" for name in ("commands", "hosts", "plugins", "raw")}
"""Entry-point groups."""


def is_module(path: str) -> bool:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        return False
    return True


def test_no_placeholder_is_left():
    for page in DOCUMENTS:
        assert not re.findall(r"MAKE_RUN|TODO|FIXME|XXX", page.read_text()), page


def anchors(page: Path) -> set[str]:
    """The headings and ids of a page, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    ids = re.findall(r'<a id="([\w-]+)">', page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | {*ids}


def test_links_between_pages_lead_somewhere():
    for page in DOCUMENTS:
        for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page if not path else page.parent / path
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_long_output_is_in_docs():
    """Output that a reader scrolls past does not belong on the project's first page."""
    assert all(len(block.splitlines()) <= 15 for block in blocks(README, "console"))


def test_samples_that_are_not_generated_know_every_backend():
    """Their times are of one run; which backends there are is of this repository."""
    names = re.findall(r"^\| `(\w+)` \| `attnplug", README, re.MULTILINE)
    tour = (ROOT / "docs" / "tour.md").read_text()
    (sample,) = re.findall(r"<!-- sample: make run -->\n(.*?)<!-- end", tour, re.DOTALL)
    assert set(re.findall(r"(\d+) refused", sample)) <= {str(len(names) - 1)}
