"""The rules of `.gitignore` files, against git itself."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.projects.rules import (
    IgnoreRules,
    TooManyRules,
    git_directories,
    is_never,
    plain_names,
)

NAMES = st.sampled_from(["a", "b", "ab", "a.b", "b.txt", "fo o", "x[1]", "#c", "!d", "d*", ".e"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
PATTERNS = st.sampled_from(
    [
        "a", "*.txt", "a/", "/a", "a/b", "**/b", "a/**", "a/**/b", "!a", "!b.txt", "f*", "[ab]",
        "[!a]*", "[^a]b", "\\#c", "\\!d", "x\\[1\\]", "?", "*", "!*/", "fo\\ o", "d\\*", "b*/",
        "/**/a", "**", "a/*", "!a/ab", "a ", "[a", "x[[]1]", "[]a]", "a\\", ".*", "", "# note",
    ]
)  # fmt: skip
TEXTS = st.lists(PATTERNS, min_size=1, max_size=5).map("\n".join)


def listed_by_git(top: Path) -> set[str]:
    command = ["git", "-C", str(top), "-c", "core.excludesFile=/dev/null", "ls-files"]
    done = subprocess.run(
        [*command, "-co", "--exclude-standard", "-z"], capture_output=True, check=True
    )
    return {path for path in done.stdout.decode().split("\0") if path}


@given(paths=st.sets(PATHS, max_size=25), top_rules=TEXTS, inner=st.dictionaries(NAMES, TEXTS))
def test_same_files_are_left_out_as_by_git(
    tmp_path_factory, paths: set[str], top_rules: str, inner: dict[str, str]
) -> None:
    top = tmp_path_factory.mktemp("tree")
    subprocess.run(["git", "init", "-q", str(top)], check=True)
    made = set()
    for path in sorted(paths):
        if not any((top / part).is_file() for part in _above(path)) and not (top / path).is_dir():
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_text("")
            made.add(path)
    rules = IgnoreRules()
    for directory, text in {"": top_rules, **inner}.items():
        if (top / directory).is_dir():
            (top / directory / ".gitignore").write_text(text)
            rules.add(directory, text)

    kept = {path for path in made if not rules.leave_out(path, is_directory=False)}

    assert kept == listed_by_git(top) & made


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def test_pattern_made_to_take_long_takes_no_time() -> None:
    rules = IgnoreRules()
    rules.add("", "*a*a*a*a*a*a*a*a*a*a*ab\n" + "**/a*/" * 20 + "b\n")
    began = time.process_time()
    for name in ("a" * 250 + "b" + "c", "/".join(["a" * 40] * 60) + "/c"):
        assert not rules.leave_out(name, is_directory=False)
    assert time.process_time() - began < 1


def test_too_many_or_too_large_rules_are_refused() -> None:
    for texts in (["a*b\n" * 6_000] * 2, ["#" + "x" * 600_000] * 2):
        rules = IgnoreRules()
        rules.add("", texts[0])
        with pytest.raises(TooManyRules):
            rules.add("inner", texts[1])


def test_git_directory_is_never_part_of_a_project() -> None:
    rules = IgnoreRules()
    rules.add("", "!.git\n!.git/**\n")
    assert rules.leave_out(".git/config", is_directory=False)
    assert rules.leave_out("sub/.git", is_directory=True)
    assert not rules.leave_out(".github/workflows/test.yml", is_directory=False)


def test_name_that_some_file_system_takes_for_dot_git_is_never_part_of_a_project() -> None:
    for name in (".git", ".GIT", ".Git ", ".git.", "git~1", ".g\u200cit", ".git::$DATA"):
        assert is_never(f"sub/{name}/hooks/pre-commit"), name
    for name in (".github", ".gitignore", ".gitmodules", "git", "a.git", ".gi\u0301t"):
        assert not is_never(f"sub/{name}/x"), name


@pytest.mark.parametrize(
    "paths",
    [
        {"sub/HEAD", "sub/config", "sub/objects", "sub/objects/x", "sub/refs", "sub/refs/x"},
        {"sub/HEAD", "sub/config", "sub/commondir"},
        {"HEAD", "config", "objects", "refs"},
        {"sub/HEAD", "sub/config", "sub/objects"},
        {"sub/XHEAD", "sub/objects", "sub/refs"},
    ],
)
def test_directory_counts_as_a_repository_if_git_takes_it_for_one(
    tmp_path: Path, paths: set[str]
) -> None:
    (tmp_path / "sub").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "real")], check=True)
    texts = {"HEAD": "ref: refs/heads/main\n", "commondir": str(tmp_path / "real/.git")}
    for path in sorted(paths):
        if path.endswith(("objects", "refs")):
            (tmp_path / path).mkdir()
        else:
            (tmp_path / path).write_text(texts.get(path.rpartition("/")[2], ""))
    top = tmp_path if "HEAD" in paths else tmp_path / "sub"
    done = subprocess.run(["git", "-C", str(top), "rev-parse", "--git-dir"], capture_output=True)
    assert bool(git_directories(paths)) == (done.returncode == 0)


def test_names_to_skip_are_those_without_magic_or_exception() -> None:
    assert plain_names("node_modules/\n# note\n*.log\nbuild\n/dist\na/b\n") == (
        "node_modules",
        "build",
    )
    assert plain_names("node_modules/\n!node_modules/kept\n") == ()


def test_time_that_rules_take_is_bounded_by_comparisons_and_not_by_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fumehood.projects.rules.MAX_TESTS", 100_000)
    rules = IgnoreRules()
    rules.add("", "\n".join([f"**/{'a/' * 24}b"] * 100))
    checked = []

    def check_all() -> None:
        for number in range(1000):
            checked.append(number)
            rules.leave_out(f"{'a/' * 50}{number}", is_directory=False)

    with pytest.raises(TooManyRules):
        check_all()
    assert len(checked) < 5
    plain = IgnoreRules()
    plain.add("", "\n".join(f"*.{number}" for number in range(100)))
    for number in range(900):
        plain.leave_out(f"{number}.txt", is_directory=False)
