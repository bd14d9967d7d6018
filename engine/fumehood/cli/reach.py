"""Functions with which a command finds the configuration and connects to the daemon.

A credential with authority is typed on the terminal or read from standard input, for example from a
password manager. It is never taken from the environment, an argument or a file (DESIGN,
"Identity"). A caller's token may come from the environment or a file, because it only allows calls.
To find a socket, only those settings of the configuration are read that determine the socket's
path.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fumehood.cli.exits import ExitCode, exit_code_of, fail, read_answer, say
from fumehood.cli.options import local, one_line
from fumehood.client.api_request import (
    DaemonUnavailable,
    Refused,
    call_read_by,
    decision_read_by,
)
from fumehood.client.once import send_once
from fumehood.core.names import NET_TOOL
from fumehood.protocol.engine_paths import (
    ConfigError,
    config_file,
    fitting,
    read_engine_paths,
)
from fumehood.protocol.strict_json import unmarked

if TYPE_CHECKING:
    from fumehood.answers import Whoami
    from fumehood.approvals.model import Approval
    from fumehood.client import Client, ControlClient
    from fumehood.config import Config
    from fumehood.core.json_types import JsonObject


LOOK_S = 1.0
"""Seconds between two checks whether a running call waits for approvals."""

SEEN = 20
"""Number of the caller's newest pending approvals that are searched for approvals of a running
call."""

ADMIN = "admin"
APPROVE = "approve"
EITHER = "approve or admin"


@contextmanager
def calling(
    socket: Path | None,
    *,
    as_json: bool = False,
    is_payload: bool = False,
    is_call: bool = False,
    token_file: Path | None = None,
) -> Iterator[Client]:
    """Connect to the callers' socket, and yield the client. If the block raises an exception of the
    client, the command ends with a message.

    `is_payload` says that the command writes something other than an envelope to standard output. A
    refusal by the engine is then printed on standard error, unless `as_json` is True. If `is_call`
    is True, the configuration file is not checked.
    """
    from fumehood.client import Client

    path = find_socket(socket)
    ending = _ending_the_command(as_json=as_json, is_payload=is_payload and not as_json)
    with ending:
        if socket is None and not is_call:  # the check takes longer than a call
            _tell_config_fault(path)
        with Client(path, credential=caller_token(token_file)) as client:
            yield client


def call_once(
    tool: str, arguments: JsonObject, options: JsonObject, socket: Path | None, *,
    as_json: bool = False, token_file: Path | None = None,
) -> JsonObject:  # fmt: skip
    """Make one call with `send_once`, which imports very little, and return its envelope."""
    path, token = find_socket(socket), caller_token(token_file)
    with (
        _ending_the_command(as_json=as_json),
        telling_what_waits(path, token, tool, arguments, options) as traced,
    ):
        request = call_read_by(read_answer, tool, arguments, traced)
        return send_once(path, request, token)


def call_live(
    tool: str, arguments: JsonObject, options: JsonObject, socket: Path | None, *,
    as_json: bool, token_file: Path | None = None,
) -> JsonObject:  # fmt: skip
    """Make one call, show the call's output and progress while it runs, and return its envelope."""
    try:
        from fumehood.streams.terminal import stream_call
    except ModuleNotFoundError:
        fail("--stream needs the part streams, which is not installed.", ExitCode.USAGE)
    return stream_call(tool, arguments, options, socket, as_json=as_json, token_file=token_file)


