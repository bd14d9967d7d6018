"""`fumehood doctor`: check this host, and name a remedy for every problem.

The checks of authority (approvers, policy, audit key, secrets, and checks that parts add) read the
state directory and the configured files directly, and write nothing. No running engine is needed.
If the command runs as a user other than the engine's, these checks only report that nothing could
be read.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Annotated

import anyio
import typer
from sqlalchemy import Connection

from fumehood.cli.exits import ExitCode, say
from fumehood.cli.findings import Finding, Verdict
from fumehood.cli.options import AsJson, SocketPath, counted
from fumehood.cli.policy import Offline
from fumehood.cli.show import Column, show_json, show_table, styled, wants_json
from fumehood.client import Client, DaemonUnavailable
from fumehood.config import Config, ConfigError, config_file, load_config
from fumehood.core.errors import EngineError
from fumehood.core.escaping import printable, visible
from fumehood.core.identity import Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit
from fumehood.core.part import Check, Options, Part, PartError, imported, placed
from fumehood.core.tool import ToolDefinition
from fumehood.identity.approvers import all_approvers, cure_of_none
from fumehood.identity.tokens import all_tokens
from fumehood.parts import foreign, named, parts
from fumehood.policy.loader import load_policy
from fumehood.policy.model import PolicyError
from fumehood.registry.definitions import parse_definition
from fumehood.registry.registrations import all_definitions
from fumehood.registry.secrets import SecretBindings
from fumehood.sandbox.process.wall import JailWall, ProcessWall
from fumehood.sandbox.wall import WallStatus
from fumehood.storage.audit_chain import head_of, key_id_after
from fumehood.storage.audit_keys import CURRENT, all_keys
from fumehood.storage.database import FILE_NAME, reading
from fumehood.storage.directory import StateError, private_directory
from fumehood.storage.errors import StoreError, understood

GROUPS = {
    "Host": ("platform", "python"),
    "Engine": ("configuration", "state directory", "daemon", "circuits"),
    "Authority": (),
    "Limits": ("jail:",),
    "Tools": ("tools", "tools directory"),
}
"""Maps the title of a group to the names of its checks. A name that ends in a colon is a prefix of
the names of several checks.

The group Authority also contains the checks that `authority_checks` names, and the group Host the
checks that `libraries` names. Parts can add groups, and can add checks to `OPEN_GROUP`."""

OPEN_GROUP = "Limits"
"""The group of checks of walls. Parts can add checks of their own walls to it."""

COLOURS: dict[Verdict, str] = {"ok": "32", "warning": "33", "missing": "31"}
"""The colour of each verdict. *Source*: ECMA-48, SGR."""

VERDICT_COLUMNS = 9
INDENT = " " * (VERDICT_COLUMNS + 2)


def doctor(
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every check in full, not only problems.")
    ] = False,
    show_parts: Annotated[
        bool, typer.Option("--parts", help="Show the parts of the engine in their order.")
    ] = False,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Check this host. Exit status 1 if something is missing."""
    if show_parts:
        _show_parts(as_json=wants_json(as_json))
        return
    findings = list(_examine(socket))
    if wants_json(as_json):
        # One line per finding, so that `grep` finds it whole.
        print("[\n" + ",\n".join(json.dumps(asdict(finding)) for finding in findings) + "\n]")
    else:
        show_findings(findings, verbose=verbose)
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(ExitCode.TOOL_FAILED)


def _show_parts(*, as_json: bool) -> None:
    """Show what each part adds. Also show the entry points that are not loaded as parts."""
    found = [_described(part) for part in parts()]
    others = [f"{one.name} ({one.value})" for one in foreign() if one.name not in named()]
    if as_json:
        show_json({"parts": found, "not_loaded": others})
        return
    rows = [(one["name"], "; ".join(f"{k}: {', '.join(v)}" for k, v in one["adds"].items()))
            for one in found]  # fmt: skip
    show_table((Column("part", whole=True), Column("adds")), rows)
    for other in others:
        say(f"Not loaded, because `parts` does not name it: {visible(other)}")


