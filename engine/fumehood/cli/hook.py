"""`fumehood hook claude-code`: lets the engine decide on the tool calls of another agent.

The agent runs this command before each tool call, with the call on standard input, and reads the
decision from standard output. Invariant: every failure leads to a denial before Claude Code's
timeout, because Claude Code allows a call whose hook fails or exceeds the timeout.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import PlainCommand, PlainGroup, SocketPath, TokenFile
from fumehood.cli.reach import decide_once
from fumehood.client.api_request import DaemonUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

hook = typer.Typer(
    cls=PlainGroup, help="Gates before the tools of other agents.", no_args_is_help=True
)

EVENT = "PreToolUse"
LEAST_ANSWER_S = 15.0
"""Seconds for the start of this command and for the engine's answer, not counting the wait for
approval."""

WRITE_S = 5.0
"""Maximum seconds for writing an answer. The limit is needed because the agent might not read the
answer."""

MARGIN_S = 15
"""Seconds by which Claude Code's timeout exceeds this command's timeout, so that this command's
timeout expires first."""


@hook.command("claude-code", cls=PlainCommand)
def claude_code(
    wait: Annotated[
        float | None, typer.Option(help="Seconds to wait for approval if it is needed.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="The agent to ask for.")] = None,
    pending: Annotated[
        str,
        typer.Option(
            metavar="deny|ask",
            help="The answer while a call waits for approval: deny, or ask the user of Claude "
            "Code, who then decides instead of the approver.",
        ),
    ] = "deny",
    print_settings: Annotated[
        bool,
        typer.Option("--print-settings", help="Print what to put into Claude Code's settings."),
    ] = False,
    token_file: TokenFile = None,
    socket: SocketPath = None,
) -> None:
    """Decide about one tool call of Claude Code, as its hook PreToolUse.

    Reads the hook's JSON on standard input and answers with allow, deny or ask. Without an engine,
    and wherever anything fails, the answer is deny.
    """
    wait_s = wait or 0.0
    if not 0 <= wait_s < float("inf") or pending not in ("deny", "ask"):
        fail("--wait takes a number of seconds, and --pending deny or ask.", ExitCode.USAGE)
    if print_settings:
        print(json.dumps(_settings(wait_s), indent=2))
        return
    try:
        _deny_after(wait_s + LEAST_ANSWER_S)
        decision, reason = _decided(_read(), wait_s, agent, pending, (socket, token_file))
    except (ValueError, DaemonUnavailable) as fault:
        decision = "deny"
        reason = f"fumehood decided nothing, so the call must not run. {fault}"
    except typer.Exit:
        decision, reason = "deny", "fumehood's hook is set up wrongly: run it by hand to see how."
    except BaseException as fault:  # a denial also for a bug or a signal
        decision, reason = "deny", f"fumehood's hook failed ({type(fault).__name__})."
    _answer(decision, reason)


def _decided(
    call: JsonObject,
    wait_s: float,
    agent: str | None,
    pending: str,
    reach: tuple[Path | None, Path | None],
) -> tuple[str, str]:
    options: JsonObject = {"session_id": call["session_id"]}
    if wait_s:
        options["wait_for_approval"] = wait_s
    if agent is not None:
        options["agent_id"] = agent
    context = {"client": "claude-code", "cwd": call["cwd"]}
    answer = decide_once(call["tool_name"], call["tool_input"], context, options, *reach)
    error, data = answer["error"], answer["data"]
    if error is not None:
        raise ValueError(f"{error['code']}: {error['message']}")
    if data.get("decision") not in ("allow", "deny", "pending"):
        raise ValueError("Its answer is not a decision.")
    decision, reason = data["decision"], str(data.get("reason"))
    if decision == "pending":
        approve = f"An approver runs: fumehood approvals approve {data.get('approval_id')}"
        return pending, f"{reason} {approve}"
    code = data.get("code")
    return decision, reason if code is None else f"{code}: {reason}"


def _read() -> JsonObject:
    call = strict_json.loads(sys.stdin.buffer.read())
    wanted: dict[str, type] = {
        "hook_event_name": str, "session_id": str, "cwd": str, "tool_name": str, "tool_input": dict,
    }  # fmt: skip
    for name, kind in wanted.items():
        if not isinstance(call, dict) or not isinstance(call.get(name), kind):
            words = f"The hook's input has no {name}: it is not that of {EVENT}."
            raise ValueError(words)  # noqa: TRY004 - as for every input that cannot be used
    if call["hook_event_name"] != EVENT:
        raise ValueError(f"This hook is for {EVENT} only.")
    return dict(call)


def _deny_after(seconds: float) -> None:
    """Arrange that this process ends with a denial after `seconds`, unless it has decided by
    then.
    """

    def deny(*_: object) -> NoReturn:
        _block_after(WRITE_S)
        answer = _output("deny", "fumehood did not answer in time, so the call must not run.")
        os.write(1, answer.encode())
        os._exit(ExitCode.SUCCESS)

    signal.signal(signal.SIGALRM, deny)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _block_after(seconds: float) -> None:
    """Arrange that this process ends after `seconds` with the exit status that makes Claude Code
    block the call. No answer is written in that case.
    """
    signal.signal(signal.SIGALRM, lambda *_: os._exit(ExitCode.USAGE))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _answer(decision: str, reason: str) -> None:
    """Print the decision and its reason. If that fails or takes too long, end this process with the
    exit status that makes Claude Code block the call.
    """
    try:
        _block_after(WRITE_S)
        sys.stdout.write(_output(decision, reason) + "\n")  # `print` ignores a closed stdout
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException:  # a signal, too
        os._exit(ExitCode.USAGE)  # a normal exit would fail to flush, and change the status


def _output(decision: str, reason: str) -> str:
    output = {
        "hookEventName": EVENT,
        "permissionDecision": decision,
        "permissionDecisionReason": reason,
    }
    return json.dumps({"hookSpecificOutput": output})


def _settings(wait_s: float) -> JsonObject:
    """Return the hook's entry for Claude Code's settings, with a timeout that allows a wait of
    `wait_s`. The key `onFailure` in the entry needs Claude Code 2.1.295.
    """
    command = [str(Path(sys.argv[0]).absolute()), "hook", "claude-code"]
    options = [one for one in sys.argv[3:] if one != "--print-settings"]
    entry = {
        "type": "command",
        "command": shlex.join([*command, *options]),
        "timeout": int(wait_s + LEAST_ANSWER_S) + MARGIN_S,
        "onFailure": "block",
    }
    return {"hooks": {EVENT: [{"matcher": "*", "hooks": [entry]}]}}
