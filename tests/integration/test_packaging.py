"""The sdist and the wheel: contents and types, and that the wheel works without the checkout."""

from __future__ import annotations

import itertools
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout."""
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


def wheel_of(source: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps",
         "--no-build-isolation", f"--wheel-dir={folder}", str(source)],
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    (built,) = folder.glob("*.whl")
    return built


def test_sdist_has_all_that_makes_the_wheel_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target=sdist", f"--directory={tmp_path}"],
        cwd=ROOT, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    (sdist,) = tmp_path.glob("*.tar.gz")
    from_sdist = wheel_of(sdist, tmp_path)
    assert from_sdist.name == wheel.name
    assert contents(from_sdist) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_contains_every_sandbox_image_file_and_its_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {"fumehood/py.typed", "fumehood_tools/py.typed"} <= set(archive.namelist())
        packed = {
            name.removeprefix("fumehood/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("fumehood/sandbox_images/")
        }
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "sandbox_images").rglob("*")
        if path.is_file()
    }
    assert packed == files
    assert "sandbox_images/common/finish" in packed


SCRIPT = """
import asyncio
from fumehood import Client, Engine, tool

@tool(sandboxed=False)
async def greet(name: str) -> str:
    return f"Hello, {name}!"

async def main() -> None:
    async with Engine(tools=[greet]) as engine:
        reveal_type(await engine.call("greet", {"name": "Ada"}, timeout_seconds=1))

with Client() as client:
    reveal_type(client.call("calculator", timeout_seconds=1.5, dry_run=True))
    reveal_type(client.call("calculator").raise_for_error().images[0].data)
    reveal_type(greet.definition.name)
asyncio.run(main())
"""
REVEALED = [
    "fumehood.core.envelope.Envelope", "fumehood.core.envelope.Envelope", "bytes | None", "str",
]  # fmt: skip
WRONG = (
    ('client.call("calculator", timeout=1.5)', "timeout"),
    ('client.call("calculator", timeout_seconds="1.5")', "timeout_seconds"),
    ("client.calls(limt=3)", "limt"),
    ("client.usage(since=3)", "since"),
    ('client.approvals.list(sate="pending")', "sate"),
    ("tool(sandbox=False)", "sandbox"),
)


def test_type_checker_infers_the_public_api_and_rejects_unknown_options(tmp_path: Path) -> None:
    right = SCRIPT.splitlines()
    (tmp_path / "script.py").write_text("\n".join([*right, *(call for call, _ in WRONG)]))
    done = subprocess.run(  # as a user's script, against the installed fumehood
        [sys.executable, "-m", "mypy", "--strict", "--config-file=",
         f"--cache-dir={ROOT / '.mypy_cache' / 'script'}", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split('"')[1] for line in lines if "Revealed type" in line] == REVEALED
    errors = [line for line in lines if ": error:" in line]
    for line, number, (_, name) in zip(
        errors, itertools.count(len(right) + 1), WRONG, strict=False
    ):
        assert line.startswith(f"script.py:{number}: error:"), done.stdout
        assert f'"{name}"' in line, done.stdout
    assert len(errors) == len(WRONG), done.stdout


@pytest.fixture
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `fumehood` program of the wheel in a fresh environment with the current dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    pip = [sys.executable, "-m", "pip", "--quiet", f"--python={folder}/bin/python", "install"]
    done = subprocess.run(
        [*pip, "--no-index", "--no-deps", str(wheel)], capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()
    for library in Path(sysconfig.get_path("purelib")).iterdir():
        is_fumehood = "fumehood" in library.name.lower() or library.suffix == ".pth"
        if not is_fumehood and not (site / library.name).exists():
            (site / library.name).symlink_to(library)
    return folder / "bin" / "fumehood"


def test_installed_wheel_calls_a_tool_without_the_checkout(installed: Path, home: Path) -> None:
    done = subprocess.run(
        [str(installed), "call", "--local", "calculator", '{"expression": "6 * 7"}'],
        cwd=home, env={**CLEAN_ENVIRONMENT, "HOME": str(home), "FUMEHOOD_HOME": str(home)},
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert '"value": 42' in done.stdout.decode()
    assert "Traceback" not in done.stderr.decode()
