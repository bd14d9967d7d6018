"""What each part of the engine costs outside itself may only fall (`engine/parts.toml`)."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

from support.parts import (
    PACKAGE,
    ROOT,
    TABLE,
    Code,
    Outside,
    Part,
    read_parts,
    verdict,
    words_in,
    write_outside,
)

PARTS = read_parts()


@cache
def code() -> Code:
    return Code()


NUMBERS = {
    "kernel": "lines of the kernel, or of other parts, that know {}",
    "faces": "lines of the faces that know {}",
    "importing": "modules that import {} when they are loaded",
}


def faults_of(name: str, found: Outside, committed: Outside) -> list[str]:
    """What is wrong with a part's committed numbers."""
    faults = [
        verdict(text.format(name), getattr(committed, number), getattr(found, number))
        for number, text in NUMBERS.items()
    ]
    return [fault for fault in faults if fault is not None]


@pytest.mark.parametrize("name", PARTS)
def test_rest_of_the_engine_knows_a_part_as_little_as_committed(name: str) -> None:
    count = code().count(PARTS[name])
    faults = faults_of(name, count.outside, PARTS[name].outside)
    where = (f"{number:>5} {file}" for file, number in count.lines.items())
    assert not faults, "\n".join([*faults, "The lines are in:", *where])
    assert NUMBERS.keys() == Outside.model_fields.keys()


def test_files_of_parts_exist() -> None:
    named = [file for part in PARTS.values() for file in part.files]
    assert [file for file in named if not (ROOT / PACKAGE / file).exists()] == []
    assert len(named) > 50
    assert len(code().texts) > 300


# -- controls ---------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A copy of one package of the kernel and of the console."""
    for folder in ("core", "web"):
        shutil.copytree(ROOT / PACKAGE / folder, tmp_path / PACKAGE / folder)
    return tmp_path


ADDED: dict[str, tuple[str, int, int]] = {
    "import-of-a-module": ("import fumehood.web.server\n", 1, 1),
    "import-of-names": ("from fumehood.web.server import (\n    serve,\n    show,\n)\n", 3, 1),
    "import-in-a-function": ("def start() -> None:\n    import fumehood.web.server\n", 1, 0),
    "import-for-types": ("if TYPE_CHECKING:\n    import fumehood.web.server\n", 1, 0),
    "name": ("def start(console_port: int) -> int:\n    return console_port\n", 2, 0),
    "short-text": ("SETTING = 'web_console'\n", 1, 0),
    "docstring": ('def start() -> None:\n    """Start the web_console."""\n', 0, 0),
    "comment": ("PORT = 1  # of the web_console\n", 0, 0),
    "message": ("MESSAGE = 'The web_console is not there: start it with --web.'\n", 0, 0),
    "excepted": ("from rich.console import Console\n", 0, 0),
}
"""Code, the lines of it that know the console, and how many modules it makes import it."""


@pytest.mark.parametrize("name", ADDED)
def test_line_added_to_the_kernel_is_counted_if_it_knows_a_part(kernel: Path, name: str) -> None:
    before = Code(kernel).count(PARTS["console"]).outside
    added, lines, importing = ADDED[name]
    with (kernel / PACKAGE / "core" / "errors.py").open("a") as file:
        file.write(added)
    after = Code(kernel).count(PARTS["console"]).outside
    assert (after.kernel - before.kernel, after.importing - before.importing) == (lines, importing)
    assert not faults_of("console", before, before)
    assert bool(faults_of("console", after, before)) == bool(lines)


def test_number_that_fell_is_a_fault_until_it_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    shutil.copy(ROOT / TABLE, tmp_path / TABLE)
    held = PARTS["sessions"].outside
    found = Outside(kernel=held.kernel - 1, faces=held.faces + 1, importing=held.importing)
    fell, rose = faults_of("sessions", found, held)
    assert "Run `python scripts/lower_parts.py`" in fell
    assert "It may only fall" in rose
    write_outside(tmp_path, {"sessions": held.lowered(found)})
    after = read_parts(tmp_path)
    assert after.pop("sessions").outside == held.model_copy(update={"kernel": held.kernel - 1})
    assert after == {name: part for name, part in PARTS.items() if name != "sessions"}


def test_misspelt_key_of_a_part_is_refused() -> None:
    row = PARTS["console"].model_dump()
    assert Part.model_validate(row) == PARTS["console"]
    with pytest.raises(ValidationError):
        Part.model_validate({**row, "deleteable": True})


def test_text_with_values_is_one_word_in_every_python() -> None:
    found = [word for word, _ in words_in("a = f'{web_console!r:{b}} and' + f'''{'x'}\n{c}'''\n")]
    assert found == ["a", "f'{web_console!r:{b}} and'", "f'''{'x'}\n{c}'''"]
