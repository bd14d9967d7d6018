"""Copies of the engine from which a part is deleted, and processes that import what is left.

A copy has the folders of the checkout, made of hard links, and its own metadata of a distribution:
the entry points that `importlib.metadata` finds are those of the copy's `pyproject.toml`.

Run as a program, this module is an `Importer`: it loads what the engine imports from others once,
and forks for each copy. So a child pays only for the engine's own modules.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from support.parts import PACKAGE, ROOT, TABLE, Line, Part

CONTRACT = ROOT / "tests" / "contract"
"""The tests of the kernel. They use no part."""

PLUGIN = "anyio.pytest_plugin"
"""The only plugin of pytest that these tests need."""

FOLDERS = (PACKAGE, "builtin_tools", "sandbox_images")
FILES = ("pyproject.toml", TABLE)


class Unfit(Exception):
    """A line that a part lists is not in its file, or more than once."""


@dataclass(frozen=True)
class Tree:
    """A copy of the checkout, which a test may change."""

    root: Path

    @property
    def import_path(self) -> list[str]:
        """What a process puts first to use this copy."""
        return [str(self.root / "engine"), str(self.root / "builtin_tools")]

    def copy(self, to: Path) -> Tree:
        """Another copy, for as many links as there are files."""
        shutil.copytree(self.root, to, copy_function=os.link)
        return Tree(to)

    def write(self, file: str, text: str) -> None:
        """Replace a file, and not what is linked to it."""
        path = self.root / file
        new = path.with_name(f".{path.name}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)

    def append(self, file: str, text: str) -> None:
        """Add to the end of a file."""
        self.write(file, (self.root / file).read_text(encoding="utf-8") + text)

    def delete(self, part: Part) -> None:
        """Delete a part's files and the lines that it lists.

        Raises:
            Unfit: one of its files is missing, or a line is not there exactly once.
        """
        for file in part.files:
            path = self.root / PACKAGE / file
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
            else:
                raise Unfit(f"{TABLE} names {file}, which does not exist")
        for line in part.lines:
            self._delete_line(line)
        self.write_metadata()

    def _delete_line(self, line: Line) -> None:
        before = (self.root / line.file).read_text(encoding="utf-8")
        found = re.compile(rf"^[ \t]*{re.escape(line.text)}\n", re.MULTILINE)
        after, times = found.subn("", before)
        if times != 1:
            raise Unfit(f"{line.file} has the line {line.text!r} {times} times, and not once")
        self.write(line.file, after)

    def write_metadata(self) -> None:
        """Write what an installation of this copy would say of itself."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        groups = project["project"].get("entry-points", {})
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
        ]
        installed = distribution("fumehood")
        place = f"engine/fumehood-{installed.version}.dist-info"
        (self.root / place).mkdir(exist_ok=True)
        self.write(f"{place}/METADATA", installed.read_text("METADATA") or "")
        self.write(f"{place}/entry_points.txt", "\n".join(lines) + "\n")


def copy_of_checkout(to: Path, root: Path = ROOT) -> Tree:
    """Copy what the engine runs from, compiled. Links to this copy are compiled, too."""
    for folder in FOLDERS:
        shutil.copytree(root / folder, to / folder)
    for file in FILES:
        shutil.copy2(root / file, to / file)
    tree = Tree(to)
    tree.write_metadata()
    compile_all = [sys.executable, "-m", "compileall", "-q", *tree.import_path]
    subprocess.run(compile_all, check=True, timeout=600)
    return tree


@dataclass(frozen=True)
class Ending:
    """What came of a copy in a process of its own."""

    broken: Mapping[str, str] = field(default_factory=dict)
    """The modules that could not be imported, and why."""
    contract: str | None = None
    """What the contract's tests wrote if one failed, else None."""


class Importer:
    """A process that forks for each copy."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def try_out(
        self, tree: Tree, modules: Sequence[str], *, contract: Sequence[str] | None = None
    ) -> Ending:
        """Import modules from a copy, and run the contract's tests if all could be imported.

        `contract` are arguments of pytest for these; None runs no test.
        """
        request = {"path": tree.import_path, "modules": modules, "contract": contract}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that imports has ended"
        return Ending(**json.loads(answer))


@contextmanager
def importing(tree: Tree) -> Iterator[Importer]:
    """Start a process for the copies of `tree`."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment["PYTHONPATH"] = str(ROOT / "tests")
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each would be loaded for each copy
    with subprocess.Popen(
        [sys.executable, "-m", "support.unplugged", str(tree.root / PACKAGE)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield Importer(process)


# -- in that process ---------------------------------------------------------------------------


def serve(package: Path) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a test or a module prints is no answer
    _load_what_others_made(package)
    # A child would look through all of this again and again.
    gc.disable()
    gc.freeze()
    for request in sys.stdin:
        answers.write(_in_child(json.loads(request)) + "\n")
        answers.flush()


def _load_what_others_made(package: Path) -> None:
    """Load the modules of other distributions that the engine's modules begin with."""
    for plugin in ("pytest", PLUGIN):
        importlib.import_module(plugin)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            for name in names:
                if name.partition(".")[0] not in ("fumehood", "fumehood_tools"):
                    with suppress(ImportError):  # frameworks are in an environment of their own
                        importlib.import_module(name)
    assert "fumehood" not in sys.modules


def _in_child(request: dict[str, Any]) -> str:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = json.dumps(_tried(**request))
            with os.fdopen(writable, "w", encoding="utf-8") as answer:
                answer.write(result)
        except BaseException:  # its answer, which is missing, says so
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as answer:
        result = answer.read()
    _, status = os.waitpid(child, 0)
    if not result:
        raise ChildProcessError(f"the copy's process ended with {status} and without an answer")
    return result


def _tried(path: list[str], modules: list[str], contract: list[str] | None) -> dict[str, Any]:
    # The checkout is on the path of its environment, and must not stand in for what was deleted.
    checkout = {str(ROOT / "engine"), str(ROOT / "builtin_tools")}
    sys.path[:] = path + [entry for entry in sys.path if entry not in checkout]
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT / "tests")])
    broken = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Of other distributions a host may have none: an extra that is not installed.
            if str(error.name).startswith("fumehood"):
                broken[name] = f"there is no {error.name}"
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"
    assert Path(str(distribution("fumehood").locate_file(""))) == Path(path[0])
    loaded = [name for name in sys.modules if name.split(".")[0] in ("fumehood", "fumehood_tools")]
    for name in loaded:
        file = sys.modules[name].__file__
        assert file is not None, name
        assert file.startswith(tuple(path)), file
    if broken or contract is None:
        return {"broken": broken}
    return {"broken": {}, "contract": _contract_failures(contract)}


def _contract_failures(arguments: list[str]) -> str | None:
    import pytest

    written = os.memfd_create("contract")
    os.dup2(written, 1)
    gc.enable()
    status = pytest.main([
        f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}",
        f"--confcutdir={CONTRACT}", "-p", "no:cacheprovider", "-p", PLUGIN,
        # Plugins' modules are loaded already.
        "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
        *arguments, str(CONTRACT),
    ])  # fmt: skip
    sys.stdout.flush()
    return None if status == 0 else os.pread(written, 1 << 20, 0).decode(errors="replace")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