def _described(part: Part) -> JsonObject:
    operations = [*imported(part.operations), *imported(part.control_operations)]
    adds = {
        "settings": sorted(imported(part.settings, {})),
        "commands": sorted(part.commands),
        "options": [f"{one.command} {name}" for one in part.options for name in _options(one)],
        "options of calls": [one.name for one in imported(part.call_options)],
        "checks": [check.name for check in part.checks],
        "libraries": sorted(part.libraries),
        "operations": [f"{one.method} {one.path}" for one in operations],
        "mounts": sorted(part.mounts),
        "executors": sorted(part.executors),
        "keys of the policy": sorted((*part.policy, *part.excesses, *part.conditions)),
        "in the engine": [] if part.in_engine is None else [part.in_engine.rpartition(":")[2]],
    }
    return {"name": part.name, "adds": {kind: names for kind, names in adds.items() if names}}


def _options(added: Options) -> list[str]:
    own = signature(imported(added.function), eval_str=True).parameters.values()
    return [
        opt
        for parameter in own
        for given in getattr(parameter.annotation, "__metadata__", ())
        for opt in given.param_decls or (f"--{parameter.name.replace('_', '-')}",)
    ]


def _examine(socket: Path | None) -> Iterator[Finding]:
    yield _platform()
    yield Finding("python", "ok", platform.python_version())
    for library, oldest in libraries().items():
        yield _library(library, oldest)
    file = config_file()
    try:
        config = load_config(socket=socket)
    except ConfigError as error:
        remedy = f"Correct it in {file}, or in the environment."
        yield Finding("configuration", "missing", str(error), remedy)
        return
    read = f"read from {file}" if file.exists() else f"no file; {file} would be read"
    yield Finding("configuration", "ok", read)
    yield _state(config)
    yield from daemon_findings(config)
    offline = Offline(config)
    groups: dict[str, Callable[[], Iterable[Finding]]] = {
        "Authority": lambda: authority_findings(config, offline),
        "Limits": lambda: _limits(config),
        "Tools": lambda: _tools(offline),
    }
    own = [check for check in _checks_of_parts() if check.group is not None]
    for title in _titles(tuple(groups), own):
        for check in own:
            if check.group == title:
                yield from imported(check.function)(config)
        if title in groups:
            yield from groups[title]()


def _titles(kernel: tuple[str, ...], own: Sequence[Check]) -> list[str]:
    """Return the titles of all groups in display order. `kernel` are the titles of the built-in
    groups, and `own` are the checks of parts, which may add groups. Groups that follow the same
    group keep the order of the parts.
    """
    added = {str(check.group): check.after for check in reversed(own) if check.group != OPEN_GROUP}
    return placed(kernel, added)


def _platform() -> Finding:
    machine = platform.machine()
    kernel = f"Linux {platform.release()} on {machine}"
    if machine in ("x86_64", "aarch64"):
        return Finding("platform", "ok", kernel)
    return Finding("platform", "missing", kernel, "Use Linux on x86-64 or AArch64.")


def libraries() -> dict[str, str]:
    """Return a dictionary from each library that parts need to the oldest version that satisfies
    every part.
    """
    found: dict[str, str] = {}
    for part in parts():
        for name, oldest in part.libraries.items():
            found[name] = max(found.get(name, ""), oldest, key=_numbers)
    return found


