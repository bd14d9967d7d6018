"""The webhook: signed messages about approvals, anchors and alerts; signed decisions in return.

Host side. A message is a row of the table `deliveries`, written in the transaction of its event
(`owe`); `WebhookChannel.running` sends it. Each round sends all pending messages once, oldest
first, a few at a time; failed messages wait for the next round, and rounds become less frequent
with each failure. Invariants: no call or decision waits for a delivery; a message is sent at least
once, or dropped after a number of attempts that restarts do not reset; redirects are not followed,
and only the status of a response is read; the signed bytes are the sent bytes; a callback's body is
parsed only after its signature is verified, and a signature is valid once.

Retries do not use stamina: attempts are counted in the table, so that they survive a restart, and
an unreachable address must delay all messages together, not each of them separately.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from sqlalchemy import Connection, delete, insert, not_, select, update

from fumehood.approvals.model import Approval
from fumehood.core.errors import Unauthorized
from fumehood.core.json_types import JsonObject
from fumehood.observe.clock import timestamp
from fumehood.observe.log import Logger, log_fault
from fumehood.protocol import strict_json
from fumehood.protocol.engine_paths import ConfigError
from fumehood.sandbox.trusted_files import Untrusted, read_private
from fumehood.storage.changes import stamp
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError
from fumehood.storage.schema import DELIVERIES
from fumehood.webhook.settings import WebhookSettings

if TYPE_CHECKING:
    import httpx2

NAME = "webhook"
"""The channel's name. The principal that makes the channel's decisions has the same name."""

HEADER = "fumehood-signature"
ANCHOR = "audit.anchor"
MIN_SECRET_BYTES = 32

AT_ONCE = 4
SUCCESS = (200, 300)
"""Range of the accepted statuses. A redirect is a failure, because it is not followed."""

FIRST_PAUSE_S = 1.0
LOOK_S = 30.0
"""Maximum seconds between checks for pending messages, and the longest pause after a failure."""

Show = Callable[[str], Awaitable[Approval]]
"""A function that takes the id of an approval, and returns the approval in its current state, as
approvers see it. Raises ResourceNotFound or ReadFailed."""

Send = Callable[[bytes, dict[str, str]], Awaitable[int]]
"""A function that sends a body with headers, and returns the status of the answer. Raises OSError
or httpx2.HTTPError."""


class WebhookChannel:
    """Sends messages to one address: about approvals, about alerts, and with anchors of the audit
    chain. An anchor is a copy of a row's authentication code. It shows later whether rows were
    removed.

    The receiver may answer with callbacks, which are signed requests that decide approvals. If the
    settings allow this, `callbacks` checks the signatures. `decides_as` is then the name of the
    principal that decides, which counts as an approver. Otherwise, both attributes are None.

    Raises:
        ConfigError: the secret cannot be used.
    """

    show: Show

    def __init__(
        self,
        settings: WebhookSettings,
        database: Database,
        now: Callable[[], datetime],
        log: Logger,
    ) -> None:
        self._settings = settings
        self._secret = read_secret(settings.secret_file)
        self._database = database
        self._now = now
        self._log = log
        self._woken = asyncio.Event()
        """Set to end the pause that follows a round without failures."""
        self._failed_rounds = 0
        self.decides_as = NAME if settings.may_decide else None
        self.callbacks = (
            Callbacks(self._secret, window_s=settings.replay_window_seconds)
            if settings.may_decide
            else None
        )

    def wake(self) -> None:
        """Wake the sender, because new messages were stored. This method returns at once."""
        self._woken.set()

    @asynccontextmanager
    async def running(self, show: Show, *, send: Send | None = None) -> AsyncIterator[None]:
        """Send pending messages in rounds until the block is left.

        `show` returns the approval that a message is about. `send` sends one message. If it is
        None, messages are sent by HTTP.
        """
        self.show = show
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_by_http if send is None else partial(self._rounds, send))
            yield
            group.cancel_scope.cancel()

    async def _send_by_http(self) -> None:
        import httpx2  # most engines have no webhook and need no HTTP client

        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # cookies would accumulate
        # Proxies and credentials of the environment are not meant for this.
        async with httpx2.AsyncClient(
            follow_redirects=False, trust_env=False, cookies=no_cookies
        ) as client:
            await self._rounds(partial(_post, client, self._settings.url))

    async def _rounds(self, send: Send) -> None:
        while True:
            self._woken.clear()
            if await self._round(send):
                with anyio.move_on_after(LOOK_S):
                    await self._woken.wait()
            else:
                await anyio.sleep(self._pause_s())

    async def _round(self, send: Send) -> bool:
        """Send all pending messages once. Return True if none of them must be sent again. Never
        raises.
        """
        is_clean = False
        try:
            is_clean = await self.send_owed(send)
        except StoreError:
            pass  # the database has logged it
        except Exception as fault:
            log_fault(self._log, "webhook.internal_error", fault)
        self._note_round(is_clean)
        return is_clean

    async def send_owed(self, send: Send) -> bool:
        """Send each pending message once, in small groups. If all messages of a group fail, do not
        send the remaining messages.

        `send` sends one message. Return True if no message must be sent again.
        """
        is_clean, after = True, 0
        while True:
            batch = await self._database.read(partial(list_owed, after=after, limit=AT_ONCE))
            if not batch:
                return is_clean
            settled = await self._send_batch(batch, send)
            is_clean = is_clean and all(settled)
            if not any(settled):
                return False
            after = batch[-1].seq

    async def _send_batch(self, batch: list[Owed], send: Send) -> list[bool]:
        settled: list[bool] = []

        async def deliver(owed: Owed) -> None:
            settled.append(await self._deliver(owed, send))

        async with anyio.create_task_group() as group:
            for owed in batch:
                group.start_soon(deliver, owed)
        return settled

    async def _deliver(self, owed: Owed, send: Send) -> bool:
        """Try once to send a message. Return True if the message needs no further attempt."""
        # Counted before it is made, so that an attempt interrupted by a crash counts.
        counted = update(DELIVERIES).where(DELIVERIES.c.seq == owed.seq)
        more = counted.values(attempts=DELIVERIES.c.attempts + 1)
        await self._database.write(lambda connection: connection.execute(more).rowcount)
        try:
            is_taken = await self._attempt(owed, send)
        except StoreError:
            raise
        except Exception as fault:  # one bad message must not hold up the others
            log_fault(self._log, "webhook.internal_error", fault, delivery=owed.seq)
            is_taken = False
        if is_taken:
            await self._settle(owed, "delivered_at")
            return True
        if owed.attempts + 1 < self._settings.attempts:
            return False
        await self._settle(owed, "given_up_at")
        self._log.error(
            "webhook.given_up", delivery=owed.seq, approval_id=owed.approval_id, told=owed.event
        )
        return True

    async def _attempt(self, owed: Owed, send: Send) -> bool:
        """Send a message, and return whether the receiver accepted it. Neither the address nor the
        response is logged.
        """
        import httpx2

        now, told = self._now(), owed.document
        if told is None:
            approval = await self.show(owed.approval_id)
            told = {"approval": approval.model_dump(mode="json", exclude={"binding"})}
        body = strict_json.dumps({"event": owed.event, **told, "delivery": owed.seq,
                                  "sent_at": timestamp(now)})  # fmt: skip
        headers = {"content-type": "application/json", HEADER: sign(self._secret, body, now)}
        try:
            with anyio.fail_after(self._settings.timeout_seconds):
                status = await send(body, headers)
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            self._log.debug("webhook.failed", delivery=owed.seq, reason=type(error).__name__)
            return False
        is_taken = SUCCESS[0] <= status < SUCCESS[1]
        if not is_taken:
            self._log.debug("webhook.failed", delivery=owed.seq, status=status)
        return is_taken

    async def _settle(self, owed: Owed, column: str) -> None:
        ended = update(DELIVERIES).where(DELIVERIES.c.seq == owed.seq, _IS_OWED)
        at = stamp(self._now())
        await self._database.write(lambda c: c.execute(ended.values({column: at})).rowcount)

    def _pause_s(self) -> float:
        longest: float = min(LOOK_S, FIRST_PAUSE_S * 2 ** min(self._failed_rounds - 1, 20))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads out engines

    def _note_round(self, is_clean: bool) -> None:
        """Record whether a round succeeded. Log when an outage of the receiver begins and when it
        ends.
        """
        if not is_clean:
            self._failed_rounds += 1
            if self._failed_rounds == 1:  # only once, because an outage may last for days
                self._log.warning("webhook.failing")
        elif self._failed_rounds:
            self._log.info("webhook.recovered", failed_rounds=self._failed_rounds)
            self._failed_rounds = 0


async def _post(client: httpx2.AsyncClient, url: str, body: bytes, headers: dict[str, str]) -> int:
    async with client.stream("POST", url, content=body, headers=headers) as answer:
        return answer.status_code


# -- the secret and signatures -------------------------------------------------------------


def read_secret(path: Path) -> bytes:
    """Read the secret that signs messages in both directions. A trailing line end is removed.

    Raises:
        ConfigError: the secret is missing or too short, or other users can read or replace it.
    """
    if not path.is_absolute():
        raise ConfigError("webhook.secret_file must be an absolute path.")
    try:
        secret = read_private(path)
    except Untrusted as refused:
        raise ConfigError(f"webhook.secret_file cannot be used: {refused}.") from None
    except OSError as error:
        raise ConfigError(f"webhook.secret_file cannot be read: {error.strerror}.") from None
    secret = strict_json.unmarked(secret).removesuffix(b"\n").removesuffix(b"\r")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"webhook.secret_file must hold at least {MIN_SECRET_BYTES} bytes. "
            "Make one with: openssl rand -hex 32"
        )
    return secret


_FORM = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})", re.ASCII)


def sign(secret: bytes, body: bytes, at: datetime) -> str:
    """Return the value of the signature header for `body`, which is signed with `secret` at the
    time `at`.
    """
    seconds = str(int(at.timestamp()))
    return f"t={seconds},v1={_mac(secret, seconds, body).hex()}"


class Callbacks:
    """Checks the signatures of callbacks. Recent signatures are remembered in memory, because each
    is valid only once.
    """

    def __init__(self, secret: bytes, *, window_s: float) -> None:
        self._secret = secret
        self._window_s = window_s
        self._seen: dict[bytes, float] = {}
        """Maps a signature to the time after which it is too old to be accepted."""
        self._latest = -math.inf

    def check(self, headers: Sequence[str], body: bytes, now: datetime) -> None:
        """Check that a body has exactly one signature, which is valid, recent and unused. `headers`
        are the values of the signature header.

        Raises:
            Unauthorized: there is no signature or more than one signature, or the signature is
                wrong, too old, too far in the future, or was used before.
        """
        if len(headers) != 1:
            raise Unauthorized(f"Sign the body, with one header `{HEADER}`.")
        match = _FORM.fullmatch(headers[0])
        if match is None:
            raise Unauthorized(f"`{HEADER}` must be `t=UNIX,v1=HEX`, with 64 digits.")
        seconds, given = match[1], bytes.fromhex(match[2])
        if not hmac.compare_digest(_mac(self._secret, seconds, body), given):
            raise Unauthorized("The signature is wrong. Do not retry.")
        self._require_fresh(int(seconds), now.timestamp())
        self._require_first(given, int(seconds))

    def _require_fresh(self, signed_at: int, now: float) -> None:
        # A clock that is set back would make forgotten signatures valid again.
        self._latest = max(self._latest, now)
        if signed_at < self._latest - self._window_s or signed_at > now + self._window_s:
            raise Unauthorized(
                f"The signature's time is more than {self._window_s:g} s from this engine's. "
                "Sign the body again."
            )

    def _require_first(self, signature: bytes, signed_at: int) -> None:
        # Only the holder of the secret can add signatures.
        self._seen = {s: end for s, end in self._seen.items() if end >= self._latest}
        if signature in self._seen:
            raise Unauthorized("This signature was used before. Sign the body again.")
        self._seen[signature] = signed_at + self._window_s


def _mac(secret: bytes, seconds: str, body: bytes) -> bytes:
    return hmac.digest(secret, f"{seconds}.".encode() + body, hashlib.sha256)


# -- rows ----------------------------------------------------------------------------------

_IS_OWED = DELIVERIES.c.delivered_at.is_(None) & DELIVERIES.c.given_up_at.is_(None)


@dataclass(frozen=True, slots=True)
class Owed:
    """A message that is not yet delivered. `attempts` is the number of failed or interrupted
    attempts.
    """

    seq: int
    approval_id: str
    """Empty if the message is not about an approval."""
    event: str
    attempts: int
    document: JsonObject | None
    """The content, if the message is not about an approval."""


def owe(
    connection: Connection,
    event: str,
    at: datetime,
    *,
    approval_id: str = "",
    document: JsonObject | None = None,
) -> int:
    """Store a message in the transaction of its event, and return the message's number.

    The sent message contains `document` or, if `document` is None, the approval in its state at the
    time of sending.
    """
    row = {
        "event": event,
        "created_at": stamp(at),
        "attempts": 0,
        "delivered_at": None,
        "given_up_at": None,
        "approval_id": approval_id,
        "document": document,
    }
    made = connection.execute(insert(DELIVERIES).values(row)).inserted_primary_key
    assert made is not None
    return int(made[0])


def owe_anchor(connection: Connection, document: JsonObject, at: datetime) -> None:
    """Store a message about an anchor of the audit chain (a copy of a row's authentication code).
    Delete earlier undelivered messages about anchors.

    `document` is the content of the message.
    """
    # The new message is stored before the others are deleted. Otherwise, it could get the number of
    # a deleted message that is being sent, and the end of that delivery would mark it as delivered.
    seq = owe(connection, ANCHOR, at, document=document)
    earlier = _IS_OWED & (DELIVERIES.c.event == ANCHOR) & (DELIVERIES.c.seq < seq)
    connection.execute(delete(DELIVERIES).where(earlier))


def list_owed(connection: Connection, after: int, limit: int) -> list[Owed]:
    """Return at most `limit` undelivered messages with a number greater than `after`, oldest
    first.
    """
    found = connection.execute(
        select(DELIVERIES)
        .where(_IS_OWED, DELIVERIES.c.seq > after)
        .order_by(DELIVERIES.c.seq)
        .limit(limit)
    )
    return [Owed(row.seq, row.approval_id, row.event, row.attempts, row.document) for row in found]


def forget_old(connection: Connection, before: str) -> None:
    """Delete the messages that were stored before the time `before`, unless they are still to be
    delivered.
    """
    connection.execute(delete(DELIVERIES).where(not_(_IS_OWED), DELIVERIES.c.created_at < before))
