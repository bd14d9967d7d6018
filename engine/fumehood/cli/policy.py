"""`fumehood policy`: check, test, explain, show and reload the rules, with or without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.escaping import say
from fumehood.cli.exits import ExitCode, fail, require_tool_name
from fumehood.cli.options import AsJson, ControlSocketPath, CredentialStdin, ToolName
from fumehood.cli.plain import as_text, plain
from fumehood.cli.reach import EITHER, controlling
from fumehood.cli.settings import read_config
from fumehood.cli.show import show_json, wants_json
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.cli.policy_offline import Offline
    from fumehood.policy.model import Explanation, PolicyStatus

policy = typer.Typer(help="The policy: rules that allow, ask or deny calls.", no_args_is_help=True)

PolicyPath = Annotated[
    Path | None,
    typer.Argument(help="The policy file; default: policy_file of the configuration."),
]
ToolsDirectory = Annotated[
    Path | None,
    typer.Option(help="Directory with further tool definitions; default: by configuration."),
]

ANSWERS = {True: "yes", False: "no", None: "in doubt"}


@policy.command("check")
def check(
    file: PolicyPath = None,
    tools_directory: ToolsDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Report all errors in a policy; exit 1 if there are any."""
    from fumehood.cli.policy_offline import show_checked

    policy = _offline(tools_directory).load(_policy_path(file))
    show_checked(policy, as_json=as_json)


@policy.command("test")
def hold_against(
    file: Annotated[Path, typer.Argument(help="File of calls with their expected decisions.")],
    policy_path: Annotated[
        Path | None,
        typer.Option("--policy", help="The policy; default: policy_file of the configuration."),
    ] = None,
    enforce: Annotated[
        bool, typer.Option("--enforce", help="Treat rules in shadow mode as enforced.")
    ] = False,
    tools_directory: ToolsDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Test a policy with calls and expected decisions; exit 1 if one differs."""
    from fumehood.cli.policy_offline import show_results

    offline = _offline(tools_directory)
    loaded = offline.load(_policy_path(policy_path))
    results = offline.test(file, loaded.enforced() if enforce else loaded)
    show_results(results, as_json=as_json)
    if not all(result.passed for result in results):
        raise typer.Exit(ExitCode.TOOL_FAILED)


@policy.command("explain")
def explain(
    tool: ToolName,
    arguments: Annotated[str, typer.Argument(help="The call's arguments as JSON.")] = "{}",
    agent: Annotated[str | None, typer.Option(help="The agent it is made for.")] = None,
    principal: Annotated[
        str | None, typer.Option(help="The principal that makes it, such as uid:1000.")
    ] = None,
    session: Annotated[str | None, typer.Option(help="The session it is made in.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Use the policy in this file, without a daemon.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="With --file: the environment; default: by configuration.")
    ] = None,
    tools_directory: ToolsDirectory = None,
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Explain what the policy decides for a call, and why. Nothing is called."""
    from fumehood.policy.model import ExplainWish

    require_tool_name(tool)
    given = _json_object(arguments)
    if file is not None:
        offline = _offline(tools_directory)
        query = ExplainWish(
            tool=tool, arguments=given, principal_id=principal, agent_id=agent, session_id=session
        )
        explanation = offline.explain(query, offline.load(file), environment)
    else:
        if environment is not None:
            fail("--environment needs --file; a daemon has its own.", ExitCode.USAGE)
        with controlling(
            socket, credential_stdin=credential_stdin, as_json=as_json, scope=EITHER
        ) as client:
            explanation = client.policy.explain(
                tool, given, principal_id=principal, agent_id=agent, session_id=session
            )
    _show_explanation(explanation, as_json=as_json)


@as_text
def _show_status(status: PolicyStatus) -> None:
    """Print the version and a table of the rules."""
    from fumehood.cli.tables import Field, show_table

    say(f"policy {status.version} ({status.file or 'no file: the defaults'})")
    say(f"environment {status.environment}")
    for fault in status.refused:
        say(f"the file was rejected, the previous rules stay: {fault}")
    has_lines = any(rule.line is not None for rule in status.rules)  # TOML has none
    fields = (
        Field("rule"), Field("decision"), *([Field("line", drop=3)] if has_lines else []),
        Field("mode", drop=2),
        Field("here", drop=2), Field("would have", drop=1), Field("reason", drop=4),
    )  # fmt: skip
    rows = [
        (
            rule.id, str(rule.decision), *([str(rule.line or "")] if has_lines else []), rule.mode,
            "yes" if rule.is_of_this_environment else "no",
            str(rule.would_have_decided) if rule.mode == "shadow" else "", rule.reason or "",
        )
        for rule in status.rules
    ]  # fmt: skip
    if rows:
        show_table(fields, rows)


plain(
    policy,
    "policy.show",
    "Show the rules of the running engine, and how often shadow rules matched.\n\n"
    "Needs a credential with approve or admin.",
    _show_status,
    scope=EITHER,
)
plain(
    policy,
    "policy.reload",
    "Make the engine reload its policy. Needs a credential with admin.",
    _show_status,
)


def _offline(tools_directory: Path | None) -> Offline:
    from fumehood.cli.policy_offline import Offline

    config = read_config()
    directory = tools_directory if tools_directory is not None else config.tools_directory
    return Offline(config, directory.absolute() if directory is not None else None)


def _policy_path(given: Path | None) -> Path:
    path = given if given is not None else read_config().policy_file
    if path is None:
        fail("Name the policy file; the configuration has no policy_file.", ExitCode.USAGE)
    return path.absolute()


def _json_object(text: str) -> JsonObject:
    try:
        value = strict_json.loads(text.encode("utf-8", "surrogateescape"))
    except strict_json.StrictJsonError as error:
        fail(f"The arguments are {error}.", ExitCode.USAGE)
    if not isinstance(value, dict):
        fail("The arguments must be a JSON object.", ExitCode.USAGE)
    return value


def _show_explanation(explanation: Explanation, *, as_json: bool) -> None:
    """Print the decision, then each rule that matches or nearly matches."""
    if wants_json(as_json):
        show_json(explanation.model_dump(mode="json"))
        return
    say(f"{explanation.verdict}  {explanation.tool}  by {explanation.rule}")
    say(f"policy {explanation.policy_version}, environment {explanation.environment}")
    if explanation.reason is not None:
        say(f"reason: {explanation.reason}")
    if explanation.approvers or explanation.quorum > 1:
        who = ", ".join(explanation.approvers) or "any approver"
        say(f"{explanation.quorum} of: {who}")
    for line in explanation.shadow:
        say(f"in shadow mode: {line}")
    for rule in explanation.rules:
        marks = "matches" if rule.matches else "does not match"
        shadow = ", in shadow mode" if rule.mode == "shadow" else ""
        where = f" (line {rule.line})" if rule.line is not None else ""
        say(f"\n{rule.id}{where}: {rule.decision}{shadow}: {marks}")
        for part in rule.parts:
            compared = f" (it is {part.compared})" if part.compared is not None else ""
            say(f"  {ANSWERS[part.holds]:8}  {part.says}{compared}")
