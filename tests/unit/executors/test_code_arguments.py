"""Arguments of code: every fault is found before anything is taken, and nothing else is one."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from fumehood.executors.program import (
    MAX_FILES,
    MAX_TOTAL_BYTES,
    SentFile,
    argument_faults,
    program_arguments,
    sent_files,
)


def _faults(**arguments: Any) -> dict[str, str]:
    return dict(argument_faults({"code": "1", **arguments}))


def _file(path: str, content: str = "x") -> dict[str, str]:
    return {"path": path, "content": content}


@pytest.mark.row("S3", "P2")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"stdin": None},
        {"stdin": ""},
        {"stdin": "a\0b"},
        {"files": []},
        {"files": [_file("a"), _file("b/c"), _file("b/d"), _file("A")]},
        {"files": [{"path": "a", "content_base64": ""}, {"path": "b", "content_base64": "AP8="}]},
        {"files": [_file(str(number)) for number in range(MAX_FILES)]},
        {"code": "#" * (5 << 20)},
        {"code": "print('ä')"},
    ],
    ids=lambda given: str(given)[:40],
)
def test_arguments_that_a_guest_can_take_have_no_fault(arguments: dict[str, Any]) -> None:
    assert _faults(**arguments) == {}


@pytest.mark.row("S3", "P2")
@pytest.mark.parametrize(
    ("arguments", "where", "words"),
    [
        ({"code": ""}, "code", "empty"),
        ({"code": " \n\t"}, "code", "empty"),
        ({"code": "a\0"}, "code", "NUL"),
        ({"code": "'\ud800'"}, "code", "surrogate"),
        ({"code": 1}, "code", "string"),
        ({"code": None}, "code", "string"),
        ({"stdin": 1}, "stdin", "string"),
        ({"stdin": "\udfff"}, "stdin", "surrogate"),
        ({"files": {}}, "files", "list"),
        ({"files": ["a"]}, "files.0", "path"),
        ({"files": [{"path": 1, "content": ""}]}, "files.0", "path"),
        ({"files": [_file("/a")]}, "files.0.path", "absolute"),
        ({"files": [_file("ok"), _file("../a")]}, "files.1.path", "'..'"),
        ({"files": [_file("a"), _file("a")]}, "files.1.path", "twice"),
        ({"files": [_file("a/b/c"), _file("a/b")]}, "files.0.path", "below another"),
        ({"files": [_file("a"), _file("a/b")]}, "files.1.path", "below another"),
        ({"files": [{"path": "a"}]}, "files.0", "either"),
        ({"files": [{"path": "a", "content": "", "content_base64": ""}]}, "files.0", "either"),
        ({"files": [{**_file("a"), "mode": 7}]}, "files.0.mode", "not known"),
        ({"files": [_file("a", "\ud800")]}, "files.0.content", "surrogate"),
        ({"files": [{"path": "a", "content": 1}]}, "files.0.content", "string"),
        ({"files": [{"path": "a", "content_base64": 1}]}, "files.0.content_base64", "base64"),
        ({"files": [{"path": "a", "content_base64": "a"}]}, "files.0.content_base64", "base64"),
        ({"files": [{"path": "a", "content_base64": "a\nb="}]}, "files.0.content_base64", "base64"),
        ({"files": [{"path": "a", "content_base64": "ää=="}]}, "files.0.content_base64", "base64"),
        ({"files": [_file(str(n)) for n in range(MAX_FILES + 1)]}, "files", "more than"),
        ({"stdin": "x" * MAX_TOTAL_BYTES}, "files", "together"),
        ({"stdin": "ä" * (MAX_TOTAL_BYTES // 2)}, "files", "together"),
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_every_fault_is_named_with_its_place(
    arguments: dict[str, Any], where: str, words: str
) -> None:
    assert words in _faults(**arguments)[where]


def test_all_faults_are_found_at_once() -> None:
    found = _faults(code="", stdin=1, files=[_file("/a"), {"path": "b"}])
    assert found.keys() == {"code", "stdin", "files.0.path", "files.1"}


def test_a_fault_shows_no_more_than_the_beginning_of_a_path() -> None:
    (said,) = _faults(files=[_file("/" + "a" * 5000)]).values()
    assert len(said) < 200


def test_guest_gets_each_key_and_the_bytes_are_those_that_were_meant() -> None:
    content = base64.b64encode(b"\0\xff").decode()
    arguments = {"code": "1", "files": [_file("a", "ä"), {"path": "b", "content_base64": content}]}
    assert program_arguments(arguments) == {**arguments, "stdin": None}
    assert program_arguments({"code": "1"}) == {"code": "1", "stdin": None, "files": []}
    assert sent_files(arguments) == [SentFile("a", "ä".encode()), SentFile("b", b"\0\xff")]
