"""Programs in containers: run them, and turn their endings into outcomes.

Host side, between `pipeline/execute` and a wall's lease. The ending, streams, exit status and files
are measured outside the program; value, exception and traceback are claims of the program.
Invariant: a claim never turns a failure into a success.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType

import anyio

from fumehood.core.errors import (
    EndedBy,
    EngineError,
    ExecutionError,
    InvalidParams,
    NetworkError,
    PermissionDenied,
    SandboxUnavailable,
    SandboxViolation,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES, Language
from fumehood.core.limits import Limits
from fumehood.core.long_text import SIDE_BYTES, head_and_tail
from fumehood.core.tool import SHELL_OUTPUT, ToolDefinition
from fumehood.executors.base import A_SESSION, Executor, Placement, ToolRun
from fumehood.executors.claims import NO_VALUE, FailureClaim, ValueClaim, read_claim, read_value
from fumehood.executors.effects import Effect
from fumehood.executors.endings import (
    Subject,
    container_lost,
    failure_message,
    left_out_words,
    program_error,
    refused_by,
    session_lost,
    state_words,
)
from fumehood.executors.outcome import MAX_DATA_BYTES, HeldTrial, Outcome, Recorded
from fumehood.executors.program_output import KeptStreams, KeptText, ProgramFiles, SentFile
from fumehood.gateway.cassette import Recorder
from fumehood.gateway.door import Door, NetworkUse, shown_request
from fumehood.gateway.request import HeldRequest, Refusal
from fumehood.gateway.service import ENVIRONMENT
from fumehood.observe.clock import timestamp
from fumehood.observe.tracing import VARIABLE
from fumehood.protocol.canonical import digest_of
from fumehood.sandbox.session_use import HeldFiles, SessionLease, SessionTrials
from fumehood.sandbox.wall import Network, RunEnding, RunSinks

_PLACEMENT = Placement(
    "container",
    "container",
    "executors 'code:…' always run in a container without network, with a read-only root and an "
    "unprivileged user: one that only this caller's calls of the same agent have used, reset "
    "after each of them, or with isolation=container_per_call one made for this call",
    isolations=MappingProxyType({"call": False, "container_per_call": True}),
)
_IN_A_SESSION = Placement(
    "container",
    "container",
    "executors 'code:…' always run in a container without network, with a read-only root and an "
    "unprivileged user: with a session_id in the session's own, which no other call ever used and "
    "which keeps the files of its workspace from call to call",
    isolations=A_SESSION,
    is_of_session=True,
)


class ProgramExecutor(Executor):
    """Runs programs of one language in a container."""

    language: str

    def __init__(self, language: Language) -> None:
        self.language = language.name

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _IN_A_SESSION if in_session else _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        """Run one program in the container of its call, or of the call's session.

        If the program fails, the error's `details` hold the fields that `data` would have, plus
        `exception`, and `limit` if a limit ended it.
        """
        if run.held is not None:
            return await _put_in_once(run, run.held)
        principal_id, session_id = run.domain.principal_id, run.domain.session_id
        handle, calls, arguments = run.handle, run.calls, run.arguments
        files = ProgramFiles(
            run.blobs,
            principal_id,
            sent_files(arguments),
            session_id,
            with_files=arguments.get("return_files") is not False,
            with_digests=run.request.options.receipt,
        )
        recorder = Recorder() if run.request.options.receipt else None
        streams = KeptStreams(
            run.blobs,
            principal_id,
            run.limits.output_bytes,
            run.redactor,
            handle.hear,
            session_id,
        )
        cancelled: list[RunEnding] = []
        ending: RunEnding | None = None
        effect: HeldFiles | None = None
        trial: list[HeldRequest] | None = [] if run.request.options.preview else None
        sent = program_arguments(arguments, self.language)
        has_tools = calls is not None and bool(calls.tools)
        if calls is not None and has_tools:
            sent["tools"] = calls.tools
        use = NetworkUse()
        try:
            async with _network(run, recorder, trial) as (use, network, variables):
                # The caller's own variable of a name wins.
                own = {VARIABLE: run.traceparent, **variables}
                named = [{"name": name, "value": value} for name, value in own.items()]
                sent["env"] = [*named, *sent.get("env", [])]
                sinks = handle.sinks(
                    files=files, output=streams.hear, ending=cancelled.append, network=network,
                    call=calls.on_call if calls is not None and has_tools else None,
                )  # fmt: skip
                try:
                    with use.scope:
                        ending, effect = await _run_or_try(run, self.language, sent, sinks)
                    if ending is None:  # the gateway has ended it
                        ending = replace(cancelled[0], ended_by=EndedBy.POLICY)
                finally:
                    if calls is not None:
                        await calls.close()
        except BaseException:
            files.discard()
            if cancelled and handle.is_cancelled:
                # It may have ended by itself at the same moment, but its caller was already told
                # that it was cancelled.
                ending = replace(cancelled[0], ended_by=EndedBy.CANCELLED)
                with anyio.CancelScope(shield=True):
                    kept = await streams.finish()
                    outcome = _outcome(run, ending, kept, files, use)
                    handle.partial = replace(outcome, redacted=streams.redacted)
            else:
                streams.discard()
            raise
        with anyio.CancelScope(shield=True):  # bounded: it waits for the disk, not for the program
            await files.entries()
            kept = await streams.finish()
        outcome = _outcome(run, ending, kept, files, use)
        if effect is not None and not trial and effect.is_empty:
            await _trials(run).drop(effect)  # there is nothing to decide on
        elif trial is not None:
            outcome = _as_trial(outcome, effect, trial)
        if recorder is not None:
            outcome = replace(outcome, recorded=Recorded(recorder.cassette, files.digests))
        return replace(outcome, redacted=streams.redacted) if streams.redacted else outcome


async def _run_or_try(
    run: ToolRun, language: str, sent: JsonObject, sinks: RunSinks
) -> tuple[RunEnding, HeldFiles | None]:
    if not run.request.options.preview:
        return await run.lease.run(language, sent, run.limits, sinks), None
    return await _trials(run).run(language, sent, run.limits, sinks)


def _trials(run: ToolRun) -> SessionTrials:
    trials = run.lease.trials if isinstance(run.lease, SessionLease) else None
    if trials is None:
        raise SandboxUnavailable("This session has no saved files.", retryable=False)
    return trials


def _as_trial(outcome: Outcome, files: HeldFiles | None, requests: list[HeldRequest]) -> Outcome:
    """Return the outcome of a trial with what a human decides on: what was printed, files, and
    requests.
    """
    if files is None:
        if outcome.error is not None:
            return outcome
        return replace(outcome, data=None, error=_no_effect(outcome.data))
    shown = {**files.shown}
    printed = "".join(outcome.data.get(name) or "" for name in ("stdout", "stderr"))
    if printed:
        shown["printed"] = printed if len(printed) <= SIDE_BYTES else head_and_tail(printed)
    if requests:
        shown["requests"] = [shown_request(one.request, one.body) for one in requests]
    if files.has_variables:
        shown["variables"] = "as the program leaves them"
    effect = Effect(shown, base=files.token, effect=digest_of(shown))
    return replace(outcome, held=HeldTrial(files, effect, outcome, requests))


def _no_effect(fields: JsonObject) -> EngineError:
    return ExecutionError(
        "The program ran, but its effect cannot be held: it made a link or a special file, left "
        "threads, or its files could not be saved. The session's files are as before.",
        details=fields,
    )


async def _put_in_once(run: ToolRun, held: HeldTrial) -> Outcome:
    held.has_begun = True
    try:
        held.result = outcome = await _put_in(run, held)
    except EngineError as error:
        held.result = error
        raise
    finally:
        held.over.set()
    return outcome


async def _put_in(run: ToolRun, held: HeldTrial) -> Outcome:
    """Put the effect of a trial in: files and variables, then its requests in order."""
    outcome = replace(held.outcome, isolation="session")
    await _trials(run).put_in(held.files)
    error = await _deliver(run, held.requests) if held.requests else None
    if error is None:
        return outcome
    error.details = outcome.data
    return replace(outcome, data=None, error=error)


async def _deliver(run: ToolRun, requests: list[HeldRequest]) -> EngineError | None:
    """Send the requests of a trial in order, and return why one was not sent."""
    async with _opened(run, None, None) as (door, _):
        assert door.deliver is not None
        for number, one in enumerate(requests, 1):
            try:
                await door.deliver(one)
            except Refusal as refusal:
                return NetworkError(
                    f"The session has the trial's files and variables, but of {len(requests)} "
                    f"requests only {number - 1} were sent. {one.request.method} "
                    f"{one.request.url[:200]}: {refusal.message}",
                    retryable=False,
                )
    return None


@asynccontextmanager
async def _network(
    run: ToolRun, recorder: Recorder | None, trial: list[HeldRequest] | None
) -> AsyncIterator[tuple[NetworkUse, Network | None, Mapping[str, str]]]:
    """Give the program the network that its call asks for, and the variables for it."""
    if not run.network or run.calls is None:
        yield NetworkUse(), None, {}
        return
    async with _opened(run, recorder, trial) as (door, network):
        yield door.use, network, {**ENVIRONMENT, **door.placeholders.environment}


@asynccontextmanager
async def _opened(
    run: ToolRun, recorder: Recorder | None, trial: list[HeldRequest] | None
) -> AsyncIterator[tuple[Door, Network]]:
    options, calls = run.request.options, run.calls
    assert calls is not None
    gateway = run.upstreams.gateway
    if not gateway.is_open and options.replay is None:
        raise PermissionDenied(
            "This engine gives programs no network: the operator has set no gateway.hosts. Do not "
            "retry."
        )
    async with gateway.door(
        run.network, calls.ask, run.redactor, cancel=calls.cancel, spend=calls.spend,
        recorder=recorder,
        replay=options.replay, trial=trial, tool=run.tool.definition.name,
        call_id=run.request.call_id, principal_id=run.domain.principal_id,
        agent_id=options.agent_id, session_id=run.domain.session_id,
    ) as opened:  # fmt: skip
        yield opened


def _outcome(
    run: ToolRun,
    ending: RunEnding,
    kept: Mapping[str, KeptText],
    left: ProgramFiles,
    use: NetworkUse,
) -> Outcome:
    tool, limits = run.tool.definition, run.limits
    session_id = run.domain.session_id
    language = LANGUAGES[tool.executor.removeprefix("code:")]
    if kept:  # if it is empty, the wall does not report output while a program runs
        ending = replace(ending, stdout=kept["stdout"].text, stderr=kept["stderr"].text)
    failure = read_claim(FailureClaim, ending.claimed_error)
    value = read_value(ending.result) if ending.result is not None else NO_VALUE
    left_out = ending.files_left_out + left.left_out
    subject = Subject(language, in_session=session_id is not None)
    fields = _fields(language, ending, value, left.files, left.pictures, left_out)
    if session_id is not None:
        fields["session"] = session_fields(session_id, ending)
    if run.calls is not None and run.calls.tools:
        fields["tool_calls"] = run.calls.report
    error: EngineError | None = None
    if use.ended_for is not None and ending.ended_by is EndedBy.POLICY:
        error = SandboxViolation(
            f"The program put the placeholder of the secret {use.ended_for!r} where it must not "
            "be, so it was ended.",
            details=fields,
        )
    elif ending.ended_by is not EndedBy.OK:
        error = _error(tool, ending, failure, limits, fields, subject)
    return Outcome(
        ended_by=ending.ended_by,
        isolation=ending.isolation,
        node=ending.node,
        data=fields if error is None else None,
        error=error,
        cpu_ms=ending.cpu_ms,
        peak_memory_bytes=ending.peak_memory_bytes,
        output_bytes=_output_bytes(ending),
        warnings=(
            (refused_by(ending.limits_hit, limits, subject) if ending.limits_hit else ())
            + (left_out_words(left_out) if left_out else ())
            + tuple(value.notes)
            + (state_words(ending) if session_id is not None else ())
            + use.warnings()
        ),
        network=use.report() if run.network else None,
        max_data_bytes=MAX_DATA_BYTES,
        cuts=tuple(stream.cut for stream in kept.values() if stream.cut is not None),
    )


def session_fields(session_id: str, ending: RunEnding) -> JsonObject:
    """Return the field `session` of `data` and of the error's `details`."""
    fields = {
        "id": session_id,
        "state": ending.state,
        "variables_bytes": ending.variables_bytes,
    }
    if ending.state == "restored" and ending.copied_at is not None:
        fields["copied_at"] = timestamp(ending.copied_at)
    return fields


