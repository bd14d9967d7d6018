"""Which lists of packages are read, and what a lock says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fumehood.images.requirements import lock_of, merged, parse_requirements
from fumehood.sandbox.images.recipe import Lock, Pinned, WrongRequirements, parse_lock

HASH, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    "line",
    ["numpy", "numpy==2.0", "numpy >= 2, <3", "numpy~=2.0.1", "a[b]", "a[b, c]==1.*", "a!=1,<2",
     'a; python_version < "3.12"', "a==1.0+cu118", "a ; sys_platform == 'linux' and extra == ''",
     "a_b.c-d", "numpy==2.0  # why"],
)  # fmt: skip
def test_requirement_keeps_its_extras_versions_and_marker(line: str) -> None:
    (kept,) = parse_requirements(f"# first\n\n{line}\n").values()
    assert kept == line.partition("  #")[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-r other.txt", "option"),
        ("--index-url https://example.org", "option"),
        ("-e .", "option"),
        ("numpy --hash=sha256:00", "not a package"),
        ("numpy==1 --global-option=x", "not a package"),
        ("git+https://example.org/a", "address"),
        ("a @ https://example.org/a.whl", "address"),
        ("a@file:///etc/passwd", "address"),
        ("https://example.org/a.whl", "address"),
        ("./a", "path"),
        ("/a/b", "path"),
        ("a-1-py3-none-any.whl", "path"),
        ("a.tar.gz[b]", "not a package"),
        ("A.WHL==1", "not a package"),
        ("a==1.0.tar.gz", "path"),
        ("a == 1.ZIP ; python_version > '3'", "path"),
        ("a ; python_version > '3' --global-option=x", "not a package"),
        ("a ; python_version > '3' --no-binary=a", "not a package"),
        ("a ; python_version > '3' -e", "not a package"),
        ("a; --pre", "not a package"),
        ("a ;--pre", "not a package"),
        ("a ; python_version > ' --no-binary=a'", "not a package"),
        ("a/b", "not a package"),
        ("a b", "not a package"),
        ("a==1; x\\\ty", "not a package"),
        ("a==", "not a package"),
        ("$(id)", "not a package"),
        ("é", "not a package"),
        ("a,b", "not a package"),
    ],
)
def test_invalid_requirement_is_refused_with_its_line(line: str, words: str) -> None:
    with pytest.raises(WrongRequirements, match=words):
        parse_requirements(f"numpy\n{line}\n")


def test_duplicate_requirement_is_refused() -> None:
    with pytest.raises(WrongRequirements, match="a-b is named twice"):
        parse_requirements("a_b==1\nA.B\n")


def test_lock_file_round_trips() -> None:
    lock = Lock((Pinned("a", "1.0", (HASH, OTHER)), Pinned("b-c", "2", (HASH,))))
    assert parse_lock(lock.text) == lock
    assert parse_lock(f"# none\n{lock.text}# end\n") == lock
    assert parse_lock("# none\n") == Lock()


@pytest.mark.parametrize(
    "line",
    ["a==1.0", "a", f"a>=1 --hash=sha256:{HASH}", "a==1 --hash=sha256:aa", f"a==1 --hash=md5:{HASH}",
     f"a==1 --hash=sha256:{HASH} --no-binary=:all:", f"a==1 ; x --hash=sha256:{HASH}",
     f"--find-links=/x a==1 --hash=sha256:{HASH}", f"a @ file:///x --hash=sha256:{HASH}",
     f"a==1 --hash=sha256:{HASH.upper()}"],
)  # fmt: skip
def test_lock_line_without_one_version_and_hashes_is_refused(line: str) -> None:
    with pytest.raises(WrongRequirements):
        parse_lock(f"b==1 --hash=sha256:{OTHER}\n{line}\n")


def test_lock_of_wheel_files_pins_exactly_these_files(tmp_path: Path) -> None:
    (tmp_path / "B_c-2.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"two")
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"one")
    lock = lock_of(sorted(tmp_path.iterdir()))
    assert [(each.name, each.version) for each in lock.packages] == [("a", "1.0"), ("b-c", "2.0")]
    assert lock.packages[0].hashes == (hashlib.sha256(b"one").hexdigest(),)
    (tmp_path / "d-1.tar.gz").write_bytes(b"")
    with pytest.raises(WrongRequirements, match="no wheel"):
        lock_of(sorted(tmp_path.iterdir()))


def test_wheel_whose_version_no_lock_can_hold_is_refused(tmp_path: Path) -> None:
    """Its lock would be stored, and could not be read again."""
    wheel = tmp_path / f"a-1.{'0' * 70}-py3-none-any.whl"
    wheel.write_bytes(b"one")
    with pytest.raises(WrongRequirements, match="must be a hash"):
        lock_of([wheel])


def test_own_requirement_overrides_the_one_of_the_parent_image() -> None:
    ours = parse_requirements("pandas\nnumpy\n")
    theirs = parse_requirements("Pandas<3\nhumanize\n")
    assert merged(ours, theirs) == "humanize\nnumpy\nPandas<3\n"
