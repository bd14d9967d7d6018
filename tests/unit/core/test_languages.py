"""The host's table of languages, and the places that cannot import it."""

from __future__ import annotations

import ast
from pathlib import Path

import fumehood
from fumehood.core.languages import LANGUAGES
from fumehood.executors.kinds import EXECUTORS
from fumehood.registry.definitions import PROGRAM_ARGUMENTS
from fumehood.sandbox.container.settings import LanguageImages

CHILD = Path(fumehood.__file__).parent / "guest/container/child.py"


def test_guest_runs_every_language_and_no_other() -> None:
    tables = [
        node.value
        for node in ast.walk(ast.parse(CHILD.read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "programs"
    ]
    (table,) = tables
    assert isinstance(table, ast.Dict)
    programs = {ast.literal_eval(key) for key in table.keys if key is not None}
    assert programs == {*LANGUAGES, "files", "probe"}


def test_every_language_has_an_image_that_the_operator_can_choose() -> None:
    chosen = LanguageImages().model_dump()
    assert {name: chosen[name] for name in LANGUAGES} == {
        name: language.image for name, language in LANGUAGES.items()
    }


def test_every_kind_of_tool_that_can_be_registered_has_an_executor() -> None:
    assert EXECUTORS.keys() == {*PROGRAM_ARGUMENTS, "function"}
