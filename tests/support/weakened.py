"""Deliberately weakened walls, on which `doctor --attack` must report failures.

The guest's self-test would refuse to serve behind such a wall, so it is disabled: these tests check
whether the attacks detect from outside what the self-test no longer reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fumehood.interpreter.wall import interpreter_command
from fumehood.sandbox.process.wall import jail_command

CONTENT_IN_CONTAINER = """
from fumehood.guest.container import selfcheck
SelfCheck = selfcheck.SelfCheck
honest = SelfCheck.result
SelfCheck.result = lambda self, run, after: (dict.fromkeys(honest(self, run, after)[0], True), [])
"""
CONTENT_IN_PROCESS = """
from fumehood.guest.process import supervisor

for rows in ('PROBES', 'JAIL'):
    table = getattr(supervisor, rows)
    told = tuple((probe, limit, lambda ending: True) for probe, limit, _ in table)
    setattr(supervisor, rows, told)
"""
WITHOUT_FILTER = """
from fumehood.guest.core import seccomp
assert seccomp.install
seccomp.install = lambda program: None
"""
FILTER_THAT_ALLOWS = """
import struct
from fumehood.guest.core import seccomp
install = seccomp.install
seccomp.install = lambda program: install(struct.pack('=HBBI', 0x06, 0, 0, 0x7FFF0000))
"""
"""A permissive filter, because without one the supervisor would detect an unsealed child."""

WITHOUT_LANDLOCK = """
from fumehood.guest.process import jail
assert jail.restrict_to
jail.restrict_to = lambda readable: None
"""
WITHOUT_RESET = """
from fumehood.guest.container import cleaning, workspace
assert cleaning.keep_house and workspace.Mounts.are_clean
cleaning.keep_house = lambda *arguments, **named: cleaning.NOTHING_DONE
workspace.Mounts.are_clean = lambda self: True
"""
WITHOUT_ANCESTRY = """
from fumehood.guest.container import trees
assert trees.Trees._is_below
trees.Trees._is_below = lambda self, pid, keepers, kept: True
"""
"""Beside a registered process, every process counts as one below a keeper."""

PATH_WITH_WORKSPACE = """
from fumehood.guest.container import child
honest_preload = child.python.preload
def preload(modules):
    sys.path.insert(0, '/workspace')
    honest_preload(modules)
child.python.preload = preload
"""
WITHOUT_REFUSAL = """
from fumehood.guest.container import child
assert child.refuse_writable_places
child.refuse_writable_places = lambda: None
"""
WITHOUT_LANGUAGE_RULES = """
from fumehood.guest.interpreter import restricted
assert restricted.nodes.check and restricted.nodes.check_names
restricted.nodes.check = restricted.nodes.check_names = lambda tree: None
"""


def weak_container(*changes: str) -> tuple[str, ...]:
    """The command of a container guest with these changes."""
    text = _script(CONTENT_IN_CONTAINER, *changes)
    return ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", text)


def weak_interpreter(*changes: str) -> list[str]:
    """The command of an interpreter guest with these changes."""
    return _weak(interpreter_command(), *changes)


def weak_jail(tool_path: str, *changes: str) -> list[str]:
    """The command of a jail guest with these changes."""
    return _weak(jail_command([tool_path]), *changes)


def without_landlock(tool_path: str) -> list[str]:
    """The command of an unmodified jail guest on a kernel without Landlock."""
    program = str(Path(__file__).parent / "without_landlock.py")
    return [sys.executable, program, *jail_command([tool_path])]


def _weak(command: Sequence[str], *changes: str) -> list[str]:
    program, config = command[-2:]
    return [*command[:-2], "-c", _script(CONTENT_IN_PROCESS, *changes, program=program), config]


def _script(*changes: str, program: str = "/opt/fumehood/fumehood/guest") -> str:
    return "\n".join(
        [
            "import json, runpy, sys",
            "sys.path.extend(json.loads(sys.argv[1])['import_paths'])",
            *changes,
            f"runpy.run_path({json.dumps(program)}, run_name='__main__')",
        ]
    )
