"""Claim: make sure that this call is nobody else's, already running or already answered.

Fourth stage, a lease. Takes a `PermittedCall`, yields a `ClaimedCall`. A call with an
idempotency key (the option, the tool's own parameter, or one made of the call on request) takes
its key in one durable step, after it was authorized, so that nobody is handed another's answer;
a call without one costs nothing here. Invariants: of the calls with one key at most one is
carried out at a time; the answer is on the disk before its caller has it; a key whose call may
have acted is never free again, unless acting twice does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import anyio
import anyio.to_thread
from sqlalchemy import Connection

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
from fumehood.core.idempotency import (
    AUTO,
    MAX_KEY_CHARACTERS,
    PARAMETER,
    KeptKey,
    KeyedCall,
    KeyState,
)
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.fingerprint import fingerprint, key_made_of, takes_key
from fumehood.protocol import strict_json
from fumehood.protocol.canonical import canonical
from fumehood.protocol.kept_answers import pack_answer, replay_of
from fumehood.storage import idempotency as rows
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError

RETRY_AFTER_MS = 500
"""What those are told who repeat a call that still runs."""

MAX_INLINE_BYTES = 64 * 1024
"""Arguments up to here are hashed at once (about 5 ms); longer ones keep nobody waiting."""

NOT_KEPT = (
    "idempotency_key: the answer could not be kept, so a repeat with this key will not see it; "
    "do not repeat the call"
)

_NO_ENDINGS = frozenset({Cancelled.code, InternalError.code})
"""Errors that say nothing of how far the call came."""

_LATER = frozenset({RequiresHumanApproval.code})
"""Errors that somebody can lift."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The call was carried out before; this is its answer."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Waiting:
    """The call was sent before and waits for a human's yes, or its approval has the answer."""

    approval_id: str


class Claim:
    """A key that is this call's. Ends once, by the first of its three endings."""

    def __init__(self, call: KeyedCall, keys: Keys) -> None:
        self._call = call
        self._keys = keys
        self._is_over = False

    @property
    def principal_id(self) -> str:
        return self._call.principal_id

    @property
    def key(self) -> str:
        return self._call.key

    async def settle(self, envelope: Envelope, *, acted: bool) -> Envelope:
        """The call has ended. Returns what its caller is to have, once that is on the disk.

        `acted` says whether execution was begun. An ending that cannot be kept leaves the key
        behind: repeats hear `OUTCOME_UNKNOWN`, and this caller gets a warning.
        """
        if self._is_over:
            return envelope
        ending = ending_of(envelope.error, acted=acted, may_repeat=self._call.may_repeat)
        if ending != "keep":
            await self._give_up(lose=ending == "lose")
            return envelope
        answer = pack_answer(envelope)
        if await self._end(lambda connection: rows.finish(connection, self._call, answer)):
            return envelope
        return _with_warning(envelope, NOT_KEPT)

    async def abandon(self, *, acted: bool) -> None:
        """The call has no answer: it was cancelled, or the engine failed."""
        if not self._is_over:
            await self._give_up(lose=acted)

    def handed_over(self, approval_id: str) -> None:
        """`store.idempotency.hand_over` is committed: the approval ends it from now on."""
        self._is_over = True
        self._keys.let_go(self._call)

    async def _give_up(self, *, lose: bool) -> None:
        give_up = rows.lose if lose else rows.release
        await self._end(lambda connection: give_up(connection, self._call))

    async def _end(self, job: Callable[[Connection], None]) -> bool:
        self._is_over = True
        return await self._keys.end(self._call, job)


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """A call that nobody else is carrying out. Without a key there is no claim."""

    permitted: PermittedCall
    claim: Claim | None = None


