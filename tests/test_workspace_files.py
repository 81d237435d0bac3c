"""Properties that hold across the packages of the workspace."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PACKAGES = {
    path.parent.relative_to(ROOT).as_posix(): tomllib.loads(path.read_text())["project"]
    for pattern in ("*", "plugins/*", "bridges/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
}
PINNED = {
    Requirement(line).name.lower().replace("_", "-")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
VERSION = Version(PACKAGES["core"]["version"])


def test_all_packages_share_one_version():
    assert len({project["version"] for project in PACKAGES.values()}) == 1


def test_the_changelog_knows_the_version():
    version = PACKAGES["core"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_makefile_installs_every_package():
    (line,) = re.findall(r"^PACKAGES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(line.split()) == set(PACKAGES)


def test_published_requirements_are_ranges_and_ci_pins_each():
    for name, project in PACKAGES.items():
        plotting = project.get("optional-dependencies", {}).get("plot", [])  # CI installs no other extra
        for text in (*project["dependencies"], *plotting):
            requirement = Requirement(text)
            if not requirement.name.startswith("attnplug"):
                assert not any(part.operator in ("==", "===", "~=") for part in requirement.specifier), (
                    f"{name}: {text}"
                )
                assert requirement.name.lower() in PINNED, f"{name}: {text} is not in constraints.txt"


def test_pages_that_install_from_pypi_also_install_from_a_clone():
    """No package is released yet. A command must name every package of ours that the named ones require."""
    names = {project["name"]: name for name, project in PACKAGES.items()}
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *(ROOT / name / "README.md" for name in PACKAGES)]
    for page in pages:
        text = page.read_text() if page.exists() else ""
        commands = re.findall(r"pip install ((?:(?:-e )?'?(?:\./|CLONE/)[\w/.\[\]-]+'?\s+)+)", text.replace("`", " "))
        assert commands or not re.search(r"pip install '?attnplug", text), f"{page} has no command for a clone"
        for command in commands:
            named = set(re.findall(r"(?:\./|CLONE/)([\w/]+)", command))
            if named <= PACKAGES.keys():  # not a user's own package
                needed = {names[r] for n in named for r in map(_name, PACKAGES[n]["dependencies"]) if r in names}
                assert needed <= named or "--no-deps" in text, f"{page}: {command} lacks {needed - named}"


def _name(requirement: str) -> str:
    return Requirement(requirement).name


def test_every_package_carries_the_license():
    for name in PACKAGES:
        assert (ROOT / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_package_is_typed():
    for name in PACKAGES:
        assert list((ROOT / name).glob("src/*/py.typed")), name


def test_every_package_says_where_it_comes_from():
    """One home for all, and every page below it is a file or folder of this repository."""
    home = PACKAGES["core"]["urls"]["Homepage"]
    for name, project in PACKAGES.items():
        below = {key: url.removeprefix(home) for key, url in project["urls"].items()}
        assert below.keys() == {"Homepage", "Documentation", "Source", "Changelog"}, name
        assert below["Homepage"] == "" and below["Source"] == f"/tree/main/{name}", name
        for path in set(below.values()) - {""}:
            assert (ROOT / re.sub(r"^/(tree|blob)/main/", "", path)).exists(), f"{name}: {path}"


def test_links_of_a_packages_readme_hold_outside_of_the_repository():
    """It is the page of the package on an index, where relative links do not work."""
    home = PACKAGES["core"]["urls"]["Homepage"]
    for name in PACKAGES:
        for link in re.findall(r"\]\((.+?)\)", (ROOT / name / "README.md").read_text()):
            assert link.startswith("https://"), f"{name}: {link}"
            if link.startswith(f"{home}/"):
                path, _, anchor = re.sub(r"^/(tree|blob)/main/", "", link.removeprefix(home)).partition("#")
                assert (ROOT / path).exists(), f"{name}: {link}"
                headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert not anchor or anchor in anchors, f"{name}: {link}"


def test_relative_links_of_the_documentation_lead_to_files():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^):#]+)[^):]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_packages_depend_on_the_contract_version_that_their_specs_declare():
    """D4: pip and the contract gate agree. Packages released together with core pin each other's exact version."""
    requirement_range = runpy.run_path(str(ROOT / "release.py"))["requirement_range"]
    together = {PACKAGES[name]["name"] for name in ("core", "engine", "conformance", "testing", "tune")}
    for name, project in PACKAGES.items():
        for text in project["dependencies"]:
            requirement = Requirement(text)
            if requirement.name.startswith("attnplug"):
                exact = {project["name"], requirement.name} <= together
                wanted = f"=={VERSION}" if exact else requirement_range(VERSION)
                assert requirement.specifier == SpecifierSet(wanted), f"{name}: {text}"


def test_specs_declare_the_contract_as_a_literal():
    """D4: a spec that declares the installed version, whichever that is, could never be refused."""
    examples = (*ROOT.glob("examples/*/src/*/plugin.py"), ROOT / "examples/write_kernels.py")
    plugins = (*ROOT.glob("plugins/*/src/*/plugin.py"), ROOT / "core/src/attnplug/torch_native/plugin.py")
    for path in (*plugins, *examples):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        declared = [word.value for call in calls for word in call.keywords if word.arg == "contract"]
        specs = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "BackendSpec"]
        assert len(declared) == len(specs) and all(isinstance(value, ast.Constant) for value in declared), path
