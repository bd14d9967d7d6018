"""`make check`: which tests a change needs (`tests/needed.toml`), and that those run once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.parts import PACKAGE, ROOT, read_parts


@pytest.fixture(scope="module")
def script() -> Any:
    path = ROOT / "scripts/needed.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def needs(script: Any) -> Any:
    return script.Needs()


def test_every_folder_and_file_of_the_engine_has_a_row(needs: Any) -> None:
    found = {
        f"{PACKAGE}/{path.name}" + "/" * path.is_dir()
        for path in (ROOT / PACKAGE).iterdir()
        if path.name != "__pycache__"
    }
    assert len(found) > 30
    assert found - needs.rows.keys() == set()


def test_every_part_has_a_row(needs: Any) -> None:
    files = {f"{PACKAGE}/{file}" for part in read_parts().values() for file in part.files}
    assert files - needs.rows.keys() == set()


def test_every_test_file_is_needed_by_some_part_of_the_product(needs: Any) -> None:
    """And not only because all are needed."""
    some = [tests for path, tests in needs.rows.items() if not path.startswith("tests/")]
    reached = needs.always.union(*(tests for tests in some if tests != needs.all))
    assert len(needs.all) > 300
    assert needs.all - reached == set()


NEEDED = {
    "policy": (
        ["engine/fumehood/policy/rules.py", "docs/reference/policy.md", "CHANGELOG.md"],
        ["adversarial/test_policy", "acceptance/test_documentation", "contract/test_kernel"],
        ["integration/test_cluster", "adversarial/test_container", "acceptance/test_web"],
    ),
    "guest": (
        ["engine/fumehood/guest/container/supervisor.py"],
        ["adversarial/test_container", "adversarial/test_zygotes", "unit/test_parts"],
        ["acceptance/test_web", "acceptance/test_budgets"],
    ),
    "part-in-a-folder-of-the-kernel": (
        ["engine/fumehood/guest/streams/calls.py"],
        ["acceptance/test_workshop", "contract/test_kernel"],
        ["adversarial/test_zygotes"],
    ),
    "test": (
        ["tests/acceptance/test_web.py"],
        ["acceptance/test_web", "contract/test_kernel"],
        ["acceptance/test_web_pages"],
    ),
    "tests-of-a-framework": (
        ["tests/frameworks/test_autogen.py"],
        ["integration/test_frameworks"],
        ["acceptance/test_web"],
    ),
    "conftest-of-a-folder": (
        ["tests/adversarial/conftest.py"],
        ["adversarial/test_socket", "adversarial/test_policy"],
        ["acceptance/test_web"],
    ),
}


@pytest.mark.parametrize("name", NEEDED)
def test_change_needs_its_tests_and_not_others(needs: Any, name: str) -> None:
    changed, needed, not_needed = NEEDED[name]
    tests = needs.of(changed)
    assert tests.issuperset(f"tests/{test}.py" for test in needed)
    assert needs.all - tests > {f"tests/{test}.py" for test in not_needed}


@pytest.mark.parametrize(
    "folder",
    [
        "approvals", "attack", "executors", "gateway", "guest", "guest/container", "guest/interpreter",
        "guest/process", "identity", "mcp", "pipeline", "policy", "protocol", "sandbox", "sandbox/process",
        "web",
    ],
)  # fmt: skip
def test_change_of_a_wall_or_gate_needs_attacks(needs: Any, folder: str) -> None:
    needed = needs.of([f"{PACKAGE}/{folder}/__init__.py"])
    assert any(test.startswith("tests/adversarial/") for test in needed)


def test_documentation_alone_needs_only_its_own_tests(needs: Any) -> None:
    page = {"tests/unit/test_documentation.py", "tests/unit/test_safe_to_type.py"}
    assert needs.of(["docs/explanation/state.md", "CONTRIBUTING.md"]) == page
    assert "tests/acceptance/test_documentation.py" in needs.of(["docs/howto/cache-results.md"])
    assert needs.of([]) == set()


@pytest.mark.parametrize(
    "changed",
    [
        "engine/fumehood/core/envelope.py", "engine/fumehood/new/file.py", "new", "pyproject.toml",
        "tests/conftest.py", "tests/support/wait.py",
    ],
)  # fmt: skip
def test_what_everything_uses_and_what_no_row_names_need_all_tests(
    needs: Any, changed: str
) -> None:
    assert needs.of(["CHANGELOG.md", changed]) == needs.all


# -- the table and the change ------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout whose table is true."""
    for folder in ("tests/unit/a", "tests/contract", "engine/fumehood/a"):
        (tmp_path / folder).mkdir(parents=True)
    for test in ("unit/a/test_a", "unit/test_b", "contract/test_c"):
        (tmp_path / f"tests/{test}.py").touch()
    (tmp_path / "engine/parts.toml").write_text('[part]\nfiles = ["a/"]\n')
    write_table(tmp_path)
    return tmp_path


