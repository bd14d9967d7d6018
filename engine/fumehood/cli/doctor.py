"""`fumehood doctor`: check this host, and name a remedy for every problem."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.doctor_checks import Finding, Verdict
from fumehood.cli.escaping import printable
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import AsJson, SocketPath, counted
from fumehood.cli.show import styled
from fumehood.config import Config, ConfigError, config_file, load_config

if TYPE_CHECKING:
    from fumehood.sandbox.process.wall import InterpreterWall, JailWall


INTERPRETERS = {"asteval": (1, 0, 10), "RestrictedPython": (8, 4)}
"""Oldest version of each that may be used. Earlier ones have published escapes."""

GROUPS = {
    "Host": ("platform", "python", "asteval", "RestrictedPython"),
    "Engine": ("configuration", "state directory", "daemon", "circuits"),
    "Authority": ("approvers", "policy", "webhook", "audit key"),
    "Limits": ("interpreter:", "jail:"),
    "Docker": ("docker", "docker:"),
    "Images": ("image:",),
    "Tools": ("tools", "tools directory"),
}
"""Title → names of checks, or prefixes ending in a colon."""

COLOURS: dict[Verdict, str] = {"ok": "32", "warning": "33", "missing": "31"}
"""*Source*: ECMA-48, SGR."""

VERDICT_COLUMNS = 9
INDENT = " " * (VERDICT_COLUMNS + 2)


def doctor(
    attack: Annotated[
        bool,
        typer.Option(
            "--attack",
            help="Attack this host's own walls, safely, and show which held. Exit status 0: all "
            "held; 1: one failed; 4: one that should be here could not be tried.",
        ),
    ] = False,
    wall: Annotated[
        list[str] | None,
        typer.Option(help="Attack this wall only: interpreter, jail or container. Repeatable."),
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(help="Attack only containers of this Docker runtime.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few attacks of each kind, in at most about 15 s.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every check in full, not only problems.")
    ] = False,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Check this host. Exit status 1 if something is missing."""
    from fumehood.cli.show import wants_json

    if attack:
        from fumehood.cli.doctor_attack import attack as attack_walls

        attack_walls(wall or [], runtime, quick=quick, as_json=wants_json(as_json))
    if wall or runtime is not None or quick:
        fail("--wall, --runtime and --quick need --attack.", ExitCode.USAGE)
    findings = list(_examine(socket))
    if wants_json(as_json):
        _show_json(findings)
    else:
        show_findings(findings, verbose=verbose)
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(ExitCode.TOOL_FAILED)


def _examine(socket: Path | None) -> Iterator[Finding]:
    yield _platform()
    yield Finding("python", "ok", platform.python_version())
    for library, oldest in INTERPRETERS.items():
        yield _library(library, oldest)
    try:
        config = load_config(socket=socket)
    except ConfigError as error:
        remedy = f"Correct it in {config_file()}, or in the environment."
        yield Finding("configuration", "missing", str(error), remedy)
        return
    yield _configuration()
    yield _state(config)
    yield from daemon_findings(config)
    yield from _authority(config)
    yield from _interpreter(config)
    yield from _jail(config)
    yield from _docker(config)
    yield _tools(config)
    yield from _tools_directory(config)


def _platform() -> Finding:
    machine = platform.machine()
    from_table = machine in ("x86_64", "aarch64")
    kernel = f"Linux {platform.release()} on {machine}"
    if sys.platform == "linux" and from_table:
        return Finding("platform", "ok", kernel)
    return Finding("platform", "missing", kernel, "Use Linux on x86-64 or AArch64.")


def _configuration() -> Finding:
    file = config_file()
    if file.exists():
        return Finding("configuration", "ok", f"read from {file}")
    return Finding("configuration", "ok", f"no file; {file} would be read")


def _library(name: str, oldest: tuple[int, ...]) -> Finding:
    found = version(name)
    parts = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if parts >= oldest:
        return Finding(name, "ok", found)
    wanted = ".".join(map(str, oldest))
    return Finding(name, "missing", found, f"Install {name} {wanted} or newer.")


def _state(config: Config) -> Finding:
    path = config.state_directory
    if not path.exists():
        return Finding("state directory", "ok", f"{path} will be created by `fumehood serve`")
    found = path.stat()
    if found.st_uid != os.geteuid() and config.mode == "service":
        # As it should be; the checks of its contents say what they cannot read.
        return Finding("state directory", "ok", f"{path}, the service's own")
    if found.st_uid != os.geteuid():
        remedy = "Set FUMEHOOD_HOME to a directory of your own."
        return Finding("state directory", "missing", f"{path} belongs to another user", remedy)
    if found.st_mode & 0o077:
        return Finding(
            "state directory", "missing", f"{path} is open to others", f"chmod 700 {path}"
        )
    return Finding("state directory", "ok", str(path))


def daemon_findings(config: Config) -> Iterator[Finding]:
    """Whether it is ready, and whether calls to services are suspended."""
    from fumehood.client import Client, DaemonUnavailable

    try:
        path = config.socket_path
    except ConfigError as error:
        yield Finding("daemon", "missing", str(error), "Set FUMEHOOD_SOCKET to a shorter path.")
        return
    try:
        with Client(path) as client:
            found = client.ready()
    except DaemonUnavailable as error:
        is_service = config.mode == "service"
        remedy = "systemctl start fumehood" if is_service else "fumehood serve"
        yield Finding("daemon", "warning", str(error), f"Start one: {remedy}")
        return
    if found.status == "ready":
        yield Finding("daemon", "ok", f"ready on {path}")
    else:
        yield Finding("daemon", "missing", f"{path} answers: {found.status}", "See its log.")
    if found.broken_circuits:
        words = f"not closed: {found.broken_circuits}; calls to these services are suspended"
        remedy = "`fumehood tools show NAME` shows that of a tool. They close by themselves."
        yield Finding("circuits", "warning", words, remedy)


