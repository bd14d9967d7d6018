"""Names, keywords, languages, paths and identities."""

from __future__ import annotations

import os.path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core import keyword_types
from fumehood.core.identity import TrustDomain
from fumehood.core.names import MAX_COMPARED, checked_keywords, did_you_mean
from fumehood.core.tool import DECISION
from fumehood.core.workspace_path import MAX_NAME_BYTES, MAX_PATH_BYTES, path_fault
from fumehood.executors.kinds import EXECUTORS
from fumehood.registry.arguments import all_arguments


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("calculater", " Did you mean 'calculator'?"),
        ("run_pyton", " Did you mean 'run_python'?"),
        ("calculator", " Did you mean 'calculator'?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_similar_names_are_suggested(given: str, says: str) -> None:
    assert did_you_mean(given, ["calculator", "run_python", "read_file"]) == says


def test_number_of_compared_names_is_bounded() -> None:
    known = [f"tool_{number:06}" for number in range(MAX_COMPARED)] + ["tool_abcdef"]
    assert "tool_abcdef" not in did_you_mean("tool_abcdeg", known)
    assert "tool_abcdef" in did_you_mean("tool_abcdeg", known[1:])


# -- The keyword arguments of the public methods -------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("timeout", "timeout_seconds"),
        ("memory_limit", "memory_limit_mb"),
        ("dryrun", "dry_run"),
        ("session", "session_id"),
    ],
)
def test_misspelt_keyword_is_refused_with_a_suggestion(wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"call\(\) .*'{wrong}'.* Did you mean '{meant}'\?"):
        checked_keywords(keyword_types.CallKeywords, "call", {wrong: 1})


def test_unknown_keyword_is_refused_with_all_known_ones() -> None:
    with pytest.raises(TypeError, match="It takes max_parallel, parallel_tool_calls, timeout_s"):
        checked_keywords(keyword_types.BatchKeywords, "batch", {"qqq": 1})


# -- The host's table of languages, and the places that cannot import it -------------------


def test_every_registrable_executor_kind_has_an_executor() -> None:
    assert EXECUTORS.keys() == {
        *all_arguments(),
        "function",
        "http",
        "http:fetch",
        "mcp",
        DECISION,
    }


# -- Paths of a workspace ------------------------------------------------------------------

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
def test_unsafe_path_is_refused_with_a_reason(path: str, words: str) -> None:
    fault = path_fault(path)
    assert fault is not None
    assert words in fault


@pytest.mark.row("E7")
@given(st.text(st.sampled_from("/.ab\0"), max_size=12))
def test_accepted_path_stays_below_its_directory(path: str) -> None:
    if path_fault(path) is None:
        assert os.path.normpath(f"/w/{path}") == f"/w/{path}"
    else:
        assert (
            not path
            or "\0" in path
            or os.path.normpath(f"/w/{path}") != f"/w/{path}"
            or path.startswith("/")
        )


# -- Identity ------------------------------------------------------------------------------

parts = st.text("01:a", max_size=6)
ids = st.none() | st.text("01:a", min_size=1, max_size=6)
domains = st.builds(TrustDomain, parts, ids, ids)


@pytest.mark.row("S2")
@given(domains, domains)
def test_trust_domain_keys_are_equal_only_for_equal_domains(
    one: TrustDomain, other: TrustDomain
) -> None:
    assert (one.key == other.key) == (one == other)