def write_table(checkout: Path, path: str = "tests/", test: str = "unit/a") -> None:
    (checkout / "tests/needed.toml").write_text(
        'always = ["contract"]\ndocumentation = ["docs/"]\n'
        f'[[row]]\nparts = ["part"]\ntests = ["{test}"]\n'
        f'[[row]]\npaths = ["{path}"]\ntests = ["*"]\n'
    )


def test_row_of_a_part_stands_for_its_files(checkout: Path, script: Any) -> None:
    needed = script.Needs(checkout).of(["engine/fumehood/a/a.py"])
    assert needed == {"tests/unit/a/test_a.py", "tests/contract/test_c.py"}


@pytest.mark.parametrize("test", ["unit/c", "unit/test_c.py", "support", "unit/a/*_b.py"])
def test_row_without_a_test_is_refused(checkout: Path, script: Any, test: str) -> None:
    write_table(checkout, test=test)
    with pytest.raises(ValueError, match="no test matches"):
        script.Needs(checkout)


@pytest.mark.parametrize("path", ["engine/fumehood/b/", "engine/fumehood/a/"])
def test_row_of_a_missing_path_or_a_second_one_is_refused(
    checkout: Path, script: Any, path: str
) -> None:
    write_table(checkout, path=path)
    with pytest.raises(ValueError, match=f"{path} has two rows or does not exist"):
        script.Needs(checkout)


def git(checkout: Path, *arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=checkout, check=True, capture_output=True)


def commit(checkout: Path, *changed: str) -> None:
    for file in changed:
        (checkout / file).write_text(file)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--message=change")


def test_change_is_what_main_has_not_or_its_last_commit(tmp_path: Path, script: Any) -> None:
    git(tmp_path, "init", "--initial-branch=main")
    (tmp_path / ".gitignore").write_text("ignored\n")
    commit(tmp_path, "first")
    commit(tmp_path, "second")
    assert script.changed_files(root=tmp_path) == ["second"]
    (tmp_path / "first").write_text("other")
    for name in ("ignored", "new \u00e4"):
        (tmp_path / name).touch()
    assert script.changed_files(root=tmp_path) == ["first", "second", "new \u00e4"]
    git(tmp_path, "switch", "--create=branch")
    (tmp_path / "second").rename(tmp_path / "renamed")
    commit(tmp_path, "third")
    commit(tmp_path, "fourth")
    changed = {"first", "fourth", "new \u00e4", "renamed", "second", "third"}
    assert set(script.changed_files(root=tmp_path)) == changed
    assert script.changed_files("HEAD^..HEAD", root=tmp_path) == ["fourth"]


# -- the run -----------------------------------------------------------------------------------

PYTHON = """#!/bin/sh
[ "$1" != scripts/needed.py ] || exec cat needed
printf '%s\\n' "$*" >> runs
"""
"""Prints what is needed, or writes down how it was called."""


@pytest.fixture
def runs(tmp_path: Path, script: Any) -> Any:
    """Run `scripts/test` with another interpreter, and give the test files of each run of pytest."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "Makefile").write_text("lint:\n\t@true\n")
    for name in ("python", "fumehood"):
        (tmp_path / name).write_text(PYTHON if name == "python" else "#!/bin/sh\n")
        (tmp_path / name).chmod(0o700)

    def run(*arguments: str) -> list[list[str]]:
        (tmp_path / "runs").write_text("")
        done = subprocess.run(
            [str(ROOT / "scripts/test"), str(tmp_path), *arguments],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "CI": "true"},
            stdout=subprocess.PIPE,
        )
        assert done.returncode == 0, done.stdout
        lines = (tmp_path / "runs").read_text().splitlines()
        return [[word for word in line.split() if word.startswith("tests/")] for line in lines]

    return run


def without_postgresql(runs: list[list[str]]) -> list[str]:
    """Those that run a second time there have names of tests among them."""
    files = [run for run in runs if not any("::" in name for name in run)]
    return sorted(file for run in files for file in run)


def test_whole_run_has_each_test_file_once(runs: Any, needs: Any) -> None:
    whole = runs()
    assert without_postgresql(whole) == sorted(needs.all)
    assert len(whole) == 4


def test_run_of_a_change_has_each_needed_file_once(runs: Any, needs: Any, tmp_path: Path) -> None:
    files = [
        "tests/adversarial/test_jail.py", "tests/adversarial/test_policy.py",
        "tests/contract/test_kernel.py", "tests/integration/test_crash_approval.py",
        "tests/unit/policy/test_loader.py",
    ]  # fmt: skip
    (tmp_path / "needed").write_text("\n".join(files))
    several = runs("--changed")
    assert without_postgresql(several) == files
    assert len(several) == 4
    (tmp_path / "needed").write_text(files[4])
    assert runs("--changed") == [[files[4]]]
    (tmp_path / "needed").write_text("")
    assert runs("--changed") == []
