"""The clients' generated modules are what the generator makes of operations and models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import fumehood.client.sync

ROOT = Path(__file__).resolve().parents[3]
GENERATOR = ROOT / "scripts" / "make_clients.py"


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location(GENERATOR.stem, GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_modules_are_up_to_date(generator: Any) -> None:
    generated = generator.generate()
    assert len(generated) >= 6
    for path, source in generated.items():
        assert path.read_text(encoding="utf-8") == source, f"Run: python {GENERATOR}"
    folder = Path(fumehood.client.sync.__file__).parent
    assert {path.name for path in folder.glob("*.py")} == {
        "__init__.py", *(path.name for path in generated if path.parent == folder),
    }  # fmt: skip
