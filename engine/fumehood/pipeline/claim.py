"""Claim: make sure that no other call with this idempotency key is running or has been answered.

Fourth stage. Takes a `PermittedCall`, returns a `ClaimedCall`. A call with a key (from the option,
from the tool's own parameter, or derived from the call on request) claims it in one durable step.
It does so after authorization, so that no caller gets another caller's answer. A call without a key
costs nothing here. Two calls with the same key are the same call if they have the same fingerprint,
which is the hash of everything that decides what a call does. Invariants: at most one call per key
runs at a time; the answer is on disk before the caller gets it; the key of a call that may have
acted is never released, unless acting twice is harmless; calls with different arguments have
different fingerprints, except that equal numbers (1 and 1.0) count as the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy import Connection

from fumehood.call_options import deciding
from fumehood.core.call import MAX_KEY_CHARACTERS, CallRequest
from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.errors import (
    CallInProgress,
    Cancelled,
    IdempotencyConflict,
    InternalError,
    InvalidParams,
    OutcomeUnknown,
    RequiresHumanApproval,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import LOOP_SIZE
from fumehood.pipeline.authorize import PermittedCall
from fumehood.protocol import strict_json
from fumehood.protocol.canonical import canonical, digest_of
from fumehood.storage import idempotency as rows
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError
from fumehood.storage.idempotency import KeptKey, KeyedCall, KeyState, pack_answer, replay_of

T = TypeVar("T")

AUTO = "auto"
"""The option's value that requests a key derived from the call itself."""

PARAMETER = "idempotency_key"
"""The name of a tool's own parameter whose value is also used as the key."""


RETRY_AFTER_MS = 500
"""Delay in milliseconds suggested to callers who repeat a call that is still running."""

NOT_KEPT = (
    "idempotency_key: the answer could not be stored, so a repeat with this key will not "
    "return it; do not repeat the call"
)

_NO_ENDINGS = frozenset({Cancelled.code, InternalError.code})
"""Codes of errors that leave open whether the call had an effect."""

_LATER = frozenset({RequiresHumanApproval.code})
"""Codes of errors after which the same call may succeed later, because a human can resolve them."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The answer to an earlier call with the same idempotency key."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Waiting:
    """An earlier call with the same idempotency key, or an identical earlier call without a key. It
    waits or has waited for an approval.

    `approval_id` is the id of this approval. If the earlier call has ended, its answer is stored
    with the approval.
    """

    approval_id: str


class Claim:
    """A call's claim on its idempotency key. While the claim lasts, no other call can use the key.
    It must be ended by `settle` or `handed_over`.
    """

    def __init__(self, call: KeyedCall, keys: Keys) -> None:
        self._call = call
        self._keys = keys
        self._is_over = False

    @property
    def key(self) -> str:
        return self._call.key

    async def settle(self, envelope: Envelope, *, acted: bool) -> Envelope:
        """End the call, and return the caller's answer once it is on disk.

        `acted` means that execution had begun. If the answer cannot be stored, the key stays
        claimed: repeats get `OUTCOME_UNKNOWN`, and this caller's answer gets a warning.
        """
        if self._is_over:
            return envelope
        self._is_over = True
        ending = ending_of(envelope.error, acted=acted, may_repeat=self._call.may_repeat)
        if ending != "keep":
            give_up = rows.lose if ending == "lose" else rows.release
            await self._keys.end(self._call, lambda connection: give_up(connection, self._call))
            return envelope
        answer = pack_answer(envelope)
        if await self._keys.end(
            self._call, lambda connection: rows.finish(connection, self._call, answer)
        ):
            return envelope
        return _with_warning(envelope, NOT_KEPT)

    def handed_over(self) -> None:
        """End the claim after `storage.idempotency.hand_over` has given the key to an approval."""
        self._is_over = True
        self._keys.let_go(self._call)


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """A call that duplicates no other call with the same idempotency key. `claim` is None if the
    call has no key.
    """

    permitted: PermittedCall
    claim: Claim | None = None


class Keys:
    """The idempotency keys of one engine. `retention` removes expired keys."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held: set[str] = set()
        """Ids of the calls that hold a key in this process. Also read by the writer's thread."""

    async def claim(
        self, permitted: PermittedCall, call_id: str, now: datetime
    ) -> Claim | Replay | Waiting | None:
        """Claim the call's idempotency key, if it has one. `call_id` is the id of the call.

        Return a `Claim` if the key is now claimed, or None if the call has no key. If an earlier
        call with this key has ended, return a `Replay` of its answer. If the earlier call was
        stored for approval, return a `Waiting`.

        If this method is cancelled, the key is released.

        Raises:
            InvalidParams: the option `idempotency_key` and the tool's own parameter of this name
                differ, or are not a valid key.
            IdempotencyConflict: the key was used for a different call.
            CallInProgress: the call with this key is still running.
            OutcomeUnknown: the call with this key may have acted, and its answer is lost.
            WriteFailed: the key could not be claimed.
        """
        given = key_of(permitted)
        if given is None:
            return None
        call = await _keyed(permitted, given, call_id)
        found = await self._take(call, now)
        return Claim(call, self) if found is None else _repeated(found, call)

    async def recover(self, now: datetime) -> int:
        """Decide about the keys of calls that were still running when the previous process ended.
        The caller must do this before the first call.

        The keys of calls that can safely be repeated are released. The outcome of the other calls
        is unknown. Return the number of these calls.

        If this method fails, each of these calls is still found to be lost, but only when its key
        is used again.

        Raises:
            WriteFailed: the state cannot be written.
        """
        return await self._database.write(lambda connection: rows.recover(connection, now))

    async def answer_of(self, principal_id: str, call_id: str) -> str | None:
        """Return the stored answer to a call with a key, or None. Raises ReadFailed."""
        return await self._database.read(
            lambda connection: rows.answer_of(connection, principal_id, call_id)
        )

    async def prune(self, now: datetime) -> int:
        """Delete expired keys and return their number.

        Raises:
            WriteFailed: the state cannot be written. The remaining keys stay until the next time.
        """
        return await self._database.repeat(lambda connection: rows.forget_old(connection, now))

    async def end(self, call: KeyedCall, job: Callable[[Connection], None]) -> bool:
        """Run `job`, which stores how a call with an idempotency key ended. Return True if this is
        on disk, or False if it could not be stored.

        The job is queued before this method first waits. If the method is cancelled while it waits,
        the job still runs.
        """
        try:
            await self._database.write(self._last(call, job))
        except StoreError:
            self.let_go(call)
            return False
        return True

    def let_go(self, call: KeyedCall) -> None:
        """Record that the call no longer holds a key in this process."""
        self._held.discard(call.call_id)

    async def _take(self, call: KeyedCall, now: datetime) -> KeptKey | None:
        self._held.add(call.call_id)  # before another call's job can look for it
        try:
            found = await self._database.write(
                lambda connection: rows.take(connection, call, now, self._held.__contains__)
            )
        except asyncio.CancelledError:
            # The queued write may still claim the key, so a release is queued after it.
            with anyio.CancelScope(shield=True):
                await self.end(call, lambda connection: rows.release(connection, call))
            raise
        except BaseException:
            self.let_go(call)
            raise
        if found is not None:
            self.let_go(call)
        return found

    def _last(
        self, call: KeyedCall, job: Callable[[Connection], None]
    ) -> Callable[[Connection], None]:
        """Return a job that runs `job`, and then `let_go`, even if `job` fails. `let_go` records
        that `call` no longer holds its key.
        """

        def run(connection: Connection) -> None:
            # `job` stores the call's answer before the key is let go. So if a later job finds
            # neither a holder nor an answer, `job` has failed, and the call counts as lost.
            try:
                job(connection)
            finally:
                self.let_go(call)

        return run


