"""Modules a guest process loads, including those a package's `__init__` pulls in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood.interpreter.wall import interpreter_command
from fumehood.sandbox.process.wall import jail_command

# Ours and third-party modules that may be loaded inside the interpreter's guest.
EXPECTED = {
    "fumehood.guest", "fumehood.guest.core", "fumehood.guest.core.children",
    "fumehood.guest.core.kernel", "fumehood.guest.core.limits",
    "fumehood.guest.core.pipes", "fumehood.guest.core.seccomp", "fumehood.guest.core.syscalls", "fumehood.guest.interpreter",
    "fumehood.guest.interpreter.calculator", "fumehood.guest.interpreter.guards",
    "fumehood.guest.interpreter.modules",
    "fumehood.guest.interpreter.nodes",
    "fumehood.guest.interpreter.filter", "fumehood.guest.interpreter.programs",
    "fumehood.guest.interpreter.restricted",
    "fumehood.guest.interpreter.sizes", "fumehood.guest.process", "fumehood.guest.process.zygote",
    "fumehood.guest.process.filters",
    "fumehood.guest.process.supervisor", "RestrictedPython",
    "RestrictedPython.Eval", "RestrictedPython.Guards", "RestrictedPython.Limits",
    "RestrictedPython.PrintCollector", "RestrictedPython.Utilities", "RestrictedPython._compat",
    "RestrictedPython._types", "RestrictedPython.compile", "RestrictedPython.transformer",
    "asteval", "asteval.asteval", "asteval.astutils", "asteval.version", "fumehood",
    "fumehood.protocol", "fumehood.protocol.framing", "fumehood.protocol.strict_json",
}  # fmt: skip


@pytest.mark.row("S1", "S2")
def test_guest_loads_only_its_own_modules_and_none_of_the_host() -> None:
    config = json.loads(interpreter_command()[-1])
    program = (
        f"import sys; sys.path.extend({config['import_paths']!r})\n"
        "before = set(sys.modules)\n"
        "from fumehood.guest.process import supervisor, zygote\n"
        f"zygote.preload({config!r})\n"
        "import json; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program],
        env={}, capture_output=True, check=True, timeout=600,
    )  # fmt: skip
    names = set(json.loads(loaded.stdout))
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign - {"numpy", "numpy_financial"} == EXPECTED


# What a tool's module needs of the engine, loaded once for all sandboxed functions.
EXPECTED_IN_THE_JAIL = {
    "fumehood.guest", "fumehood.guest.core", "fumehood.guest.core.children",
    "fumehood.guest.core.kernel", "fumehood.guest.core.landlock",
    "fumehood.guest.core.limits", "fumehood.guest.core.pipes", "fumehood.guest.core.seccomp", "fumehood.guest.core.syscalls",
    "fumehood.guest.process", "fumehood.guest.process.zygote",
    "fumehood.guest.process.filters",
    "fumehood.guest.process.jail",
    "fumehood.guest.process.supervisor",
    "fumehood", "fumehood.core",
    "fumehood.core.arguments", "fumehood.core.call",
    "fumehood.core.errors", "fumehood.core.identity", "fumehood.core.json_types",
    "fumehood.core.languages", "fumehood.core.limits", "fumehood.core.long_text",
    "fumehood.core.names",
    "fumehood.core.tool", "fumehood.core.value",
    "fumehood.core.workspace_path", "fumehood.executors",
    "fumehood.executors.inside",
    "fumehood.executors.parts", "fumehood.protocol",
    "fumehood.protocol.framing", "fumehood.protocol.strict_json", "fumehood.registry",
    "fumehood.registry.declare", "fumehood.registry.definitions", "fumehood.registry.json_schema",
}  # fmt: skip


@pytest.mark.row("S1")
def test_jail_loads_only_the_modules_a_tool_needs_from_the_host() -> None:
    config = json.loads(jail_command([])[-1])
    program = (
        f"import sys; sys.path.extend({config['import_paths']!r})\n"
        "from fumehood.guest.process import supervisor, zygote\n"
        f"zygote.preload({config!r})\n"
        "import json; print(json.dumps([n for n in sys.modules if n.startswith('fumehood')]))"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program],
        env={}, capture_output=True, check=True, timeout=600,
    )  # fmt: skip
    assert set(json.loads(loaded.stdout)) == EXPECTED_IN_THE_JAIL


@pytest.mark.row("S2")
def test_guest_starts_with_an_empty_environment(shared_daemon, client) -> None:
    from support.processes import children_of_guest, guest_of

    assert client.calculate("1 + 1").body["success"]
    guest = guest_of(shared_daemon.process.pid)
    for process in [guest, *children_of_guest(guest)]:
        if os.geteuid() == 0:  # nobody else may look: the processes are not dumpable
            with open(f"/proc/{process.pid}/environ", "rb") as environment:
                assert environment.read() == b""
        else:
            with pytest.raises(PermissionError):
                Path(f"/proc/{process.pid}/environ").read_bytes()