@contextmanager
def telling_what_waits(
    socket: Path, token: str | None, tool: str, arguments: JsonObject, options: JsonObject
) -> Iterator[JsonObject]:
    """While the block makes a call, print a line on stderr for each approval for which the call
    waits.

    The lines cover the call's own approval, and approvals for the calls and requests that the
    call's program makes. An approval is recognised by the call's trace id. If the call repeats a
    call that already waits, the approval is recognised by the call's arguments.

    Yields the options for the call, which include the trace id.
    """
    trace_id = f"trace_{time.strftime('%Y%m%d', time.gmtime())}_{os.urandom(6).hex()}"
    name, is_waited_for = tool.partition("@")[0], "wait_for_approval" in options
    over = threading.Event()

    def is_of_call(one: Approval) -> bool:
        is_same = one.tool == name and arguments.items() <= one.arguments.items()
        return one.trace_id == trace_id or (is_same and is_waited_for)

    def look() -> None:
        told: set[str] = set()
        while not over.wait(LOOK_S):
            found = [one for one in _own_waiting(socket, token) if is_of_call(one)]
            for one in found if not over.is_set() else ():
                if one.id not in told:
                    told.add(one.id)
                    what = one.tool
                    if what == NET_TOOL:
                        what = "{method} {url}".format_map(one.arguments)
                    say(f"Waits for approval: {one.id} ({one_line(what, 100)})", to_stderr=True)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield {**options, "trace_id": trace_id}
    finally:
        over.set()


def _own_waiting(socket: Path, token: str | None) -> Sequence[Approval]:
    """Return the caller's newest pending approvals, or an empty sequence if they cannot be listed
    now.
    """
    from fumehood.client import Client  # slow to import, and most calls end before this is needed

    with suppress(DaemonUnavailable, Refused), Client(socket, credential=token) as client:
        return client.approvals.list(state="pending", limit=SEEN).items
    return ()


def decide_once(
    tool: str, arguments: JsonObject, context: JsonObject, options: JsonObject,
    socket: Path | None, token_file: Path | None,
) -> JsonObject:  # fmt: skip
    """Ask the engine, in one request, to decide on a call that the caller runs itself. Return the
    envelope with the decision. `context` is everything besides the arguments that determines
    the effect of the tool.

    Raises:
        DaemonUnavailable: no engine answers.
        ValueError: the request is invalid.
    """
    path = find_socket(socket)
    request = decision_read_by(read_answer, tool, arguments, context, options)
    return send_once(path, request, caller_token(token_file))


def caller_token(file: Path | None = None) -> str | None:
    """Return the token for calls, from `file` or else from FUMEHOOD_TOKEN. Return None if neither
    is given.

    The command ends if the text is not a token, for example if it is an approver's credential.
    """
    source, token = "FUMEHOOD_TOKEN", os.environ.get("FUMEHOOD_TOKEN", "").strip()
    if file is not None:
        source, token = str(file), _private_line(file)
    if not token and file is None:
        return None
    if not re.fullmatch(r"fht_[!-~]{1,196}", token):
        fail(f"{source} holds no token: a token begins with fht_.", ExitCode.USAGE)
    return token