def _fields(
    language: Language,
    ending: RunEnding,
    value: ValueClaim,
    files: list[JsonObject],
    pictures: list[JsonObject],
    left_out: int,
) -> JsonObject:
    """Return the fields that `data` and the error's `details` share.

    Shell commands have no value and no images.
    """
    if ending.ended_by is not EndedBy.OK:
        value = NO_VALUE
    fields: JsonObject = {
        "stdout": ending.stdout,
        "stderr": ending.stderr,
        "exit_code": ending.exit_code,
        "value": value.value,
        "value_repr": value.value_repr,
        "files": files,
        "images": pictures,
        "ended_by": ending.ended_by.value,
    }
    if not language.has_value:
        fields = {name: fields[name] for name in SHELL_OUTPUT["required"]}
    if ending.limits_hit:
        fields["limits_hit"] = list(ending.limits_hit)
    if left_out:
        fields["files_left_out"] = left_out
    return fields


def _error(
    tool: ToolDefinition,
    ending: RunEnding,
    failure: FailureClaim | None,
    limits: Limits,
    fields: JsonObject,
    subject: Subject,
) -> EngineError | None:
    exception = failure.exception if failure is not None else None
    details = dict(fields)
    if subject.language.has_value:
        details["exception"] = exception.model_dump() if exception is not None else None
    if ending.signal is not None:
        details["signal"] = ending.signal
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        if subject.in_session:
            return session_lost(details, ending, has_disk=limits.disk_mb is not None)
        return container_lost(tool, details, ending.node if ending.is_node_lost else None)
    if failure is not None and failure.kind == "invalid" and ending.ended_by is EndedBy.EXCEPTION:
        message = failure_message(ending, failure, subject)
        is_directory = failure.message.startswith("the working directory")
        fields_at_fault = ["working_directory" if is_directory else "files"]
        return InvalidParams(message, fields=fields_at_fault, details=details)
    return program_error(ending, limits, failure, subject, details)


def _output_bytes(ending: RunEnding) -> int:
    if ending.output_bytes is not None:
        return ending.output_bytes
    return ending.stdout_bytes + ending.stderr_bytes


# -- arguments -----------------------------------------------------------------------------


def sent_files(arguments: JsonObject) -> list[SentFile]:
    """Return the files in arguments that have passed validation, decoded."""
    return [SentFile(file["path"], _content(file)) for file in arguments.get("files") or []]


def program_arguments(arguments: JsonObject, language: str = "python") -> JsonObject:
    """Return a program's arguments in the form that guests expect.

    The arguments in `further` are left out if they are not given.
    """
    source = LANGUAGES[language].source
    further = ("stdin_base64", "argv", "env", "working_directory", "return_files")
    return {
        source: arguments.get(source),
        "stdin": arguments.get("stdin"),
        "files": arguments.get("files") or [],
        **{name: arguments[name] for name in further if arguments.get(name) is not None},
    }


def _content(file: JsonObject) -> bytes:
    text: str | None = file.get("content")
    return text.encode() if text is not None else base64.b64decode(file["content_base64"])
