"""The diffs of a project are bounded as a whole, whatever its session has written."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from fumehood.projects import changes, service
from fumehood.projects.changes import Baseline, Changes, patch_of, shown
from fumehood.projects.tree import Entry, ProjectDirectory
from fumehood.projects.writing import Change

OLD = "".join(f"{number % 3}\n" for number in range(100)).encode()
NEW = "".join(f"{number % 2}\n" for number in range(100)).encode()


def entry(content: bytes) -> Entry:
    return Entry(len(content), False, hashlib.sha256(content).hexdigest())


CHANGES = [Change(f"{number}.txt", entry(OLD), entry(NEW)) for number in range(20)]


def test_diffs_of_many_files_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ({one.path: content for one in CHANGES} for content in (OLD, NEW))
    whole, is_cut = patch_of(CHANGES, (), old, new)
    assert not is_cut
    monkeypatch.setattr(changes, "MAX_ALL_STEPS", 1_000_000)

    told = shown(CHANGES, {}, old, new, "/project")["changed"]
    coarse, is_cut = patch_of(CHANGES, (), old, new)

    marks = [one.get("diff_coarse", False) for one in told]
    assert marks == sorted(marks)
    assert {True, False} == set(marks)
    assert not is_cut
    assert len(coarse) > len(whole)


def test_old_contents_of_many_files_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in CHANGES:
        (tmp_path / one.path).write_bytes(OLD)
    monkeypatch.setattr(service, "SHOWN_BYTES", 5 * len(OLD))
    with ProjectDirectory(tmp_path) as project:
        found = Changes(CHANGES, frozenset(), frozenset(), {}, {}, [])
        judged = service._judge(project, found, Baseline({}, {}, False))
    assert len(judged.changes) == len(CHANGES)
    assert not judged.conflicts
    assert len(judged.old) == 5


def test_patch_names_each_file_that_does_not_fit_and_shows_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = ({one.path: content for one in CHANGES} for content in (OLD, NEW))
    new["3.txt"] = b"".join(b"another %d\n" % number for number in range(5000))
    one = patch_of(CHANGES[:1], (), old, new)[0]
    monkeypatch.setattr(changes, "MAX_PATCH_BYTES", 10 * len(one))
    patch, is_cut = patch_of(CHANGES, (), old, new)
    assert is_cut
    assert re.findall(r"^diff --git a/(\S+)", patch, re.MULTILINE) == [one.path for one in CHANGES]
    named = re.findall(r"^Files a/(\S+) and ", patch, re.MULTILINE)
    assert named[0] == "3.txt"
    assert 5 < patch.count("@@ -") == len(CHANGES) - len(named)
    assert len(patch) < 10 * len(one) + 200 * len(CHANGES)


EXECUTED = {
    ".envrc": "direnv", "sub/.ENVRC": "direnv", ".envrc. ": "direnv", ".e\ufe0fnvrc": "direnv",
    "Makefile": "make", "a/rules.mk": "make", "sub\\Makefile": "make",
    ".vscode/tasks.json": "editors", "a/.vscode": "editors", ".idea/x/y": "editors",
    "package.json": "npm", "web/vite.config.ts": "Node", "tests/conftest.py": "pytest",
    "x/sitecustomize.py": "Python", "evil.pth": "Python", ".husky/pre-commit": "git hooks",
    ".gitattributes": "git", ".github/workflows/ci.yml": "CI", "compose.prod.yaml": "Docker",
    ".claude/settings.json": "coding agents", ".mcp.json": "coding agents",
    ".cursor/mcp.json": "coding agents",
    **dict.fromkeys(
        (
            "CLAUDE.md", "sub/AGENTS.md", "GEMINI.md", ".cursorrules", ".cursor/rules/a.mdc",
            ".windsurfrules", ".clinerules", ".clinerules/a.md", ".roorules-code",
            ".github/copilot-instructions.md", ".github/instructions/a.md",
        ),
        "coding agents, as instructions",
    ),
}  # fmt: skip
HARMLESS = (
    "envrc", "makefiles/a.txt", "vscode/tasks.json", "package.json.md", "src/app.py", "README.md",
    "test_conftest.py", "docs/composer.md", "a.git", "build/out.txt", "configure.md",
    "docs/claude.md.txt", "my-agents.md", "copilot-instructions.md",
)  # fmt: skip


def test_approver_sees_what_his_tools_execute() -> None:
    """Twin: other files are not marked, and neither is what goes away."""
    of = [Change(path, None, entry(NEW)) for path in (*EXECUTED, *HARMLESS)]
    of += [Change("gone/Makefile", entry(OLD), None)]
    told = shown(of, {}, {}, {}, "/project")
    assert {one["path"]: one["by"] for one in told["executed"]} == EXECUTED
    assert "executed" not in shown(of[len(EXECUTED) :], {}, {}, {}, "/project")


def test_attack_what_the_host_wrote_later_is_in_no_diff(tmp_path: Path) -> None:
    """Twin: the host's file is as it was copied. Control: with the host's file in the place of the
    copied one, its lines are in the diff.
    """
    change = CHANGES[0]
    later = b"PIN=1234\n" + OLD
    for content, is_seen in ((later, False), (OLD, True)):
        (tmp_path / change.path).write_bytes(content)
        with ProjectDirectory(tmp_path) as project:
            found = Changes([change], frozenset(), frozenset(), {}, {change.path: NEW}, [])
            judged = service._judge(project, found, Baseline({}, {}, False))
        patch, _ = patch_of(judged.changes, judged.conflicts, judged.old, found.texts)
        told = shown(judged.changes, judged.conflicts, judged.old, found.texts, "/project")
        assert "PIN" not in patch + str(told)
        assert ("@@" in patch) is is_seen
        said = "Files a/0.txt and b/0.txt (in conflict, not shown) differ\n"
        assert patch.endswith(said) is not is_seen
        assert [one.get("conflict") for one in told["changed"]] == [
            None if is_seen else "is not as it was copied"
        ]
    assert "-PIN=1234\n" in patch_of([change], (), {change.path: later}, {change.path: NEW})[0]


def test_content_that_is_read_after_the_comparison_is_in_no_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / CHANGES[0].path).write_bytes(OLD)
    monkeypatch.setattr(ProjectDirectory, "content", lambda *_: b"PIN=1234\n")
    with ProjectDirectory(tmp_path) as project:
        found = Changes(CHANGES[:1], frozenset(), frozenset(), {}, {}, [])
        judged = service._judge(project, found, Baseline({}, {}, False))
    assert (judged.conflicts, judged.old) == ({}, {})


def test_file_that_is_only_named_is_called_binary_only_if_it_is_and_git_applies_nothing(
    tmp_path: Path,
) -> None:
    """Control: without the file whose diff is not shown, git applies the others."""
    named, whole = CHANGES[:2]
    contents = {one.path: OLD for one in (named, whole)}, {one.path: NEW for one in (named, whole)}
    for path, content in contents[0].items():
        (tmp_path / path).write_bytes(content)
    git = ["git", "-C", str(tmp_path), "apply", "--check"]
    told = {}
    for case, conflicts, old in (
        ("conflict", {named.path}, {whole.path: OLD}),
        ("large", (), {whole.path: OLD}),
        ("binary", (), {named.path: b"\0", whole.path: OLD}),
    ):
        patch, is_cut = patch_of([named, whole], conflicts, old, contents[1])
        assert is_cut
        told[case] = patch.splitlines()[1]
        assert subprocess.run(git, input=patch.encode(), check=False).returncode != 0
    assert told == {
        "conflict": "Files a/0.txt and b/0.txt (in conflict, not shown) differ",
        "large": "Files a/0.txt and b/0.txt differ",
        "binary": "Binary files a/0.txt and b/0.txt differ",
    }
    patch, _ = patch_of([whole], (), *contents)
    assert subprocess.run(git, input=patch.encode(), check=False).returncode == 0
