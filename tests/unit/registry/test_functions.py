"""Functions as tools: which are called here, and which another process must find."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fumehood import InvalidDefinition, tool
from fumehood.registry.declare import FunctionTool
from fumehood.registry.functions import TOO_WIDE, register_function
from fumehood.registry.index import RegisteredTool, Source, ToolIndex

MODULE = '''
from fumehood import tool

@tool
def sandboxed() -> None:
    """Do nothing, sandboxed."""

@tool(sandboxed=False)
def synchronous() -> None:
    """Do nothing at once."""

@tool(sandboxed=False)
async def asynchronous() -> None:
    """Do nothing and give way."""

def plain() -> None:
    """Do nothing."""

under_another_name = tool(name="other")(plain)
nowhere = [tool(name="nowhere")(plain)]
'''


@pytest.fixture
def package(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A package of which the function tools are two modules deep."""
    (tmp_path / "shop" / "till").mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "till" / "__init__.py").write_text(MODULE)
    (tmp_path / "shop" / "stock.py").write_text(MODULE)
    (tmp_path / "corner.py").write_text(MODULE)
    sys.path.insert(0, str(tmp_path))
    yield SimpleNamespace(
        path=tmp_path.resolve(),
        stock=importlib.import_module("shop.stock"),
        till=importlib.import_module("shop.till"),
        corner=importlib.import_module("corner"),
    )
    sys.path.remove(str(tmp_path))
    for name in ("shop", "shop.stock", "shop.till", "corner"):
        sys.modules.pop(name, None)


def register(function: FunctionTool, *private: Path) -> RegisteredTool:
    return register_function(ToolIndex(), function, Source.PROGRAM, private=private)


@pytest.mark.row("S1")
@pytest.mark.parametrize("module", ["stock", "till", "corner"])
@pytest.mark.parametrize("name", ["sandboxed", "synchronous"])
def test_function_that_runs_elsewhere_is_named_and_not_kept(
    package: SimpleNamespace, module: str, name: str
) -> None:
    loaded = getattr(package, module)
    registered = register(getattr(loaded, name))
    assert registered.function is None
    assert registered.address is not None
    assert (registered.address.module, registered.address.name) == (loaded.__name__, name)
    assert registered.address.import_path == str(package.path)


def test_asynchronous_host_function_is_called_here(package: SimpleNamespace) -> None:
    registered = register(package.stock.asynchronous)
    assert registered.address is None
    assert registered.function is not None


def test_name_is_the_one_that_holds_the_tool(package: SimpleNamespace) -> None:
    address = register(package.stock.under_another_name).address
    assert address is not None
    assert address.name == "under_another_name"


@pytest.mark.row("T7")
def test_function_that_nobody_can_import_is_refused_with_the_cure(
    package: SimpleNamespace,
) -> None:
    def inner() -> None:
        """Do nothing."""

    for function, words in (
        (tool(inner), "inside another function"),
        (package.stock.nowhere[0], "no name at the top level"),
        (tool(name="later")(package.stock.plain), "no name at the top level"),
    ):
        with pytest.raises(InvalidDefinition, match=words) as refused:
            register(function)
        assert refused.value.fields == ("sandboxed",)
        assert "sandboxed=False" in refused.value.message


@pytest.mark.row("T7")
def test_synchronous_function_that_nobody_can_import_is_told_to_be_asynchronous() -> None:
    @tool(sandboxed=False)
    def inner() -> None:
        """Do nothing."""

    with pytest.raises(InvalidDefinition, match="make it async"):
        register(inner)


@pytest.mark.parametrize("name", ["__main__", "not_loaded_at_all"])
def test_function_that_its_module_does_not_hold_is_refused(
    package: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package.stock.sandboxed.function, "__module__", name)
    with pytest.raises(InvalidDefinition, match=r"no name at the top level|is not loaded"):
        register(package.stock.sandboxed)


def test_module_that_lies_elsewhere_than_its_name_says_is_refused(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package.corner.__spec__, "origin", str(package.path / "shop" / "stock.py"))
    with pytest.raises(InvalidDefinition, match="is not where the name"):
        register(package.corner.sandboxed)
    monkeypatch.setattr(package.corner.__spec__, "origin", None)
    with pytest.raises(InvalidDefinition, match="not loaded from a file"):
        register(package.corner.sandboxed)


@pytest.mark.row("S1")
def test_import_path_that_holds_what_is_private_is_refused(package: SimpleNamespace) -> None:
    for private in (package.path, package.path / "state"):
        with pytest.raises(InvalidDefinition, match="directory of its own"):
            register(package.corner.sandboxed, private)
    assert register(package.corner.sandboxed, package.path.parent / "state").address is not None


def test_host_function_may_lie_anywhere(package: SimpleNamespace) -> None:
    assert register(package.corner.synchronous, package.path).address is not None


def test_directories_of_a_host_are_too_wide() -> None:
    assert {Path("/"), Path("/etc"), Path("/tmp"), Path("/root"), Path("/proc")} <= TOO_WIDE
