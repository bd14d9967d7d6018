"""`fumehood tools import openapi`: makes definitions from an OpenAPI document, and prints or saves
them.

The operator names the document, so its host may have any address. Redirects, however, are followed
only to public addresses. Definitions are printed to stdout, or saved in a directory with one file
for each tool. Remarks, and the configuration for secrets, are printed to stderr. Invariants:

* No file is written before all files have been checked.
* No file is replaced without `--force`.
* A tool that another file already defines is never defined again.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

import anyio

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import read_bytes
from fumehood.cli.show import show_json
from fumehood.client.files import new_file
from fumehood.core.errors import EngineError
from fumehood.core.escaping import json_document, visible
from fumehood.core.json_types import JsonObject
from fumehood.core.names import listed
from fumehood.core.tool import ToolDefinition
from fumehood.outgoing.addresses import is_public
from fumehood.outgoing.secret_values import SecretValues
from fumehood.outgoing.upstreams import Attempt, BodyTooLarge, UpstreamRequest, Upstreams
from fumehood.registry.definitions import url_faults
from fumehood.registry.secrets import Origin, RestSettings, SecretBindings
from fumehood.rest.openapi import (
    MAX_DOCUMENT_BYTES,
    CannotImport,
    Imported,
    ImportOptions,
    import_openapi,
    read_document,
    shown_host,
)
from fumehood.sandbox.trusted_files import MAX_FILES, Untrusted, list_files, open_directory

DEADLINE_S = 30
WORK_S = 60.0
MEMORY_MB = 1024
"""Maximum memory in MB that an import may use in addition to what the process used before. `WORK_S`
limits its time in seconds. Without these limits, even a small document could take hours, because it
can include one of its own large sections a thousand times by references.
"""

_HEADERS = (("accept", "application/json, */*;q=0.5"), ("user-agent", "fumehood"))


def import_document(
    document: str, options: ImportOptions, out: Path | None, *, force: bool
) -> None:
    """Import an OpenAPI document. `document` is a file, `-` for standard input, or an http or https
    address.

    Save the definitions in the directory `out`. If `out` is None, print them. `force` allows
    existing files to be replaced.
    """
    try:
        name, data = _read(document)
        with _bounded():
            made = import_openapi(read_document(name, data), options)
    except CannotImport as reason:
        words = str(reason) if str(reason).endswith(("?", ".")) else f"{reason}."
        fail(f"{visible(document)}: {visible(words)}", ExitCode.USAGE)
    _remark("Left out:", made.left_out)
    _remark("Changed:", made.notes)
    if not made.tools:
        fail("No tool could be made of this document.", ExitCode.USAGE)
    if out is None:
        show_json({"tools": made.tools})
    else:
        _save(made.tools, out, force=force)
        say(f"{len(made.tools)} definitions are in {visible(str(out))}.", to_stderr=True)
    # The document chose the names of the tools, so the user must see what --no-approval has
    # matched.
    waived = [t["name"] for t in made.tools if not t["read_only"] and not t["dangerous"]]
    if waived:
        say(f"Run without approval: {', '.join(waived)}.", to_stderr=True)
    named = {shown_host(url) for url in (options.server, options.source) if url is not None}
    say("\n".join(_configuration(made, named)), to_stderr=True)


def _read(document: str) -> tuple[str, bytes]:
    if document.startswith(("https://", "http://")):
        return document.partition("?")[0], anyio.run(_fetched, document)
    return document, read_bytes(document, document, MAX_DOCUMENT_BYTES)


async def _fetched(url: str) -> bytes:
    if any(url_faults(url)):
        raise CannotImport("not a plain http or https address")
    upstreams = Upstreams(RestSettings(allowed_hosts=(shown_host(url),)))
    request = UpstreamRequest("GET", url, _HEADERS)
    try:
        with anyio.fail_after(DEADLINE_S):
            answer = await upstreams.ask(request, MAX_DOCUMENT_BYTES, Attempt(), SecretValues())
    except EngineError as error:
        raise CannotImport(f"it cannot be fetched: {error.message.rstrip('.')}") from None
    except BodyTooLarge:
        raise CannotImport(f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MB") from None
    except TimeoutError:
        raise CannotImport(f"it did not arrive in {DEADLINE_S} s") from None
    finally:
        await upstreams.close()
    if not 200 <= answer.status < 300:
        raise CannotImport(f"it cannot be fetched: the answer has the status {answer.status}")
    return answer.body


class _OutOfTime(BaseException):
    """Raised if the import takes too long. It is a BaseException, so that no code of the import
    catches it by accident.
    """


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit the time and memory of the `with` block. Raises CannotImport if the block exceeds a
    limit.
    """

    def stop(*_: object) -> NoReturn:
        raise _OutOfTime

    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = used + (MEMORY_MB << 20)
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, WORK_S)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    except (_OutOfTime, MemoryError):
        raise CannotImport(f"it needs more than {WORK_S:g} s or {MEMORY_MB} MB to import") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.signal(signal.SIGALRM, handler)


# -- saving --------------------------------------------------------------------------------


