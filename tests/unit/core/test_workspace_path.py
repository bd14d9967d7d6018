"""Paths of a workspace: plain names below one directory, whoever wrote them."""

from __future__ import annotations

import os.path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.workspace_path import MAX_NAME_BYTES, MAX_PATH_BYTES, path_fault

LONGEST = "/".join(["n" * 199] * 20 + ["n" * (MAX_PATH_BYTES - 4000)])


@pytest.mark.row("E7", "S3")
@pytest.mark.parametrize(
    "path",
    ["a", "a/b", ".hidden", "..a", "a..", "...", "a b", "ä/ö", "-rf", "a\\b", "a\nb", "C:\\x",
     "n" * MAX_NAME_BYTES, LONGEST],
    ids=lambda path: path[:20],
)  # fmt: skip
def test_plain_relative_path_has_no_fault(path: str) -> None:
    assert path_fault(path) is None


@pytest.mark.row("E7", "S3")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "empty"),
        ("/", "absolute"),
        ("/etc/passwd", "absolute"),
        ("//a", "absolute"),
        ("..", "'..'"),
        ("../a", "'..'"),
        ("a/../b", "'..'"),
        ("a/..", "'..'"),
        (".", "'.'"),
        ("./a", "'.'"),
        ("a/./b", "'.'"),
        ("a//b", "empty"),
        ("a/", "empty"),
        ("a\0b", "NUL"),
        ("a/.fumehood-upload-0", "reserved"),
        ("\ud800", "surrogate"),
        ("n" * (MAX_NAME_BYTES + 1), "255"),
        ("ä" * 128, "255"),
        (LONGEST + "n", "bytes"),
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_every_other_path_is_refused_with_the_reason(path: str, words: str) -> None:
    fault = path_fault(path)
    assert fault is not None
    assert words in fault


@pytest.mark.row("E7")
@given(st.text(st.sampled_from("/.ab\0"), max_size=12))
def test_path_without_a_fault_stays_below_its_directory(path: str) -> None:
    if path_fault(path) is None:
        assert os.path.normpath(f"/w/{path}") == f"/w/{path}"
    else:
        assert (
            not path
            or "\0" in path
            or os.path.normpath(f"/w/{path}") != f"/w/{path}"
            or path.startswith("/")
        )
