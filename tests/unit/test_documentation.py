"""Pages of the documentation: links, and the extras and files that they name; their length."""

from __future__ import annotations

import re
import tomllib

import pytest

from support.pages import ROOT

EXTRAS = re.compile(r"(?:fumehood|CHECKOUT)\[([\w,-]+)\]|[Nn]eeds the extra `([\w-]+)`")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def test_relative_links_between_pages_resolve() -> None:
    checked = 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
                checked += 1
    assert checked > 20


def test_names_of_extras_are_normalized_and_pages_name_existing_extras() -> None:
    """pip 23 compares a normalized name with the unnormalized one in the package metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    assert known == {re.sub(r"[-_.]+", "-", name).lower() for name in known}
    named: set[str] = set()
    for pattern in ("*.md", "docs/**/*.md", "engine/**/*.py"):
        for page in ROOT.glob(pattern):
            for words in EXTRAS.findall(page.read_text(encoding="utf-8")):
                extras = set("".join(words).split(","))
                assert extras <= known, f"{page.relative_to(ROOT)}: {extras - known}"
                named |= extras
    assert named == known


CODE = re.compile(r"`((?:[\w-]+/)+|[\w/.-]+\.py)`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_pages_for_contributors_name_existing_files(page: str) -> None:
    """A path may begin anywhere, because a list often continues in the folder of its first file."""
    there = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[a-z]*/**/*.py")]
    there += [f"/{path.relative_to(ROOT)}/" for path in ROOT.glob("[a-z]*/**/")]
    named = CODE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 30
    missing = [path for path in named if not any(name.endswith(f"/{path}") for name in there)]
    assert not missing


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_pages_for_contributors_have_every_package(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "engine" / "fumehood").glob("*/__init__.py")]
    assert len(packages) > 20
    assert [name for name in packages if f"{name}/" not in text] == []


def test_architecture_page_is_short() -> None:
    """Lists of files belong to docs/reference/files.md, which is generated."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 2000


def test_table_of_changes_is_short() -> None:
    """A row is a kind of change. What one place has is in docs/reference/files.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Where does my change go?")[1].split("\n\n|")[1].split("\n\n")[0]
    assert 10 < len(table.splitlines()) - 2 <= 15


def test_changes_are_named_by_kind_and_are_items_of_a_list() -> None:
    folder = ROOT / "docs" / "changes"
    kinds = re.compile(r"[a-z0-9-]+\.(security|added|changed|fixed|removed)\.md")
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    del files["README.md"]
    assert [name for name in files if not kinds.fullmatch(name)] == []
    assert [name for name, text in files.items() if not re.match(r"- \S", text)] == []


def test_changelog_has_a_page_for_each_version() -> None:
    """Later changes are files in docs/changes, until a release puts them here."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *others = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert first.split()[0] == project["version"]
    assert max(len(section.split()) for section in [first, *others]) <= 900