def claimed(permitted: PermittedCall, claim: Claim | None) -> ClaimedCall:
    """Return the call with its claim, if it has one."""
    return ClaimedCall(permitted, claim)


def key_of(permitted: PermittedCall) -> str | None:
    """Return the idempotency key that the caller gave in the option or in the tool's own parameter,
    both named `idempotency_key`. Return None if there is no key.

    Values from an agent's configuration or a schema's default do not count as keys, and neither do
    null and empty values.

    Raises:
        InvalidParams: option and parameter are both given and differ, or the parameter is too long
            for a key.
    """
    request = permitted.request
    option = request.options.idempotency_key
    parameter = _parameter(permitted) if PARAMETER in request.arguments else None
    if parameter is not None and len(parameter) > MAX_KEY_CHARACTERS:
        raise InvalidParams(
            f"The idempotency key is too long: the maximum is {MAX_KEY_CHARACTERS} characters.",
            fields=[PARAMETER],
        )
    if option is not None and parameter is not None and option != parameter:
        raise InvalidParams(
            "The option idempotency_key and the tool's own parameter idempotency_key differ. "
            "Give one of them, or the same key in both.",
            fields=["options.idempotency_key", PARAMETER],
        )
    return option if option is not None else parameter


def ending_of(
    error: ErrorInfo | None, *, acted: bool, may_repeat: bool
) -> Literal["keep", "free", "lose"]:
    """Decide what happens to the idempotency key of a call that ended with `error`, or with success
    if `error` is None. Return one of these:

    * `keep`: a repeat gets the stored answer.
    * `free`: the key can be used again.
    * `lose`: repeats fail, because the outcome is unknown.

    `acted` is True if execution had begun. `may_repeat` is True if a repeat of the call does no
    harm. A key is freed if a repeat can succeed later. If the call had acted, the repeat must also
    do no harm.
    """
    if error is None:
        return "keep"
    says_later = error.retryable or error.retry_after_ms is not None
    if not acted:
        is_open = says_later or error.code in _NO_ENDINGS | _LATER
        return "free" if is_open else "keep"
    if error.code in _NO_ENDINGS:
        return "lose"
    return "free" if error.retryable and may_repeat else "keep"


