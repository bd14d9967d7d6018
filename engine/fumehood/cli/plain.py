"""Commands that call one client method and show its answer, each declared by one `plain(…)`.

A command has the arguments of its method. The client is imported only when a command runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import typer

from fumehood.cli.options import AsJson, ControlSocketPath, CredentialStdin, SocketPath
from fumehood.cli.reach import ADMIN, calling, controlling
from fumehood.cli.show import Show, as_document


def plain(
    group: typer.Typer,
    method: str,
    words: str,
    show: Show | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    check: Callable[[str], None] | None = None,
    scope: str | None = ADMIN,
    name: str = "",
) -> None:
    """Add a command to `group` that calls a method of a client. `method` is the method's name, such
    as `agents.show`, and `words` is the command's help text. The command has the name `name` or, if
    `name` is empty, the last word of `method`.

    The other arguments are those of `plain_command`.
    """
    command = plain_command(method, show, arguments=arguments, check=check, scope=scope)
    command.__doc__ = words
    group.command(name or method.rpartition(".")[2])(command)


def plain_command(
    method: str,
    show: Show | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    check: Callable[[str], None] | None = None,
    scope: str | None = ADMIN,
) -> Callable[..., None]:
    """Return a command that calls a method of a client. `method` is the method's name, such as
    `agents.show`.

    `show` prints the method's answer. If `show` is None, nothing is printed. `arguments` maps each
    of the method's arguments to its type or, for a keyword argument, to its type and default.
    `check` validates the first argument. `scope` is the scope that the credential for the control
    socket needs. If `scope` is None, the command uses the callers' socket instead.
    """
    required = {one: kind for one, kind in (arguments or {}).items() if not isinstance(kind, tuple)}
    optional = {one: kind for one, kind in (arguments or {}).items() if isinstance(kind, tuple)}

    def command(socket: Path | None, **given: Any) -> None:
        values = [given[one] for one in required]
        keywords = {one: given[one] for one in optional}
        if check is not None:
            check(values[0])
        as_json, reached = given.get("as_json", False), None
        if scope is not None:
            stdin = given["credential_stdin"]
            reached = controlling(socket, credential_stdin=stdin, as_json=as_json, scope=scope)
        with reached or calling(socket, as_json=as_json, is_payload=show is None) as client:
            found = attrgetter(method)(client)(*values, **keywords)
        if show is not None:
            show(found, as_json)

    kinds: dict[str, tuple[Any, Any]] = {
        **{one: (kind, inspect.Parameter.empty) for one, kind in required.items()},
        **optional,
        **({"as_json": (AsJson, False)} if show not in (None, as_document) else {}),
        **({"credential_stdin": (CredentialStdin, False)} if scope is not None else {}),
        "socket": (SocketPath if scope is None else ControlSocketPath, None),
    }
    command.__annotations__ = {one: kind for one, (kind, _) in kinds.items()}
    parameters = [
        inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for one, (kind, default) in kinds.items()
    ]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command
