"""A directory of definitions: what it offers, what is wrong with which file, what a look sees."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fumehood.definition_files import directory as module
from fumehood.definition_files.directory import (
    DirectoryContents,
    ToolDirectory,
    read_documents,
)
from fumehood.protocol.files import FileFault, one_line
from fumehood.registry.index import Source
from support.definition_files import DefinitionDirectory
from support.definitions import expression_document, rest_document


def _names(contents: DirectoryContents | None) -> list[str]:
    return [tool.definition.name for tool in contents.tools]


def _faults(contents: DirectoryContents | None) -> dict[str | None, str]:
    return {fault.file: fault.reason for fault in contents.faults}


def _settle(directory: ToolDirectory) -> DirectoryContents | None:
    """Two looks: the first sees a change, the second that it is over."""
    assert directory.poll() is None
    return directory.poll()


@pytest.mark.row("R4", "T5")
def test_every_format_is_loaded_and_marked_with_its_source(
    definitions: DefinitionDirectory,
) -> None:
    definitions.put("a.json", rest_document(name="a"))
    definitions.put("b.toml", b'name = "b"\ntype = "MCP"\ndescription = "B."\n')
    definitions.put("c.yaml", b"- {name: c, type: MCP, description: C., dangerous: yes}\n")
    contents = ToolDirectory(definitions.path).load()
    assert contents.faults == ()
    assert _names(contents) == ["a", "b", "c"]
    assert {tool.source for tool in contents.tools} == {Source.DIRECTORY}
    assert [tool.definition.dangerous for tool in contents.tools] == [False, False, True]


@pytest.mark.row("R4")
@pytest.mark.parametrize(
    ("document", "words"),
    [
        (expression_document(), "only tools of type REST and MCP"),
        (rest_document(type="NATIVE"), "only tools of type REST and MCP"),
        (rest_document(type="BUILTIN"), "only tools of type REST and MCP"),
        (rest_document(type=["REST"]), "only tools of type REST and MCP"),
        ({}, "only tools of type REST and MCP"),
        (rest_document(executor="function"), "cannot run as 'function'"),
        (rest_document(executor="expression"), "cannot run as 'expression'"),
        (rest_document(sandboxed=False), "only the operator's configuration"),
        (rest_document(sandboxed="no"), "only the operator's configuration"),
        (rest_document(cache_ttl=5), "cache_ttl: only for a tool that is cacheable"),
        (rest_document(headers={"x-api-key": "abc"}), "looks like a credential"),
        (rest_document(name="calc ulator"), "name: "),
        (rest_document(colour="red"), "colour: "),
        (rest_document(parameters={"properties": {"a": {"type": "strin"}}}), "parameters"),
    ],
)
def test_faulty_definition_excludes_only_its_own_file(
    definitions: DefinitionDirectory, document: Any, words: str
) -> None:
    definitions.put("bad.json", {"tools": [rest_document(name="beside"), document]})
    definitions.put_tools("good.json", "good")
    contents = ToolDirectory(definitions.path).load()
    assert _names(contents) == ["good"]
    assert list(_faults(contents)) == ["bad.json"]
    assert words in _faults(contents)["bad.json"]
    assert "(number 2)" in _faults(contents)["bad.json"]


@pytest.mark.row("R4")
@pytest.mark.parametrize("name", ["a.txt", "README", "a.json.bak", "a.JSON", "json"])
def test_file_with_an_unknown_suffix_is_a_fault(
    definitions: DefinitionDirectory, name: str
) -> None:
    definitions.put(name, b"[]")
    faults = _faults(ToolDirectory(definitions.path).load())
    assert faults == {name: "its name must end in one of .json, .toml, .yaml, .yml"}


@pytest.mark.row("R4")
def test_same_tool_in_two_files_excludes_both(
    definitions: DefinitionDirectory,
) -> None:
    definitions.put_tools("a.json", "x", "only_a")
    definitions.put_tools("b.json", "x")
    definitions.put_tools("c.json", "x", version="2.0.0")
    contents = ToolDirectory(definitions.path).load()
    assert [(t.definition.name, t.definition.version) for t in contents.tools] == [("x", "2.0.0")]
    assert _faults(contents) == {
        "a.json": "x@1.0.0 is in 'b.json' as well; neither file is used",
        "b.json": "x@1.0.0 is in 'a.json' as well; neither file is used",
    }


def test_duplicate_tool_in_one_file_is_a_fault(
    definitions: DefinitionDirectory,
) -> None:
    definitions.put_tools("a.json", "x", "x")
    assert _faults(ToolDirectory(definitions.path).load()) == {"a.json": "x@1.0.0 is given twice"}


@pytest.mark.row("R1", "R4")
def test_name_owned_by_another_source_is_a_fault_in_any_version(
    definitions: DefinitionDirectory,
) -> None:
    definitions.put_tools("a.json", "calculator", version="99.0.0")
    owners = {"calculator": Source.BUILTIN}
    contents = ToolDirectory(definitions.path, owner_of=owners.get).load()
    assert _faults(contents) == {
        "a.json": "the name calculator belongs to a tool of the source builtin"
    }
    assert contents.tools == ()


@pytest.mark.row("R4")
def test_missing_directory_is_a_fault_until_it_exists(
    definitions: DefinitionDirectory,
) -> None:
    directory = ToolDirectory(definitions.path / "tools")
    assert _faults(directory.load()) == {
        None: "the directory cannot be opened: No such file or directory"
    }
    assert directory.poll() is None
    (definitions.path / "tools").mkdir(mode=0o700)
    DefinitionDirectory(definitions.path / "tools").put_tools("a.json", "a")
    assert _names(_settle(directory)) == ["a"]


@pytest.mark.row("R1", "R4")
def test_added_changed_and_removed_files_are_noticed_once_stable(
    definitions: DefinitionDirectory,
) -> None:
    directory = ToolDirectory(definitions.path)
    assert _names(directory.load()) == []
    definitions.put_tools("a.json", "a")
    assert _names(_settle(directory)) == ["a"]
    definitions.put_tools("a.json", "b", "c")
    definitions.put_tools("d.json", "d")
    assert _names(_settle(directory)) == ["b", "c", "d"]
    definitions.remove("a.json")
    assert _names(_settle(directory)) == ["d"]
    assert directory.poll() is None


def _make_faulty(path: Path) -> None:
    path.write_bytes(b"[")


def _open_to_others(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("spoil", "words"), [(_make_faulty, "not JSON"), (_open_to_others, "chmod go-w")]
)
def test_file_that_becomes_faulty_or_writable_by_others_loses_its_tools(
    definitions: DefinitionDirectory, spoil: Callable[[Path], None], words: str
) -> None:
    """Whoever takes a tool out and mistypes something else must not find it still there."""
    directory = ToolDirectory(definitions.path)
    path = definitions.put_tools("a.json", "a")
    definitions.put_tools("b.json", "b")
    assert _names(directory.load()) == ["a", "b"]
    spoil(path)
    contents = _settle(directory)
    assert _names(contents) == ["b"]
    assert words in _faults(contents)["a.json"]
    definitions.put_tools("a.json", "a")
    assert _names(_settle(directory)) == ["a", "b"]


def test_file_that_changes_while_it_is_read_is_read_again(
    definitions: DefinitionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ToolDirectory(definitions.path)
    path = definitions.put_tools("a.json", "a")
    read_file = module.read_file

    def grow_first(*arguments: Any) -> Any:
        with path.open("ab") as file:
            file.write(b" ")
        return read_file(*arguments)

    monkeypatch.setattr(module, "read_file", grow_first)
    assert _faults(directory.load()) == {"a.json": "it changed while it was read"}
    monkeypatch.undo()
    assert _names(_settle(directory)) == ["a"]


@pytest.mark.parametrize("function", ["open_directory", "read_file"])
def test_files_are_read_again_after_the_engine_ran_out_of_descriptors(
    function: str, definitions: DefinitionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ToolDirectory(definitions.path)
    assert _names(directory.load()) == []
    definitions.put_tools("a.json", "a")
    assert directory.poll() is None
    open_directory, looks = module.open_directory, 0

    def fail(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        if function == "open_directory" and looks == 1:  # of the poll; the second is of the read
            return open_directory(*arguments)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(module, function, fail)
    with suppress(OSError):
        assert _faults(directory.poll()) == {"a.json": "it cannot be read: Too many open files"}
    monkeypatch.undo()
    assert _names(directory.poll()) == ["a"]


def test_internal_error_in_one_file_does_not_exclude_others(
    definitions: DefinitionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions.put_tools("a.json", "a")
    definitions.put("b.json", b"[7]")
    read_documents = module.read_documents

    def fail_on_b(name: str, data: bytes) -> Any:
        if name == "b.json":
            raise ZeroDivisionError
        return read_documents(name, data)

    monkeypatch.setattr(module, "read_documents", fail_on_b)
    contents = ToolDirectory(definitions.path).load()
    assert _names(contents) == ["a"]
    assert _faults(contents) == {"b.json": "it could not be understood (ZeroDivisionError)"}


def test_file_fault_is_short_and_printable(
    definitions: DefinitionDirectory,
) -> None:
    tools = [{"\x1b[2J" + "k" * 10_000: 1, **rest_document(name="x" * 500)}] * 50
    definitions.put("a\x1b.json", {"tools": tools})
    ((name, reason),) = _faults(ToolDirectory(definitions.path).load()).items()
    assert name == "a\\x1b.json"
    assert reason.isprintable()
    assert len(reason) <= 2001


# -- one file ------------------------------------------------------------------------------


@pytest.mark.row("R4")
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'[{"name": "a"}, {"name": "b"}]'),
        ("a.json", b'{"tools": [{"name": "a"}, {"name": "b"}]}'),
        ("a.toml", b'[[tools]]\nname = "a"\n[[tools]]\nname = "b"\n'),
        ("a.yaml", b"- name: a\n- name: b\n"),
        ("a.yaml", b"tools:\n- name: a\n- name: b\n"),
    ],
)
def test_list_of_definitions_is_read(name: str, data: bytes) -> None:
    assert read_documents(name, data) == [{"name": "a"}, {"name": "b"}]


FAULTS: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("a.json", b"{", "not JSON"),
    "not TOML": ("a.toml", b"a = ", "not TOML"),
    "not YAML": ("a.yaml", b"[a", "not YAML"),
    "empty JSON": ("a.json", b"", "not JSON"),
    "empty YAML": ("a.yaml", b"", "it is empty"),
    "not UTF-8, JSON": ("a.json", b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    "not UTF-8, TOML": ("a.toml", b'a = "\xff"', "not UTF-8 at byte 5"),
    "not UTF-8, YAML": ("a.yaml", b"a: \xff", "not UTF-8 at byte 3"),
    "UTF-16": ("a.yaml", "a: 1".encode("utf-16"), "it looks like UTF-16; save it as UTF-8"),
    "UTF-16, big-endian": ("a.toml", "\ufeffa = 1".encode("utf-16-be"), "save it as UTF-8"),
    "UTF-16 without a mark, JSON": ("a.json", b"{\0}\0", "save it as UTF-8"),
    "UTF-16 without a mark, big-endian": ("a.yaml", b"\0a\0:", "save it as UTF-8"),
    "UTF-16 without NUL bytes": ("a.yaml", b"\xff\xfe" + "日".encode("utf-16-le"), "save it as UTF-8"),
    "NUL, JSON": ("a.json", b'{"a": "\0"}', "NUL bytes"),
    "NUL, TOML": ("a.toml", b'a = "\0"', "NUL bytes"),
    "NUL, YAML": ("a.yaml", b"a: \0", "NUL bytes"),
    "key twice, JSON": ("a.json", b'{"a": 1, "a": 2}', "given twice"),
    "key twice, TOML": ("a.toml", b"a = 1\na = 2", "Cannot overwrite a value"),
    "table twice, TOML": ("a.toml", b"[a]\n[a]", "Cannot declare"),
    "key twice, YAML": ("a.yaml", b"a: 1\na: 2", "given twice"),
    "NaN, JSON": ("a.json", b'{"a": NaN}', "NaN"),
    "NaN, TOML": ("a.toml", b"a = nan", "Out of range float"),
    "infinity, TOML": ("a.toml", b"a = 1e999", "Out of range float"),
    "huge float, YAML": ("a.yaml", b"a: 1e999", "Out of range float"),
    "huge integer, JSON": ("a.json", b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
    "huge integer, TOML": ("a.toml", b"a = " + b"9" * 5000, "too many digits"),
    "huge hexadecimal, TOML": ("a.toml", b"a = 0x" + b"f" * 5000, "4300 digits"),
    "date, TOML": ("a.toml", b"sunset_date = 2026-01-01", "a date is not accepted"),
    "time, TOML": ("a.toml", b"a = 12:30:00", "a time is not accepted"),
    "moment, TOML": ("a.toml", b"a = 2026-01-01T00:00:00Z", "a datetime is not accepted"),
    "lone surrogate, JSON": ("a.json", b'{"a": "\\ud800"}', "lone surrogate"),
    "depth, JSON": ("a.json", b'{"a":' * 66 + b"1" + b"}" * 66, "nested deeper than 64"),
    "depth, TOML": ("a.toml", b"a = " + b"[" * 66 + b"1" + b"]" * 66, "nested deeper than 64"),
    "depth, YAML": ("a.yaml", b"[" * 66 + b"1" + b"]" * 66, "nested deeper than 64"),
    "depth by dots, TOML": ("a.toml", b"a" + b".a" * 64 + b" = 1", "more than 64 parts"),
    "a number": ("a.json", b"5", "neither a definition"),
    "a string": ("a.yaml", b"text", "neither a definition"),
    "a list of strings": ("a.json", b'["a"]', "neither a definition"),
    "tools is no list": ("a.json", b'{"tools": {"name": "a"}}', "not a list"),
    "something beside tools": ("a.json", b'{"tools": [], "x": 1}', "beside 'tools' there is 'x'"),
}  # fmt: skip


@pytest.mark.row("R4")
@pytest.mark.parametrize("case", FAULTS)
def test_unusable_definition_file_has_a_reason(case: str) -> None:
    name, data, words = FAULTS[case]
    with pytest.raises(FileFault, match=words) as caught:
        read_documents(name, data)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1001


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"), ("a\nb", "a\\x0ab"), ("\u202ex", "\\x202ex"),
        ("\x9b", "\\x9b"), ("ü€😀", "ü€😀"), ("\ud800", "\\xd800"),
    ],
)  # fmt: skip
def test_text_of_a_file_is_escaped_for_a_terminal(text: str, shown: str) -> None:
    assert one_line(text) == shown