def _private_line(file: Path) -> str:
    with local(file, "cannot be read"), file.open("rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(mode) or mode & 0o077:
            fail(f"{file} is not a file that only you can read: chmod 600.", ExitCode.USAGE)
        return unmarked(opened.read(1000)).decode("ascii", "replace").strip()


@contextmanager
def controlling(
    socket: Path | None, *, credential_stdin: bool, as_json: bool = False, scope: str = ADMIN
) -> Iterator[ControlClient]:
    """Connect to the control socket with a credential from the terminal or standard input. Yield
    the client.

    `scope` is the scope that the command needs. It is only named in messages; the engine checks the
    credential.
    """
    from fumehood.client import ControlClient

    path = _answering_control_socket(socket, as_json=as_json)
    credential = read_credential(from_stdin=credential_stdin, scope=scope)
    with _ending_the_command(as_json=as_json), ControlClient(path, credential=credential) as client:
        yield client


def checked_credential(
    socket: Path | None, *, credential_stdin: bool, scope: str
) -> tuple[Path, str, Whoami]:
    """Read a credential and check it with the engine, for a process that uses the credential later.

    Return the path of the control socket, the credential, and the engine's description of the
    credential's principal.
    """
    from fumehood.client import ControlClient

    path = _answering_control_socket(socket)
    credential = read_credential(from_stdin=credential_stdin, scope=scope)
    with _ending_the_command(as_json=False), ControlClient(path, credential=credential) as client:
        return path, credential, client.whoami()


def _answering_control_socket(socket: Path | None, *, as_json: bool = False) -> Path:
    """Return the path of the control socket. End the command if no engine listens on it. `socket`
    is the path that the user gave, or None.
    """
    from fumehood.client.exchange import require_listener

    path = find_socket(socket, control=True)
    # The user types a credential only after this check.
    with _ending_the_command(as_json=as_json):
        require_listener(path)
        if socket is None:
            _tell_config_fault(path)
    return path


def read_credential(*, from_stdin: bool, scope: str) -> str:
    """Read a credential from standard input or the terminal. `scope` is the required scope that
    messages name.
    """
    if from_stdin:
        credential = sys.stdin.readline().strip()
    elif sys.stdin.isatty():
        credential = getpass.getpass(f"{_needed(scope)}\nCredential: ").strip()
    else:
        fail(
            f"{_needed(scope)} Type it on a terminal, or pipe it in with --credential-stdin.",
            ExitCode.USAGE,
        )
    return credential


def _needed(scope: str) -> str:
    return (
        f"This needs a credential with {scope}. It begins with fha_ (an approver's) or fht_ (a "
        "token) and was shown once, when it was made."
    )


def show_secret(secret: str, what: str) -> None:
    """Print a secret on stdout, and a notice about the secret on stderr. `what` names the secret in
    the notice.

    Raises:
        OSError: the secret could not be written.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    print(f"This {what} is shown only once. Keep it where no caller can read it.", file=sys.stderr)
    say(secret)
    sys.stdout.flush()


def _tell_config_fault(path: Path) -> None:
    """Print a warning if the configuration file is faulty but an engine runs.

    Raises:
        DaemonUnavailable: the file is faulty, and no engine listens on the socket.
    """
    if not config_file(os.environ).is_file():
        return
    from fumehood.client.exchange import require_listener
    from fumehood.config import load_config

    try:
        load_config()
    except ConfigError as error:
        require_listener(path)
        words = f"{error} (The running engine keeps the configuration it started with.)"
        say(words, to_stderr=True)


@contextmanager
def _ending_the_command(*, as_json: bool, is_payload: bool = False) -> Iterator[None]:
    """End the command with an exit code if the block raises an exception of a client.

    A refusal by the engine is printed as an envelope or, if `is_payload` is True, as a message on
    standard error. Other exceptions are always printed as a message. `as_json` requests the
    envelope as JSON.
    """
    from fumehood.cli.show import for_people, show_envelope, wants_json

    try:
        yield
    except DaemonUnavailable as error:
        if not error.may_have_acted:
            read_config()  # reports a faulty configuration, which may be why no daemon was found
        fail(str(error), ExitCode.UNAVAILABLE)
    except Refused as refused:
        told = refused.envelope.error
        if is_payload and told is not None:
            words = for_people(told.message) if sys.stderr.isatty() else told.message
            fail(f"{told.code}: {words}", ExitCode(exit_code_of(refused.envelope)))
        show_envelope(refused.envelope, as_json=wants_json(as_json))
        raise typer.Exit(exit_code_of(refused.envelope)) from None
    except ValueError as error:  # nothing was sent
        fail(str(error), ExitCode.USAGE)


def read_config(**overrides: object) -> Config:
    """Load the configuration. `overrides` are the command's options. End the command if the
    configuration is invalid.
    """
    from fumehood.config import load_config

    try:
        return load_config(**overrides)
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def read_socket_path(config: Config, *, control: bool = False) -> Path:
    """Return the path of the callers' socket of a daemon with this configuration. If `control` is
    True, return the path of its control socket instead. End the command if the path is invalid.
    """
    try:
        return config.control_socket_path if control else config.socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)


def find_socket(given: Path | None = None, *, control: bool = False) -> Path:
    """Return the path of the callers' socket or, if `control` is True, of the control socket.

    `given` is the path that the user gave. If it is None, the configured path is returned. The
    command ends if the path is invalid.
    """
    try:
        if given is not None:
            return given.absolute() if control else fitting(given)
        if (paths := read_engine_paths(os.environ)) is not None:
            return paths.control_socket_path if control else paths.socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)
    return read_socket_path(read_config(), control=control)
