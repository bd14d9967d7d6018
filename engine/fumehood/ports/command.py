"""`fumehood sessions port`: reach a server in a session from this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import SocketPath
from fumehood.cli.reach import caller_token, calling, find_socket
from fumehood.cli.sessions import SessionId
from fumehood.core.escaping import visible


def forward_port(
    session: SessionId,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="The port in the session.")],
    local: Annotated[
        int, typer.Option(min=0, max=65535, help="The port here; default: any that is free.")
    ] = 0,
    tcp: Annotated[
        bool, typer.Option("--tcp", help="For any protocol and program, not by a link.")
    ] = False,
    seconds: Annotated[float, typer.Option("--for", help="For how many seconds.")] = 3600,
    socket: SocketPath = None,
) -> None:
    """Reach a server in a session from here, until Ctrl-C: by a link for a browser."""
    import anyio  # not at the top: every command on sessions loads this module

    from fumehood.client.forwarding import Forwarding

    with calling(socket, is_payload=True) as client:
        found = client.session(session)
    if found.state.is_over:
        fail(found.why or "The session is over.", ExitCode.TOOL_FAILED)
    say(f"It is forwarded for {seconds:g} s, or until Ctrl-C.", to_stderr=True)
    forwarding = Forwarding(
        find_socket(socket), caller_token(), found.id, port, tcp,
        lambda words: say(visible(words), to_stderr=True),
    )  # fmt: skip
    try:
        anyio.run(forwarding.serve, local, seconds, lambda link: print(link, flush=True))
        say("The time is over: it is not forwarded any more.", to_stderr=True)
    except OSError as error:
        fail(f"The port cannot be forwarded: {error.strerror}.", ExitCode.UNAVAILABLE)
    except KeyboardInterrupt:
        pass
