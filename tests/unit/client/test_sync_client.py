"""The synchronous client is what the generator makes of the asynchronous one, method by method."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

import fumehood.client.sync
from fumehood.client import async_approvals, async_client, async_control
from fumehood.client.sync import approvals, client, control

ROOT = Path(__file__).resolve().parents[3]
GENERATOR = ROOT / "scripts" / "make_sync_client.py"


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location(GENERATOR.stem, GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_client_is_up_to_date(generator: Any) -> None:
    generated = generator.generate()
    assert len(generated) >= 4
    for path, source in generated.items():
        assert path.read_text(encoding="utf-8") == source, f"Run: python {GENERATOR}"
    folder = Path(fumehood.client.sync.__file__).parent
    assert {path.name for path in folder.glob("*.py")} == {
        "__init__.py", *(path.name for path in generated),
    }  # fmt: skip


def test_generator_replaces_keywords_names_and_docstrings(generator: Any) -> None:
    source = '''
from fumehood.client.async_transport import AsyncTransport


class AsyncThing:
    """A part of `AsyncClient`, to await."""

    async def ask(self) -> AsyncIterator[str]:  # async here
        async with self as it:
            return [await it.aclose(), "await"]
'''
    assert (
        generator.synchronous(source)
        == '''
from fumehood.client.sync.transport import Transport


class Thing:
    """A part of `Client`, to await."""

    def ask(self) -> Iterator[str]:  # async here
        with self as it:
            return [it.close(), "await"]
'''
    )


def test_phrase_that_no_docstring_holds_is_refused(
    generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "PHRASES", {"Nobody says this.": ""})
    with pytest.raises(ValueError, match="Nobody says this"):
        generator.generate()


PAIRS = [
    (client.Client, async_client.AsyncClient),
    (control.ControlClient, async_control.AsyncControlClient),
    (control.ControlledAgents, async_control.AsyncControlledAgents),
    (control.ControlledTools, async_control.AsyncControlledTools),
    (control.ControlledTokens, async_control.AsyncControlledTokens),
    (control.ControlledPolicy, async_control.AsyncControlledPolicy),
    (control.ControlledApprovers, async_control.AsyncControlledApprovers),
    (control.ControlledAudit, async_control.AsyncControlledAudit),
    (approvals.OwnApprovals, async_approvals.AsyncOwnApprovals),
    (approvals.ControlledApprovals, async_approvals.AsyncControlledApprovals),
]


@pytest.mark.row("A6", "D1")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_both_kinds_of_client_have_the_same_methods(one: type, other: type) -> None:
    def methods(kind: type) -> dict[str, str]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: str(inspect.signature(function)).replace("AsyncIterator", "Iterator")
            for name, function in found
            if not name.startswith("_")
        }

    assert methods(one) == methods(other)
    assert len(methods(one)) >= 3
    for name in methods(other):
        awaited = getattr(other, name)
        assert inspect.iscoroutinefunction(awaited) or inspect.isasyncgenfunction(awaited)
        assert inspect.getdoc(getattr(one, name))