def _library(name: str, oldest: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", f"Install {name} {oldest} or newer.")
    if _numbers(found) >= _numbers(oldest):
        return Finding(name, "ok", found)
    return Finding(name, "missing", found, f"Install {name} {oldest} or newer.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:3] if number.isdigit())


def _state(config: Config) -> Finding:
    path = config.state_directory
    if not path.exists():
        return Finding("state directory", "ok", f"{path} will be created by `fumehood serve`")
    if config.mode == "service" and path.stat().st_uid != os.geteuid():
        # Correct for a service. The checks of its contents report what they cannot read.
        return Finding("state directory", "ok", f"{path}, the service's own")
    try:
        private_directory(path)
    except StateError as error:
        found, _, remedy = str(error).partition(". ")
        return Finding("state directory", "missing", found, remedy)
    return Finding("state directory", "ok", str(path))


def daemon_findings(config: Config) -> Iterator[Finding]:
    """Yield a finding on whether the daemon is ready. If calls to services are suspended, yield a
    second finding that says so.
    """
    try:
        path = config.socket_path
        with Client(path) as client:
            found = client.ready()
    except ConfigError as error:
        yield Finding("daemon", "missing", str(error), "Set FUMEHOOD_SOCKET to a shorter path.")
        return
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


def _limits(config: Config) -> Iterator[Finding]:
    # Without a jail only sandboxed functions are unavailable.
    yield from limit_findings("jail", JailWall(limits=config.jail.limits), "warning")


def limit_findings(name: str, wall: ProcessWall, if_not: Verdict) -> Iterator[Finding]:
    """Yield a finding for each fault and for each limit of a wall. `name` is the wall's name. A
    fault, or a limit that is not enforced, gets the verdict `if_not`.

    To check the limits, a guest is started, which attacks its own wall and reports the results.
    """

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


def _tools(offline: Offline) -> Iterator[Finding]:
    if offline.left_out:
        words = "; ".join(f"{one.entry_point}: {one.reason}" for one in offline.left_out)
        remedy = "Fix it or its configuration, or uninstall the package; then restart the engine."
        yield Finding("tools", "warning", f"left out: {words}", remedy)
    elif names := ", ".join(tool.definition.name for tool in offline.index):
        yield Finding("tools", "ok", names)
    else:
        yield Finding("tools", "missing", "none are installed", "Reinstall fumehood.")
    remedy = "Fix it. A running engine reads a changed file, but not a changed configuration."
    for fault in offline.directory_faults:
        what = f"tools directory: {fault.file}" if fault.file is not None else "tools directory"
        yield Finding(what, "warning", fault.reason, remedy)
    if not offline.directory_faults:
        counts = f"{offline.directory}: {counted(offline.directory_tools, 'tool')}"
        found = "none is configured" if offline.directory is None else counts
        yield Finding("tools directory", "ok", found)


def show_findings(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Show all findings in full if `verbose` is True. Otherwise, show only problems in full, and a
    count of the other findings.
    """
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
    """Return True if a finding needs no attention.

    A finding with a remedy needs attention, even if its verdict is `ok`. For example, the finding
    for a missing optional image has the verdict `ok` and a remedy.
    """
    return finding.verdict == "ok" and not finding.cure


def _groups(findings: Sequence[Finding]) -> Iterator[str]:
    own = [check for check in _checks_of_parts() if check.group is not None]
    more = {"Host": libraries(), "Authority": authority_checks()}
    for title in _titles(tuple(GROUPS), own):
        added = [check.name for check in own if check.group == title]
        begins = {*GROUPS.get(title, ()), *more.get(title, ()), *added, *(f"{a}:" for a in added)}
        members = [one for one in findings if "".join(one.check.partition(":")[:2]) in begins]
        well = [one.check.partition(": ")[2] or one.check for one in members if one.verdict == "ok"]
        if well and title == "Limits":
            yield f"{title}: {len(well)} of {len(members)} enforced"
        elif well:
            yield f"{title}: {len(well)} of {len(members)} ok: {', '.join(well)}"


def _show(verdict: Verdict, text: str) -> None:
    shown = _wrapped(f"{verdict:<{VERDICT_COLUMNS}}{text}")
    print(styled(verdict, COLOURS[verdict]) + shown[len(verdict) :])


def _wrapped(text: str) -> str:
    """Wrap text to the terminal's width. A long path is not broken, so that users can copy it."""
    return textwrap.fill(
        printable(text), shutil.get_terminal_size().columns, subsequent_indent=INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


CHECKS = ("approvers", "policy", "audit key", "secrets")
"""The names of the built-in checks of authority, in display order. Parts can add checks."""


def authority_findings(config: Config, offline: Offline) -> Iterator[Finding]:
    """Check the approvers, the policy, the audit key and the secrets. Also run the checks that
    parts add.

    The policy check yields one finding for each fault in the policy. `offline` has the configured
    tools.
    """
    state = config.state_directory
    owner = state.stat().st_uid if state.exists() else os.geteuid()
    if owner != os.geteuid():
        found = f"cannot be read by this user: {state} belongs to the user {owner}"
        remedy = f"Run it as that user: sudo -u '#{owner}' fumehood doctor"
        yield from (Finding(check, "warning", found, remedy) for check in authority_checks())
        return
    findings: dict[str, Callable[[], Iterable[Finding]]] = {
        "approvers": lambda: [_approvers(config)],
        "policy": lambda: _policy(config, offline),
        "audit key": lambda: [_audit_key(config)],
        "secrets": lambda: [_secrets(offline.index.secrets)],
        **{check.name: partial(imported(check.function), config) for check in _of_authority()},
    }
    for name in authority_checks():
        yield from findings[name]()


def authority_checks() -> list[str]:
    """Return the names of all checks of authority in display order, including checks that parts
    add.
    """
    return placed(CHECKS, {check.name: check.after for check in _of_authority()})


def _of_authority() -> list[Check]:
    return [check for check in _checks_of_parts() if check.group is None]


def _checks_of_parts() -> list[Check]:
    found = [check for part in parts() for check in part.checks]
    named = {str(name) for one in found for name in (one.name, one.group)} - {OPEN_GROUP}
    if taken := named & {*CHECKS, *GROUPS}:
        raise PartError(f"A part adds the check {min(taken)!r}, which is the kernel's.")
    return found


def _nobody(_: Config) -> list[str]:
    return []


def _approvers(config: Config) -> Finding:
    approvers, tokens = {}, {}
    if _has_database(config):
        try:
            with _reading(config) as connection, understood("approvers or tokens"):
                approvers, tokens = all_approvers(connection), all_tokens(connection)
        except StoreError as error:
            return Finding("approvers", "warning", str(error), "Repair the state directory.")
    there = [one for one in approvers.values() if one.removed_at is None]
    told = [one.name for one in there if Scope.APPROVE in one.scopes]
    now = datetime.now(UTC)
    others = sum(Scope.APPROVE in one.scopes and one.is_valid(now) for one in tokens.values())
    if others:
        told.append(f"{others} tokens")
    for part in parts():
        told += imported(part.approvers, _nobody)(config)
    if told:
        return Finding("approvers", "ok", ", ".join(told))
    cure = f"Make one: {cure_of_none(any_there=bool(there))}."
    return Finding("approvers", "warning", "none: dangerous calls are refused", cure)


def _policy(config: Config, offline: Offline) -> Iterator[Finding]:
    path = config.policy_file
    if path is None:
        found = "none is configured: dangerous tools ask, others are allowed"
        yield Finding("policy", "ok", found)
        return
    try:
        known: list[ToolDefinition | tuple[str, str]] = [*offline.definitions()]
        known += [*offline.index.coming, *_registered(config)]
        policy = load_policy(path, known)
    except PolicyError as refused:
        remedy = "Fix it, then run: fumehood policy check. No engine starts with it."
        yield from (Finding("policy", "missing", fault, remedy) for fault in refused.shown)
        return
    rules = counted(len(policy.rules), "rule")
    yield Finding("policy", "ok", f"{path}: {rules}, version {policy.version}")


def _registered(config: Config) -> Iterator[ToolDefinition]:
    """Yield the tools that were registered over the control socket. Tools that cannot be read are
    omitted.
    """
    if _has_database(config):
        with suppress(StoreError, EngineError, ValueError), _reading(config) as connection:
            yield from map(parse_definition, all_definitions(connection))


def _secrets(secrets: SecretBindings) -> Finding:
    known = secrets.settings
    if names := secrets.report_unusable():
        remedy = (
            "Set its variable or file where the engine starts: the engine has its own environment, "
            "and its log names the secrets that it misses (secret.unusable)."
        )
        return Finding("secrets", "warning", f"no usable value here: {', '.join(names)}", remedy)
    unread = [name for name, one in known.items() if one.keyring is not None]
    found = f"{len(known) - len(unread)} of {counted(len(known), 'secret')} have a usable value"
    if unread:
        found += f"; in a keyring, which is not read now: {', '.join(unread)}"
    return Finding("secrets", "ok", found if known else "none are configured")


def _audit_key(config: Config) -> Finding:
    state, known, wanted = config.state_directory, {}, None
    if _has_database(config):
        try:
            known = all_keys(state)
            with _reading(config) as connection:
                head = head_of(connection)
        except StoreError as error:
            remedy = "Repair it; no engine starts without it."
            return Finding("audit key", "missing", str(error), remedy)
        wanted = key_id_after(head) if head is not None else None
    if wanted is None and not known:
        return Finding("audit key", "ok", "will be created by `fumehood serve`")
    if wanted is not None and wanted not in known:
        found = f"the chain continues under the key {wanted[:40]}, which is not in {state}"
        return Finding("audit key", "missing", found, "Restore it from a copy.")
    return Finding("audit key", "ok", f"{state / CURRENT}, private; a backup also needs it")


def _has_database(config: Config) -> bool:
    return config.state.url is not None or (config.state_directory / FILE_NAME).exists()


def _reading(config: Config) -> AbstractContextManager[Connection]:
    return reading(config.state_directory, config.state.secret_url)