def _parameter(permitted: PermittedCall) -> str | None:
    if not takes_key(permitted):
        return None
    value = permitted.arguments.get(PARAMETER)
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else canonical(value).decode()


async def _keyed(permitted: PermittedCall, given: str, call_id: str) -> KeyedCall:
    tool = permitted.tool.definition
    is_option = permitted.request.options.idempotency_key is not None

    def make() -> KeyedCall:
        return KeyedCall(
            principal_id=permitted.principal.id,
            # "auto" requests a derived key only as the option. In the tool's own parameter it is an
            # ordinary value.
            key=key_made_of(permitted) if given == AUTO and is_option else given,
            fingerprint=fingerprint(permitted),
            call_id=call_id,
            may_repeat=tool.idempotent or tool.read_only,
        )

    return await _hashed(permitted, make)


async def _hashed(permitted: PermittedCall, make: Callable[[], T]) -> T:
    """Call `make`, which hashes the call's arguments. If they are long, use a thread."""
    if len(strict_json.dumps(permitted.arguments)) <= LOOP_SIZE:
        return make()
    return await anyio.to_thread.run_sync(make)


def _repeated(found: KeptKey, call: KeyedCall) -> Replay | Waiting:
    first = {"call_id": found.call.call_id}
    if found.call.fingerprint != call.fingerprint:
        raise IdempotencyConflict(
            "This idempotency key was used for another call: other arguments, tool, version, "
            "agent, session or limits. Use a new key for a new call.",
            details=first,
        )
    if found.state is KeyState.RUNNING:
        raise CallInProgress(
            "The call with this idempotency key is still running. Repeat it later with the same "
            "key to get its answer.",
            retry_after_ms=RETRY_AFTER_MS,
            details=first,
        )
    if found.state is KeyState.WAITING and found.approval_id is not None:
        return Waiting(found.approval_id)
    if found.state is KeyState.DONE and found.answer is not None:
        with suppress(ValueError):  # another version of the engine may have another format
            return Replay(replay_of(found.answer))
    raise OutcomeUnknown(
        "The call with this idempotency key may have taken effect, but its answer was lost. Do not "
        "retry. A human must check whether it did; use a new key only if it did not.",
        details=first,
    )


def _with_warning(envelope: Envelope, warning: str) -> Envelope:
    warnings = (*envelope.metadata.warnings, warning)
    metadata = envelope.metadata.model_copy(update={"warnings": warnings})
    return envelope.model_copy(update={"metadata": metadata})


# -- fingerprints --------------------------------------------------------------------------


def fingerprint(permitted: PermittedCall) -> str:
    """Return the hash of everything that decides what a call does, as 64 hex digits.

    Raises:
        InvalidParams: the arguments have no canonical form.
    """
    options = deciding(permitted.request.options)
    # Stored fingerprints may be older than this option.
    given = {name: value for name, value in options.items() if value or name != "network"}
    return _digest(_action(permitted) | {"options": given})


def key_made_of(permitted: PermittedCall) -> str:
    """Return a key derived from the call: the same action of the same caller has the same key.

    Raises:
        InvalidParams: the arguments have no canonical form.
    """
    return f"auto:{_digest(_action(permitted))}"


async def repeat_key_of(permitted: PermittedCall) -> str | None:
    """Return the key that recognizes a repeat of this call although the call has no idempotency
    key.

    Return None if the call has an idempotency key, or if the caller marks the call as new
    (`new_call`).
    """
    if permitted.request.options.new_call or key_of(permitted) is not None:
        return None
    return await _hashed(permitted, lambda: fingerprint(permitted))


def _action(permitted: PermittedCall) -> JsonObject:
    """Return everything that identifies an action.

    These are the tool, the effective arguments (without the one that has the idempotency key), the
    caller, the agent, the session and the context.
    """
    tool, options = permitted.tool.definition, permitted.request.options
    return {
        "tool": tool.name,
        "version": tool.version,
        "arguments": _without_key(permitted),
        "principal": permitted.principal.id,
        "agent": options.agent_id,
        "session": options.session_id,
        **context_of(permitted.request),
    }


def context_of(request: CallRequest) -> JsonObject:
    """Return `{"context": …}` with the context of a request, or an empty object if the request has
    none.

    The object is empty in that case, so that hashes of such calls are the same as in versions of
    the engine that had no contexts.
    """
    return {} if request.context is None else {"context": request.context}


def _without_key(permitted: PermittedCall) -> JsonObject:
    arguments = permitted.arguments
    if takes_key(permitted):
        return {name: value for name, value in arguments.items() if name != PARAMETER}
    return arguments


def takes_key(permitted: PermittedCall) -> bool:
    """Whether the call's tool has a parameter of its own for an idempotency key."""
    return PARAMETER in permitted.tool.definition.parameters.get("properties", {})


def _digest(value: JsonObject) -> str:
    try:
        return digest_of(value)
    except ValueError:
        raise InvalidParams(
            "The arguments contain values without a canonical JSON form, so an idempotency key "
            "cannot be used. Send plain JSON, or leave the key out.",
            fields=["options.idempotency_key"],
        ) from None
