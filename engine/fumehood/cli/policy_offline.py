"""The policy without a daemon: installed tools, a file of rules, and test calls.

Tools registered over the control socket are in the daemon's state and unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fumehood.cli.escaping import say
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import counted
from fumehood.cli.show import show_json, wants_json
from fumehood.config import Config
from fumehood.core.errors import ToolNotFound
from fumehood.core.tool import ToolDefinition
from fumehood.pipeline.coerce import coerce
from fumehood.policy.loader import load_policy, plain_words
from fumehood.policy.model import CallFacts, ExplainWish, Explanation, Policy, PolicyError, Verdict
from fumehood.policy.service import PolicyGate
from fumehood.protocol.files import FileFault, Lines, line_of, one_line, read_values
from fumehood.registry.directory import ToolDirectory
from fumehood.registry.discover import discover
from fumehood.registry.external import ExternalTools
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.secrets import SecretBindings

MAX_TEST_FILE_BYTES = 1 << 20
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


class ExpectedCall(BaseModel):
    """One call of a test file, with its expected decision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: Annotated[str, Field(max_length=200)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    agent: str | None = None
    principal: str = ""
    environment: str | None = None
    over_budget: bool = False
    expect: Verdict
    rule: str | None = None


_KEYS = sorted(ExpectedCall.model_fields)


class Result(BaseModel):
    """The result of one test call."""

    model_config = ConfigDict(frozen=True)

    number: int
    line: int | None
    tool: str
    expected: Verdict
    expected_rule: str | None
    decided: Verdict
    rule: str
    passed: bool


class Offline:
    """The installed and configured tools, and a policy for them."""

    def __init__(
        self,
        config: Config,
        tools_directory: Path | None,
        warn: Callable[[str], None] = lambda words: _warn(words),
    ) -> None:
        self._config = config
        secrets = SecretBindings(config.secrets, config.rest)
        self._index = ToolIndex(secrets, ExternalTools(config.external_tools), config.mcp_servers)
        for fault in discover(self._index, config.host_tools, private=(), web=config.web):
            warn(f"{fault.entry_point} was left out: {fault.reason}")
        if tools_directory is not None:
            contents = ToolDirectory(
                tools_directory,
                owner_of=lambda name: self._index.owner(name, but=Source.DIRECTORY),
                secrets=self._index.secrets,
            ).load()
            self._index.replace_source(Source.DIRECTORY, contents.tools)
            for left_out in contents.faults:
                warn(f"{left_out.file or tools_directory}: {left_out.reason}")

    def definitions(self) -> Iterable[ToolDefinition]:
        """Return every version of every tool."""
        names = [tool.definition.name for tool in self._index]
        return [one.definition for name in names for one in self._index.versions(name)]

    def load(self, path: Path) -> Policy:
        """Load the policy; exit with all its errors if there are any."""
        try:
            return load_policy(path.absolute(), [*self.definitions(), *self._index.coming])
        except PolicyError as refused:
            fail(str(refused), ExitCode.TOOL_FAILED)

    def explain(self, query: ExplainWish, policy: Policy, environment: str | None) -> Explanation:
        """Explain the decision for one call."""
        gate = PolicyGate(policy, environment or self._config.environment)
        try:
            tool = self._index.get(query.tool).definition
        except ToolNotFound as error:
            fail(error.message, ExitCode.USAGE)
        return gate.explain(
            CallFacts(
                tool,
                _effective(query.arguments, tool),
                query.principal_id or "",
                query.agent_id,
                query.session_id,
            )
        )

    def test(self, path: Path, policy: Policy) -> list[Result]:
        """Decide every call of a test file."""
        gates: dict[str, PolicyGate] = {}
        results = []
        for number, (line, call) in enumerate(_read_calls(path), start=1):
            environment = call.environment or self._config.environment
            gate = gates.setdefault(environment, PolicyGate(policy, environment))
            try:
                tool = self._index.get(call.tool).definition
            except ToolNotFound as error:
                _refuse(path, line, f"call {number}: {error.message}")
            decision = gate.decide(_facts(call, tool))
            is_rule = call.rule is None or call.rule == decision.rule
            results.append(
                Result(
                    number=number,
                    line=line,
                    tool=call.tool,
                    expected=call.expect,
                    expected_rule=call.rule,
                    decided=decision.verdict,
                    rule=decision.rule,
                    passed=decision.verdict is call.expect and is_rule,
                )
            )
        return results


def show_checked(policy: Policy, *, as_json: bool) -> None:
    """Report a valid policy."""
    if wants_json(as_json):
        show_json({"version": policy.version, "file": policy.file, "rules": len(policy.rules)})
        return
    say(f"{policy.file}: {counted(len(policy.rules), 'rule')}, version {policy.version}")


def show_results(results: list[Result], *, as_json: bool) -> None:
    """Print each call with an unexpected decision, and the number of expected ones."""
    passed = sum(result.passed for result in results)
    if wants_json(as_json):
        items = [result.model_dump(mode="json") for result in results]
        show_json({"passed": passed, "failed": len(results) - passed, "calls": items})
        return
    for result in results:
        if not result.passed:
            where = f"line {result.line}" if result.line is not None else f"call {result.number}"
            wanted = f" by {result.expected_rule}" if result.expected_rule is not None else ""
            say(
                f"{where}, {result.tool}: expected {result.expected}{wanted}, decided "
                f"{result.decided} by {result.rule}"
            )
    print(f"{passed} of {len(results)} calls were decided as expected")


def _facts(call: ExpectedCall, tool: ToolDefinition) -> CallFacts:
    return CallFacts(
        tool,
        _effective(call.arguments, tool),
        call.principal,
        call.agent,
        None,
        lambda: call.over_budget,
    )


def _effective(arguments: Mapping[str, Any], tool: ToolDefinition) -> dict[str, Any]:
    """Return arguments as a call would get them: coerced, with the tool's defaults."""
    return coerce(dict(arguments), tool)[0]


def _read_calls(path: Path) -> list[tuple[int | None, ExpectedCall]]:
    lines: Lines = {}
    if path.suffix not in SUFFIXES:
        _refuse(path, None, f"its name must end in one of {', '.join(SUFFIXES)}")
    try:
        data = path.read_bytes()
        if len(data) > MAX_TEST_FILE_BYTES:
            _refuse(path, None, "it is larger than 1 MB")
        document = read_values(path.name, data, lines)
    except OSError as error:
        _refuse(path, None, f"it cannot be read: {error.strerror}")
    except FileFault as fault:
        _refuse(path, None, str(fault))
    entries = document.get("calls") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries or len(document) > 1:
        _refuse(path, None, "it must hold a list 'calls' and nothing else")
    return [_parsed(path, lines, number, entry) for number, entry in enumerate(entries)]


def _parsed(path: Path, lines: Lines, number: int, entry: Any) -> tuple[int | None, ExpectedCall]:
    try:
        return line_of(lines, ("calls", number)), ExpectedCall.model_validate(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        line = line_of(lines, ("calls", number, *fault["loc"]))
        _refuse(path, line, f"call {number + 1}: {where}: {plain_words(fault, _KEYS)}")


def _refuse(path: Path, line: int | None, words: str) -> NoReturn:
    where = f"{path}:{line}" if line is not None else str(path)
    fail(f"{where}: {one_line(words)}", ExitCode.USAGE)


def _warn(words: str) -> None:
    say(one_line(words), to_stderr=True)


__all__ = ["ExpectedCall", "Offline", "Result", "show_checked", "show_results"]
