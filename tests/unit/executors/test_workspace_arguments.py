"""Arguments of tools on a workspace: what is refused before anything is asked of a guest."""

from __future__ import annotations

import base64

import pytest

from fumehood.core.json_types import JsonObject
from fumehood.executors.kinds import argument_faults

BAD_PATHS = (
    "",
    "/a",
    "../a",
    "a/../b",
    "a//b",
    "./a",
    "a\0b",
    "a\ud800",
    "a" * 256,
    "a/" * 2100 + "b",
    7,
    None,
)


def faults(action: str, arguments: JsonObject) -> set[str]:
    return {where for where, _ in argument_faults(f"workspace:{action}", arguments)}


@pytest.mark.parametrize("path", BAD_PATHS)
def test_path_that_leads_anywhere_else_is_refused(path: object) -> None:
    assert faults("read", {"path": path}) == {"path"}
    assert faults("write", {"path": path, "content": ""}) == {"path"}
    assert faults("delete", {"paths": ["a", path]}) == {"paths.1"}
    if path not in ("", None):  # the workspace itself
        assert faults("list", {"path": path}) == {"path"}


@pytest.mark.parametrize(
    "path", ["a", ".a", "a b", "..a", "a\nb", "‮txt.exe", "C:\\a", "a" * 255, "CON"]
)
def test_odd_names_of_plain_files_are_taken(path: str) -> None:
    assert faults("read", {"path": path}) == set()
    assert faults("delete", {"paths": [path], "recursive": True}) == set()


@pytest.mark.parametrize(
    ("action", "arguments", "where"),
    [
        ("read", {"offset": -1}, "offset"),
        ("read", {"offset": True}, "offset"),
        ("read", {"limit": 0}, "limit"),
        ("read", {"limit": 262_145}, "limit"),
        ("read", {"encoding": "utf-16"}, "encoding"),
        ("write", {"content": "a", "content_base64": "YQ=="}, "content"),
        ("write", {}, "content"),
        ("write", {"content": "\ud800"}, "content"),
        ("write", {"content": 7}, "content"),
        ("write", {"content_base64": "a"}, "content_base64"),
        ("write", {"content": "", "mode": "truncate"}, "mode"),
        ("write", {"content": "a" * ((8 << 20) + 1)}, "content"),
        ("list", {"limit": 101}, "limit"),
        ("list", {"cursor": 1}, "cursor"),
        ("list", {"recursive": "yes"}, "recursive"),
        ("delete", {"paths": []}, "paths"),
        ("delete", {"paths": "a"}, "paths"),
        ("delete", {"paths": ["a"] * 101}, "paths"),
        ("delete", {"paths": ["a"], "recursive": 1}, "recursive"),
    ],
)
def test_each_fault_is_named(action: str, arguments: JsonObject, where: str) -> None:
    assert faults(action, {"path": "a", **arguments}) == {where}


def test_what_is_at_the_bounds_is_taken() -> None:
    most = base64.b64encode(b"a" * (8 << 20)).decode()
    assert faults("write", {"path": "a", "content_base64": most[:-4]}) == set()
    assert faults("read", {"path": "a", "offset": 0, "limit": 262_144}) == set()
    assert faults("list", {"path": "", "limit": 100}) == set()
    assert faults("delete", {"paths": ["a"] * 100}) == set()
