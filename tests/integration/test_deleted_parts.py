"""Each part is deleted from a copy of the engine, and what is left is imported.

Without a part that is marked `deletable` every other module can be imported, and the kernel keeps
its contract (`tests/contract`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

from conftest import AVAILABLE, CLEAN_ENVIRONMENT
from support.parts import PACKAGE, Code, Line, Part, module_of, read_parts
from support.unplugged import Importer, Tree, Unfit, copy_of_checkout, importing

PARTS = read_parts()
OF_KERNEL = f"{PACKAGE}/core/errors.py"


@cache
def code() -> Code:
    return Code()


@cache
def contract() -> list[str]:
    """The arguments of pytest for what this host can try of the contract."""
    return ["-x", "-q", *([] if AVAILABLE["landlock"]() else ["-k", "not jailed"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy with all parts."""
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def importer(whole: Tree) -> Iterator[Importer]:
    with importing(whole) as running:
        yield running


@pytest.fixture
def tree(whole: Tree, tmp_path: Path) -> Tree:
    """A copy that a test may change."""
    return whole.copy(tmp_path / "checkout")


def test_all_modules_can_be_imported_if_nothing_is_deleted(tree: Tree, importer: Importer) -> None:
    nothing = PARTS["console"].model_copy(update={"files": ()})
    modules = code().modules_without(nothing)
    assert len(modules) > 300
    assert importer.try_out(tree, modules).broken == {}


@pytest.mark.parametrize("name", PARTS)
def test_rest_of_the_engine_works_without_a_part(name: str, tree: Tree, importer: Importer) -> None:
    part = PARTS[name]
    tree.delete(part)
    modules = code().modules_without(part)
    ending = importer.try_out(tree, modules, contract=contract() if part.deletable else None)
    importing = {module_of(file) for file in code().count(part).importing}
    why = "\n".join(f"{module}: {error}" for module, error in ending.broken.items())
    # What was counted is what breaks, and nothing else does.
    assert ending.broken.keys() >= importing.intersection(modules)
    assert importing or not ending.broken, why
    assert not (part.deletable and ending.broken), why
    assert ending.contract is None, f"The kernel fails without {name}:\n{ending.contract}"


NODES = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("file", "variables", "arguments", "words"),
    [
        (f"[cluster]\naddress = '{NODES}'", {}, [], "cluster: there is no such key in "),
        (
            "",
            {"FUMEHOOD_CLUSTER__ADDRESS": NODES},
            [],
            "cluster: there is no such key (variable FUMEHOOD_CLUSTER__ADDRESS)",
        ),
        (
            "",
            {"FUMEHOOD_CLUSTER": json.dumps({"address": NODES})},
            [],
            "cluster: there is no such key (variable FUMEHOOD_CLUSTER)",
        ),
        ("", {}, ["--cluster", NODES], "No such option: --cluster"),
    ],
    ids=["file", "variable", "json", "option"],
)
def test_configuration_that_names_nodes_is_refused_without_the_cluster(
    file: str, variables: dict[str, str], arguments: list[str], words: str, tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["cluster"])
    (home / "config.toml").write_text(file)
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
        "FUMEHOOD_CONFIG": str(home / "config.toml"), **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", "fumehood.cli.main", "serve", *arguments]
    refused = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr
    assert not (home / "state.db").exists()


# -- controls ---------------------------------------------------------------------------------


def test_kernel_that_imports_a_deletable_part_breaks(tree: Tree, importer: Importer) -> None:
    part = PARTS["console"]
    tree.append(OF_KERNEL, "\nimport fumehood.web\n")
    tree.delete(part)
    ending = importer.try_out(tree, code().modules_without(part), contract=contract())
    assert ending.broken["fumehood.core.errors"] == "there is no fumehood.web"
    assert ending.contract is None  # it was not tried


def test_contract_fails_if_the_kernel_needs_a_deleted_part_when_it_runs(
    tree: Tree, importer: Importer
) -> None:
    part = PARTS["console"]
    late = "\n\ndef discover(*found, **settings):\n    import fumehood.web.server\n"
    tree.append(f"{PACKAGE}/registry/discover.py", late)
    tree.delete(part)
    ending = importer.try_out(tree, code().modules_without(part), contract=contract())
    assert ending.broken == {}
    assert ending.contract is not None
    assert "No module named 'fumehood.web'" in ending.contract


def part_with(*lines: Line) -> Part:
    return PARTS["console"].model_copy(update={"lines": lines})


def test_copy_offers_the_entry_points_that_are_left(whole: Tree, tree: Tree) -> None:
    def offered(copy: Tree) -> set[str]:
        (own,) = distributions(path=copy.import_path)
        return {point.name for point in own.entry_points if point.group == "fumehood.tools"}

    text = 'fetch_url = "fumehood_tools.fetch_url:fetch_url"'
    tree.delete(part_with(Line(file="pyproject.toml", text=text)))
    assert offered(whole) - offered(tree) == {"fetch_url"}
    assert offered(tree) >= {"calculator", "run_python"}


@pytest.mark.parametrize("text", ["fetch_url = nothing", ""])
def test_line_that_is_not_there_exactly_once_is_a_fault(tree: Tree, text: str) -> None:
    with pytest.raises(Unfit, match="and not once"):
        tree.delete(part_with(Line(file="pyproject.toml", text=text)))


def test_part_with_a_file_that_does_not_exist_is_a_fault(tree: Tree) -> None:
    with pytest.raises(Unfit, match="does not exist"):
        tree.delete(PARTS["console"].model_copy(update={"files": ("web/", "weeb.py")}))
