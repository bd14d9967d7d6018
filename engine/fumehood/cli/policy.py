"""`fumehood policy`: what the rules say, with or without a daemon."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.control import AsJson, CredentialStdin
from fumehood.cli.exits import ExitCode, fail, require_tool_name
from fumehood.cli.reach import EITHER, ControlSocketPath, controlling
from fumehood.cli.settings import read_config
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.cli.policy_offline import Offline
    from fumehood.client import ControlClient

policy = typer.Typer(help="The policy: rules that allow, ask or deny calls.", no_args_is_help=True)

PolicyPath = Annotated[
    Path | None,
    typer.Argument(help="The policy's file; default: policy_file of the configuration."),
]
ToolsDirectory = Annotated[
    Path | None,
    typer.Option(help="Files that define further tools; default: by configuration."),
]


@policy.command("check")
def check(
    file: PolicyPath = None,
    tools_directory: ToolsDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Say everything that is wrong with a policy; exit 1 where something is."""
    from fumehood.cli.policy_offline import show_checked

    offline = _offline(tools_directory)
    policy, notices = offline.check(_policy_path(file))
    show_checked(policy, notices, as_json=as_json)


@policy.command("test")
def hold_against(
    file: Annotated[Path, typer.Argument(help="Calls, each with the decision that it expects.")],
    policy_path: Annotated[
        Path | None,
        typer.Option("--policy", help="The policy; default: policy_file of the configuration."),
    ] = None,
    enforce: Annotated[
        bool, typer.Option("--enforce", help="As if no rule were in shadow mode.")
    ] = False,
    tools_directory: ToolsDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Hold a policy against calls with expected decisions; exit 1 where one differs."""
    from fumehood.cli.policy_offline import show_results

    offline = _offline(tools_directory)
    loaded = offline.load(_policy_path(policy_path))
    results = offline.test(file, loaded.enforced() if enforce else loaded)
    show_results(results, as_json=as_json)
    if not all(result.passed for result in results):
        raise typer.Exit(ExitCode.TOOL_FAILED)


@policy.command("explain")
def explain(
    tool: Annotated[str, typer.Argument(help="name or name@version")],
    arguments: Annotated[str, typer.Argument(help="The call's arguments as JSON.")] = "{}",
    agent: Annotated[str | None, typer.Option(help="The agent that it is made for.")] = None,
    principal: Annotated[str | None, typer.Option(help="Who makes it, such as uid:1000.")] = None,
    session: Annotated[str | None, typer.Option(help="The session that it is made in.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Explain by the policy in this file, without a daemon.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="With --file: the environment; default: by configuration.")
    ] = None,
    tools_directory: ToolsDirectory = None,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Say what the policy decides of a call, and why. Nothing is called."""
    from fumehood.cli.policy_view import show_explanation
    from fumehood.policy.model import ExplainWish

    require_tool_name(tool)
    given = _json_object(arguments)
    if file is not None:
        offline = _offline(tools_directory)
        wish = ExplainWish(
            tool=tool, arguments=given, principal_id=principal, agent_id=agent, session_id=session
        )
        told = offline.explain(wish, offline.load(file), environment)
    else:
        if environment is not None:
            fail("--environment goes with --file; a daemon has its own.", ExitCode.USAGE)
        with _seeing(socket, credential_stdin, as_json=as_json) as client:
            told = client.policy.explain(
                tool, given, principal_id=principal, agent_id=agent, session_id=session
            )
    show_explanation(told, as_json=as_json)


@policy.command("show")
def show(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Show the rules of the running engine, and how often those in shadow mode matched.

    Needs a credential with approve or admin.
    """
    from fumehood.cli.policy_view import show_status

    with _seeing(socket, credential_stdin, as_json=as_json) as client:
        status = client.policy.show()
    show_status(status, as_json=as_json)


@policy.command("reload")
def reload(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Let the engine read its policy now. Needs a credential with admin."""
    from fumehood.cli.policy_view import show_status

    with controlling(socket, credential_stdin=credential_stdin, as_json=as_json) as client:
        status = client.policy.reload()
    show_status(status, as_json=as_json)


def _seeing(
    socket: Path | None, credential_stdin: bool, *, as_json: bool
) -> AbstractContextManager[ControlClient]:
    return controlling(socket, credential_stdin=credential_stdin, as_json=as_json, scope=EITHER)


def _offline(tools_directory: Path | None) -> Offline:
    from fumehood.cli.policy_offline import Offline

    config = read_config()
    directory = tools_directory if tools_directory is not None else config.tools_directory
    return Offline(config, directory.absolute() if directory is not None else None)


def _policy_path(given: Path | None) -> Path:
    path = given if given is not None else read_config().policy_file
    if path is None:
        fail("Name the policy's file; the configuration has no policy_file.", ExitCode.USAGE)
    return path.absolute()


def _json_object(text: str) -> JsonObject:
    try:
        value = strict_json.loads(text.encode("utf-8", "surrogateescape"))
    except strict_json.StrictJsonError as error:
        fail(f"The arguments are {error}.", ExitCode.USAGE)
    if not isinstance(value, dict):
        fail("The arguments must be a JSON object.", ExitCode.USAGE)
    return value