class _AnySecret(SecretBindings):
    """Secret bindings that accept a reference to any secret. With them, the tool definitions that
    are already in the output directory can be read. These may refer to secrets that are not
    configured here.
    """

    def faults(self, definition: ToolDefinition) -> list[str]:
        return []


def _save(tools: list[JsonObject], out: Path, *, force: bool) -> None:
    """Write one file `NAME.json` into the directory `out` for each tool. Each file is written
    atomically. `force` allows existing files to be replaced.
    """
    try:
        out.mkdir(mode=0o700, exist_ok=True)
        directory = open_directory(out, frozenset({0, os.geteuid()}))
        try:
            files = list_files(directory)
            wanted = {f"{tool['name']}.json": tool for tool in tools}
            _check_names(wanted, set(files), out, force=force)
            for name, tool in wanted.items():
                made = new_file(Path(name), replace=True, mode=0o600, directory=directory)
                with made as file:
                    file.write(f"{json_document(tool)}\n".encode())
        finally:
            os.close(directory)
    except Untrusted as reason:
        _refuse(out, str(reason))
    except OSError as error:
        _refuse(out, error.strerror or "it cannot be written")


def _check_names(wanted: dict[str, JsonObject], files: set[str], out: Path, *, force: bool) -> None:
    """End the command with a message if the new files cannot be written into the directory `out`.

    This is the case if a new file already exists and `force` is False, or if another file there
    already defines one of the tools. It is also the case if there would be too many files, or if
    the part that reads them is not installed.

    `wanted` maps the name of each new file to its tool. `files` are the names of the existing
    files.
    """
    try:
        from fumehood.definition_files.directory import ToolDirectory
    except ModuleNotFoundError:
        _refuse(out, "the part definition_files, which reads it, is not installed")
    if len(files | wanted.keys()) > MAX_FILES:
        _refuse(out, f"it would hold more than {MAX_FILES} files; choose tools with --only")
    there = sorted(files & wanted.keys())
    if there and not force:
        _refuse(out, f"{there[0]} is there already (--force replaces it)")
    contents = ToolDirectory(out, secrets=_AnySecret()).load()
    ours = {tool["name"] for name, tool in wanted.items() if name in files}
    names = {tool.definition.name for tool in contents.tools} - ours
    for tool in wanted.values():
        if tool["name"] in names:
            _refuse(out, f"another file there defines {tool['name']} already; use --prefix")


def _refuse(out: Path, reason: str) -> NoReturn:
    fail(f"{visible(str(out))}: {visible(reason)}. Nothing was written.", ExitCode.USAGE)


# -- remarks -------------------------------------------------------------------------------


def _remark(title: str, rows: list[tuple[str, str]]) -> None:
    """Print remarks below a title. `rows` contains pairs of an operation and a text. Operations
    with the same text are printed on one line.
    """
    operations: dict[str, list[str]] = {}
    for operation, words in rows:
        operations.setdefault(words, []).append(operation)
    if operations:
        lines = [f"  {visible(listed(named))}: {visible(w)}" for w, named in operations.items()]
        say("\n".join([title, *lines]), to_stderr=True)


def _configuration(made: Imported, named: set[str]) -> Iterator[str]:
    """Yield lines that show to which hosts the tools send requests, and what to add to the
    configuration.

    `named` contains the hosts of the URLs in the command's arguments. If requests to any other host
    need the operator's permission, the lines contain a caution, because the document chose this
    host.
    """
    hosts = sorted({shown_host(tool["endpoint"]) for tool in made.tools})
    yield f"Their requests go to {', '.join(hosts)}."
    closed = sorted({shown_host(t["endpoint"]) for t in made.tools if _needs_permission(t)})
    if foreign := [host for host in closed if host not in named]:
        yield (
            f"Caution: the document chose {', '.join(foreign)}, not public or not encrypted. Calls "
            "are refused unless rest.allowed_hosts names it. Only if you know it to be right:"
        )
        # These lines are comments, so that a user who pastes everything does not allow a host that
        # the document chose.
        yield f"\n# [rest]\n# allowed_hosts = {json.dumps(closed)}"
    own = [host for host in closed if host in named]
    if own or made.secrets:
        yield "Add to the configuration file, if the hosts are right:"
    if own:
        yield f"\n[rest]\nallowed_hosts = {json.dumps(own)}"
    for name, need in made.secrets.items():
        variable = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).upper()
        yield f"\n[secrets.{name}]\nenv = {json.dumps(variable)}  # {need.content}"
        yield f"tools = {json.dumps(need.tools)}\nhosts = {json.dumps(need.hosts)}"


def _needs_permission(tool: JsonObject) -> bool:
    """Return whether the tool's host must be in rest.allowed_hosts, as far as this is known without
    DNS.
    """
    origin = Origin.of(tool["endpoint"].partition("?")[0])
    if origin.scheme == "http" and "${secret:" in json.dumps(tool):
        return True
    try:
        return not is_public(ip_address(origin.host))
    except ValueError:
        return origin.host == "localhost" or origin.host.endswith(".localhost")