def _authority(config: Config) -> Iterator[Finding]:
    from fumehood.cli.doctor_checks import authority_findings

    yield from authority_findings(config)


def _interpreter(config: Config) -> Iterator[Finding]:
    from fumehood.sandbox.process.wall import InterpreterWall

    yield from _wall("interpreter", InterpreterWall(config.interpreter.limits), "missing")


def _jail(config: Config) -> Iterator[Finding]:
    """Without a jail only sandboxed functions are unavailable, so faults are warnings."""
    from fumehood.sandbox.process.wall import JailWall

    yield from _wall("jail", JailWall(limits=config.jail.limits), "warning")


def _wall(name: str, wall: InterpreterWall | JailWall, if_not: Verdict) -> Iterator[Finding]:
    """Start a guest, which attacks its own wall before it reports which limits hold."""
    import anyio

    from fumehood.core.limits import Limit
    from fumehood.sandbox.wall import WallStatus

    async def start() -> WallStatus:
        async with wall:
            return wall.status

    status = anyio.run(start)
    for fault in status.faults:
        yield Finding(name, if_not, fault, status.remedy)
    for limit in sorted(status.required):
        if limit in status.enforced:
            found = "enforced: an attack on it failed"
            if limit in (Limit.CPU_TIME, Limit.OUTPUT):
                found = "enforced: by the same means as wall_time"
            yield Finding(f"{name}: {limit}", "ok", found)
        else:
            found = "an attack on it succeeded, or failed in an unexpected way"
            yield Finding(f"{name}: {limit}", if_not, found, status.remedy)


def _docker(config: Config) -> Iterator[Finding]:
    from fumehood.cli.doctor_checks import docker_findings

    yield from docker_findings(config.container, config.sessions, config.own_images)


def _tools(config: Config) -> Finding:
    from fumehood.registry.discover import discover
    from fumehood.registry.index import ToolIndex
    from fumehood.registry.secrets import SecretBindings

    index = ToolIndex(SecretBindings(config.secrets, config.rest), mcp_servers=config.mcp_servers)
    faults = discover(index, config.host_tools, web=config.web)
    if faults:
        words = "; ".join(f"{fault.entry_point}: {fault.reason}" for fault in faults)
        return Finding(
            "tools",
            "warning",
            f"left out: {words}",
            "Fix it or its configuration, or uninstall the package; then restart the engine.",
        )
    names = ", ".join(tool.definition.name for tool in index)
    if not names:
        return Finding("tools", "missing", "none are installed", "Reinstall fumehood.")
    return Finding("tools", "ok", names)


def _tools_directory(config: Config) -> Iterator[Finding]:
    """Read the definitions again. Only the daemon sees clashes with names of other sources."""
    from fumehood.registry.directory import ToolDirectory
    from fumehood.registry.secrets import SecretBindings

    if config.tools_directory is None:
        yield Finding("tools directory", "ok", "none is configured")
        return
    secrets = SecretBindings(config.secrets, config.rest)
    contents = ToolDirectory(config.tools_directory, secrets=secrets).load()
    remedy = "Fix it. A running engine reads a changed file, but not a changed configuration."
    for fault in contents.faults:
        what = f"tools directory: {fault.file}" if fault.file is not None else "tools directory"
        yield Finding(what, "warning", fault.reason, remedy)
    if not contents.faults:
        found = f"{config.tools_directory}: {counted(len(contents.tools), 'tool')}"
        yield Finding("tools directory", "ok", found)


def _show_json(findings: list[Finding]) -> None:
    """Print one JSON document with one line per finding, so that `grep` finds it whole."""
    lines = ",\n".join(json.dumps(asdict(finding)) for finding in findings)
    print(f"[\n{lines}\n]")


def show_findings(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Show every finding in full, or only problems and a count of the others."""
    for finding in findings:
        if verbose or not _is_well(finding):
            _show(finding.verdict, f"{finding.check}: {finding.found}")
            if finding.cure:
                print(_wrapped(f"{INDENT}Remedy: {finding.cure}"))
    if not verbose:
        for line in _groups(findings):
            _show("ok", line)
        print("Every check in full: fumehood doctor --verbose")


def _is_well(finding: Finding) -> bool:
    """Whether it needs no attention. An optional missing image is ok, but has a remedy."""
    return finding.verdict == "ok" and not finding.cure


def _groups(findings: Sequence[Finding]) -> Iterator[str]:
    for title, begins in GROUPS.items():
        members = [one for one in findings if _begin(one.check) in begins]
        well = [one.check.partition(": ")[2] or one.check for one in members if _is_well(one)]
        if well and title == "Limits":
            yield f"{title}: {len(well)} of {len(members)} enforced"
        elif well:
            yield f"{title}: {len(well)} of {len(members)} ok: {', '.join(well)}"


def _begin(check: str) -> str:
    head, colon, _ = check.partition(":")
    return head + colon


def _show(verdict: Verdict, text: str) -> None:
    shown = _wrapped(f"{verdict:<{VERDICT_COLUMNS}}{text}")
    print(styled(verdict, COLOURS[verdict]) + shown[len(verdict) :])


def _wrapped(text: str) -> str:
    """Wrap to the terminal; a path longer than a line stays whole, to be copied."""
    return textwrap.fill(
        printable(text), shutil.get_terminal_size().columns, subsequent_indent=INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
