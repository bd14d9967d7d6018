"""The public names: sorted, all of them loadable, the same for type checkers, and on a page."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

import fumehood
from support.pages import ROOT

SOURCE = ast.parse(Path(fumehood.__file__).read_text(encoding="utf-8"))


def _typed_names() -> dict[str, str]:
    """Name → module, as a type checker reads it."""
    guarded = [
        node
        for node in SOURCE.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    assert len(guarded) == 1
    return {
        alias.asname or alias.name: str(node.module)
        for node in guarded[0].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_public_names_match_those_seen_by_type_checkers() -> None:
    assert fumehood.__all__ == sorted(_typed_names())
    assert _typed_names() == fumehood._HOMES


@pytest.mark.parametrize("name", fumehood.__all__)
def test_public_name_can_be_loaded(name: str) -> None:
    value = getattr(fumehood, name)
    assert value is not None
    assert getattr(value, "__name__", name) == name


def test_page_of_public_names_is_up_to_date() -> None:
    """A name, method or parameter that is renamed or taken away changes the page in its commit."""
    scripts = runpy.run_path(str(ROOT / "scripts" / "make_reference.py"))
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    remedy = "run: python scripts/make_reference.py, and say in docs/changes what breaks"
    assert page == scripts["python_page"](""), remedy


def test_private_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'run_call'"):
        _ = fumehood.run_call


@pytest.mark.parametrize("name", fumehood.__all__)
def test_every_public_exception_derives_from_the_base_error(name: str) -> None:
    value = getattr(fumehood, name)
    if isinstance(value, type) and issubclass(value, BaseException):
        assert issubclass(value, fumehood.FumehoodError)


def test_engine_exceptions_derive_from_the_base_error() -> None:
    from fumehood.core.errors import EngineError
    from fumehood.policy.model import PolicyError
    from fumehood.storage.errors import StoreError

    for error in (EngineError, PolicyError, StoreError):
        assert issubclass(error, fumehood.FumehoodError)