class Keys:
    """The idempotency keys of one engine. Also kept within their time, by `retention`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held: set[str] = set()
        """Ids of the calls that are carried out here; read by the writer's thread, too."""
        self._is_used = database.path is not None
        self.overdue = asyncio.Event()

    async def claim(
        self, permitted: PermittedCall, call_id: str, now: datetime
    ) -> Claim | Replay | Waiting | None:
        """Take the call's key. None: it has none. Cancelled, it leaves nothing taken.

        Raises:
            InvalidParams: the option and the tool's own parameter differ, or are no key.
            IdempotencyConflict: the key was used for another call.
            CallInProgress: the call with this key still runs.
            OutcomeUnknown: it may have acted, and its answer is lost.
            WriteFailed: the key could not be taken; nothing is promised.
        """
        given = key_of(permitted)
        if given is None:
            return None
        self._is_used = True
        call = await _keyed(permitted, given, call_id)
        found = await self._take(call, now)
        return Claim(call, self) if found is None else _repeated(found, call)

    async def recover(self, now: datetime) -> int:
        """Before the first call: what an engine that is gone has left running is lost.

        Returns how many calls have an unknown outcome by that. Where it fails, each of them is
        found to be lost when its key comes again.

        Raises:
            WriteFailed: the state cannot be written.
        """
        if not self._is_used:
            return 0
        return await self._database.write(lambda connection: rows.recover(connection, now))

    async def prune(self, now: datetime) -> int:
        """Forget the keys whose time is over; returns how many.

        Raises:
            WriteFailed: the rest stays until the next time.
        """
        self.overdue.clear()
        gone = 0
        if not self._is_used:
            return 0  # in memory, where no writer need be started for nothing
        while True:
            count = await self._database.write(lambda connection: rows.forget_old(connection, now))
            gone += count
            if count < rows.FORGOTTEN_AT_ONCE:
                return gone

    async def end(self, call: KeyedCall, job: Callable[[Connection], None]) -> bool:
        """Write a held call's ending; whether it is on the disk. For `Claim`.

        The write is queued before this first waits, and cancelling the wait does not stop it.
        """
        try:
            await self._database.write(self._last(call, job))
        except StoreError:
            self.let_go(call)
            return False
        return True

    def let_go(self, call: KeyedCall) -> None:
        """The call is not carried out here any more."""
        self._held.discard(call.call_id)

    async def _take(self, call: KeyedCall, now: datetime) -> KeptKey | None:
        self._held.add(call.call_id)  # before another's job may look for it
        try:
            found = await self._database.write(
                lambda connection: rows.take(connection, call, now, self._held.__contains__)
            )
        except asyncio.CancelledError:
            # The key may be taken behind our back, so it is given back behind that.
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
        """The job that ends a call. From its turn on the call is held no more: who comes after
        it sees what it wrote, or, where it failed, a lost call."""

        def run(connection: Connection) -> None:
            try:
                job(connection)
            finally:
                self.let_go(call)

        return run


def claimed(permitted: PermittedCall, claim: Claim | None) -> ClaimedCall:
    """The call with its key, if it has one."""
    return ClaimedCall(permitted, claim)


def key_of(permitted: PermittedCall) -> str | None:
    """The key as it was given: by the option, or by the tool's own parameter.

    What an agent's configuration or a schema's default says is nobody's key. A parameter that
    is null or empty is none.

    Raises:
        InvalidParams: both are given and differ, or the parameter is too long for a key.
    """
    option = permitted.request.options.idempotency_key
    parameter = _parameter(permitted)
    if parameter is not None and len(parameter) > MAX_KEY_CHARACTERS:
        raise InvalidParams(
            f"The idempotency key is too long: it may have {MAX_KEY_CHARACTERS} characters.",
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
    """What becomes of the key of a call that ended like this.

    A failure before anything was done frees it where the same call may work later; what acted
    is free again only where acting twice does no harm.
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
    if PARAMETER not in permitted.request.arguments or not takes_key(permitted):
        return None
    value = permitted.validated.arguments.get(PARAMETER)
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else canonical(value).decode()


async def _keyed(permitted: PermittedCall, given: str, call_id: str) -> KeyedCall:
    tool = permitted.tool.definition

    def make() -> KeyedCall:
        return KeyedCall(
            principal_id=permitted.principal.id,
            # The tool's own parameter is the tool's own word: only the option asks for a key.
            key=key_made_of(permitted) if given == AUTO and _is_option(permitted) else given,
            fingerprint=fingerprint(permitted),
            call_id=call_id,
            may_repeat=tool.idempotent or tool.read_only,
        )

    if len(strict_json.dumps(permitted.validated.arguments)) <= MAX_INLINE_BYTES:
        return make()
    return await anyio.to_thread.run_sync(make)


def _is_option(permitted: PermittedCall) -> bool:
    return permitted.request.options.idempotency_key is not None


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
            "The call with this idempotency key still runs. Repeat it later, with the same key, "
            "to get its answer.",
            retry_after_ms=RETRY_AFTER_MS,
            details=first,
        )
    if found.state is KeyState.WAITING and found.approval_id is not None:
        return Waiting(found.approval_id)
    if found.state is KeyState.DONE and found.answer is not None:
        with suppress(ValueError):  # another version of the engine wrote it in its own form
            return Replay(replay_of(found.answer))
    raise OutcomeUnknown(
        "The call with this idempotency key may have acted, and its answer is lost. Do not "
        "retry. Let a human find out whether it did; only if it did not, use a new key.",
        details=first,
    )


def _with_warning(envelope: Envelope, warning: str) -> Envelope:
    warnings = (*envelope.metadata.warnings, warning)
    metadata = envelope.metadata.model_copy(update={"warnings": warnings})
    return envelope.model_copy(update={"metadata": metadata})
