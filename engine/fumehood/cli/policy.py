"""`fumehood policy`: check, test, explain, show and reload the rules, with or without a daemon.

Without a daemon, the commands do not know tools that were registered over the control socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import Field, ValidationError, create_model

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    ToolName,
    counted,
    json_object,
    read_bytes,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import EITHER, controlling, read_config
from fumehood.cli.show import (
    Column,
    as_text,
    show_json,
    show_table,
    wants_json,
)
from fumehood.config import Config
from fumehood.core.errors import ToolNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade
from fumehood.core.tool import ToolDefinition
from fumehood.core.value import Value
from fumehood.executors.kinds import is_weaker
from fumehood.parts import coming, parts
from fumehood.pipeline.coerce import coerce
from fumehood.policy.loader import load_policy, plain_words
from fumehood.policy.model import (
    CallFacts,
    ExplainWish,
    Explanation,
    Policy,
    PolicyError,
    PolicyStatus,
    Verdict,
)
from fumehood.policy.service import PolicyGate
from fumehood.protocol.files import FileFault, Lines, line_of, one_line, read_values
from fumehood.registry.discover import discover
from fumehood.registry.index import ExternalTools, Source, ToolIndex
from fumehood.registry.secrets import SecretBindings

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

    policy = _offline(tools_directory).load(_policy_path(file))
    if wants_json(as_json):
        show_json({"version": policy.version, "file": policy.file, "rules": len(policy.rules)})
    else:
        say(f"{policy.file}: {counted(len(policy.rules), 'rule')}, version {policy.version}")


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

    offline = _offline(tools_directory)
    loaded = offline.load(_policy_path(policy_path))
    results = offline.test(file, loaded.enforced() if enforce else loaded)
    show_results(results, as_json=as_json)
    if not all(result["passed"] for result in results):
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
    given = json_object(arguments, "The arguments")
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
    _show_explanation(explanation, as_json)


@as_text
def _show_status(status: PolicyStatus) -> None:
    """Print the policy's version and a table of its rules."""
    say(f"policy {status.version} ({status.file or 'no file: the defaults'})")
    say(f"environment {status.environment}")
    for fault in status.refused:
        say(f"the file was rejected, the previous rules stay: {fault}")
    fields = (
        Column("rule"), Column("decision"), Column("line", drop=3),
        Column("mode", drop=2),
        Column("here", drop=2), Column("would have", drop=1), Column("reason", drop=4),
    )  # fmt: skip
    rows = [
        (
            rule.id, str(rule.decision), str(rule.line or ""), rule.mode,
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
    """Load the configured tools. Print a warning about tools that could not be loaded."""
    config = read_config()
    offline = Offline(config, tools_directory)
    for fault in offline.left_out:
        say(one_line(f"{fault.entry_point} was left out: {fault.reason}"), to_stderr=True)
    for left_out in offline.directory_faults:
        where = left_out.file or offline.directory
        say(one_line(f"{where}: {left_out.reason}"), to_stderr=True)
    return offline


def _policy_path(given: Path | None) -> Path:
    path = given if given is not None else read_config().policy_file
    if path is None:
        fail("Name the policy file; the configuration has no policy_file.", ExitCode.USAGE)
    return path.absolute()


@as_text
def _show_explanation(explanation: Explanation) -> None:
    """Print the decision, and then each rule that matches or nearly matches the call."""
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


class _Call(Value):
    """One call in a test file, with the decision that the policy should make."""

    tool: Annotated[str, Field(max_length=200)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    agent: str | None = None
    principal: str = ""
    environment: str | None = None
    grade: Grade | None = None
    """The grade of the container in which the call would run, or None if it is not known."""
    expect: Verdict
    rule: str | None = None


_EXCESSES: dict[str, Any] = {key: (bool, False) for part in parts() for key in part.excesses}
"""Fields of a test call, one for each rule key in `Part.excesses`. Each name is mapped to the
field's type and default. True means that the gate (check before a call) with this key would refuse
the call now (`Excess`)."""

if TYPE_CHECKING:
    from fumehood.definition_files.directory import DirectoryFault

    ExpectedCall = _Call
else:
    ExpectedCall = create_model("ExpectedCall", __base__=_Call, __module__=__name__, **_EXCESSES)


class ExpectedCalls(Value):
    """The contents of a test file."""

    calls: tuple[ExpectedCall, ...] = Field(min_length=1)


_KEYS = sorted({*ExpectedCall.model_fields, *ExpectedCalls.model_fields})


class Offline:
    """The installed and configured tools without an engine, with methods that apply a policy to
    these tools. `tools_directory` replaces the configured directory of definitions.
    """

    def __init__(self, config: Config, tools_directory: Path | None = None) -> None:
        self._config = config
        secrets = SecretBindings(config.secrets, config.rest)
        self.index = ToolIndex(secrets, ExternalTools(config.external_tools), coming(config))
        self.left_out = discover(self.index, config.host_tools, web=config.web)
        # Without its part, the setting does not exist.
        self.directory: Path | None = tools_directory or getattr(config, "tools_directory", None)
        self.directory_tools = 0
        self.directory_faults: tuple[DirectoryFault, ...] = ()
        if self.directory is not None:
            self._add_directory(self.directory.absolute())

    def _add_directory(self, path: Path) -> None:
        try:
            from fumehood.definition_files.directory import directory_for
        except ModuleNotFoundError:
            fail(
                "--tools-directory needs the part definition_files, which is not installed.",
                ExitCode.USAGE,
            )
        contents = directory_for(self.index, path).load()
        self.index.replace_source(Source.DIRECTORY, contents.tools)
        self.directory_tools, self.directory_faults = len(contents.tools), contents.faults

    def definitions(self) -> Iterable[ToolDefinition]:
        """Return every version of every tool."""
        names = [tool.definition.name for tool in self.index]
        return [one.definition for name in names for one in self.index.versions(name)]

    def load(self, path: Path) -> Policy:
        """Load the policy. End the command with all errors if the policy has any."""
        try:
            return load_policy(path.absolute(), [*self.definitions(), *self.index.coming])
        except PolicyError as refused:
            fail(str(refused), ExitCode.TOOL_FAILED)

    def explain(self, query: ExplainWish, policy: Policy, environment: str | None) -> Explanation:
        """Explain which decision the policy makes on one call. End the command if the tool is
        unknown.
        """
        gate = PolicyGate(policy, environment or self._config.environment)
        try:
            tool = self.index.get(query.tool).definition
        except ToolNotFound as error:
            fail(error.message, ExitCode.USAGE)
        return gate.explain(
            CallFacts(
                tool,
                _effective(query.arguments, tool),
                query.principal_id or "",
                query.agent_id,
                query.session_id,
                is_weaker=partial(is_weaker, tool, None),
            )
        )

    def test(self, path: Path, policy: Policy) -> list[JsonObject]:
        """Decide on every call of a test file. Return one result for each call, in the form that
        the command prints.
        """
        results = []
        for number, (line, call) in enumerate(_read_calls(path), start=1):
            gate = PolicyGate(policy, call.environment or self._config.environment)
            try:
                tool = self.index.get(call.tool).definition
            except ToolNotFound as error:
                _refuse(path, line, f"call {number}: {error.message}")
            decision = gate.decide(_facts(call, tool))
            is_rule = call.rule is None or call.rule == decision.rule
            results.append(
                {
                    "number": number,
                    "line": line,
                    "tool": call.tool,
                    "expected": call.expect,
                    "expected_rule": call.rule,
                    "decided": decision.verdict,
                    "rule": decision.rule,
                    "passed": decision.verdict is call.expect and is_rule,
                }
            )
        return results


def show_results(results: list[JsonObject], *, as_json: bool) -> None:
    """Print each call whose decision was not the expected one, and the number of calls with the
    expected decision.
    """
    passed = sum(result["passed"] for result in results)
    if wants_json(as_json):
        show_json({"passed": passed, "failed": len(results) - passed, "calls": results})
        return
    for one in results:
        if not one["passed"]:
            where = f"call {one['number']}" if one["line"] is None else f"line {one['line']}"
            wanted = f" by {one['expected_rule']}" if one["expected_rule"] is not None else ""
            say(
                f"{where}, {one['tool']}: expected {one['expected']}{wanted}, decided "
                f"{one['decided']} by {one['rule']}"
            )
    print(f"{passed} of {len(results)} calls were decided as expected")


def _facts(call: ExpectedCall, tool: ToolDefinition) -> CallFacts:
    arguments = _effective(call.arguments, tool)
    return CallFacts(
        tool,
        arguments,
        call.principal,
        call.agent,
        None,
        partial(getattr, call),
        partial(is_weaker, tool, call.grade),
    )


def _effective(arguments: Mapping[str, Any], tool: ToolDefinition) -> dict[str, Any]:
    """Return the arguments with which the tool would run: converted to the declared types, with the
    tool's defaults.
    """
    return coerce(dict(arguments), tool)[0]


def _read_calls(path: Path) -> list[tuple[int | None, ExpectedCall]]:
    """Return each call of a test file with its line number, or with None if the file's format has
    no lines.
    """
    lines: Lines = {}
    try:
        document = read_values(path.name, read_bytes(str(path), str(path)), lines)
        calls = ExpectedCalls.model_validate(document).calls
    except KeyError:
        _refuse(path, None, "it is neither JSON nor TOML nor YAML")
    except FileFault as error:
        _refuse(path, None, str(error))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        _refuse(path, line_of(lines, fault["loc"]), f"{where}: {plain_words(fault, _KEYS)}")
    return [(line_of(lines, ("calls", number)), call) for number, call in enumerate(calls)]


def _refuse(path: Path, line: int | None, words: str) -> NoReturn:
    where = f"{path}:{line}" if line is not None else str(path)
    fail(f"{where}: {one_line(words)}", ExitCode.USAGE)
