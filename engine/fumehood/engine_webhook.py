"""The webhook: tells another program of approvals and anchors, and knows who may answer for it.

Part of the composition root. What is owed stands in the table `deliveries`, written with what it
tells; this sends it, beside the calls. Rounds: each goes once through what is owed, oldest
first, some at a time; what failed waits for the next round, which comes later the more rounds
have failed. Invariants: no call and no decision ever waits for it; a message is sent at least
once or given up after so many attempts, whatever restarts between; no redirect is followed, and
of an answer nothing is read but its status.

By hand rather than with stamina: the attempts stand in the table, so that they outlive the
process, and one silent address must hold back all messages, not each of them for itself.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import anyio
import httpx2

from fumehood.approvals.model import Approval
from fumehood.core.errors import ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.observe.clock import timestamp
from fumehood.observe.log import Logger, log_fault
from fumehood.protocol import strict_json
from fumehood.protocol.sockets import ConfigError
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError
from fumehood.webhook import deliveries
from fumehood.webhook.deliveries import Owed
from fumehood.webhook.settings import WebhookSettings
from fumehood.webhook.signatures import HEADER, Callbacks, sign

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096

AT_ONCE = 4
SUCCESS = (200, 300)
"""From one status up to the other. A redirect is none: it is not followed."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LOOK_S = 30.0
"""How often it looks by itself, should nobody have woken it."""

KEPT = timedelta(days=30)
"""How long what arrived, or was given up, can still be looked up in the table."""

Show = Callable[[str], Awaitable[Approval]]
Send = Callable[[bytes, dict[str, str]], Awaitable[int]]
"""Sends a body with headers; the status of the answer. Raises OSError or httpx2.HTTPError."""


def read_secret(path: Path) -> bytes:
    """The secret that signs both ways, without the line's end that editors leave.

    Raises:
        ConfigError: it is not there, too short, or others may read or change it.
    """
    if not path.is_absolute():
        raise ConfigError("webhook.secret_file must be an absolute path.")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - what was opened is what is checked
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
                raise ConfigError("webhook.secret_file must be a file of the engine's user.")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError("webhook.secret_file is open to other users. Do: chmod 600")
            secret = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"webhook.secret_file cannot be read: {error.strerror}.") from None
    secret = secret.removesuffix(b"\n").removesuffix(b"\r")
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"webhook.secret_file must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes. "
            "Make one with: openssl rand -hex 32"
        )
    return secret


class EngineWebhook:
    """Sends while `running` lasts. `callbacks` is there where callbacks may decide.

    Raises:
        ConfigError: the secret cannot be used.
    """

    def __init__(
        self,
        config: WebhookSettings,
        database: Database,
        show: Show,
        now: Callable[[], datetime],
        log: Logger,
        *,
        send: Send | None = None,
    ) -> None:
        self._config = config
        self._secret = read_secret(config.secret_file)
        self._database = database
        self._show = show
        self._now = now
        self._log = log
        self._send = send
        self._wake = anyio.Event()
        self._failed_rounds = 0
        self._forgot_at: datetime | None = None
        self.callbacks = (
            Callbacks(self._secret, window_s=config.replay_window_seconds)
            if config.may_decide
            else None
        )

    def wake(self) -> None:
        """Something is owed. Never waits."""
        self._wake.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send what is owed for as long as the context lasts; what is on its way is dropped."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._run)
            yield
            group.cancel_scope.cancel()

    async def _run(self) -> None:
        if self._send is not None:
            await self._rounds(self._send)
        # Neither proxies nor credentials of the environment: they are not meant for this.
        async with httpx2.AsyncClient(follow_redirects=False, trust_env=False) as client:
            await self._rounds(partial(_post, client, self._config.url))

    async def _rounds(self, send: Send) -> None:
        while True:
            self._wake = woken = anyio.Event()
            if await self._round(send):
                with anyio.move_on_after(LOOK_S):
                    await woken.wait()
            else:
                await anyio.sleep(self._pause_s())

    async def _round(self, send: Send) -> bool:
        """Whether nothing is left to be tried again. Whatever it ends in, there is a next one."""
        is_clean = False
        try:
            await self._forget_old()
            is_clean = await self.send_owed(send)
        except StoreError:
            pass  # the database has said so itself
        except Exception as fault:
            log_fault(self._log, "webhook.internal_error", fault)
        self._note_round(is_clean)
        return is_clean

    async def send_owed(self, send: Send) -> bool:
        """Go through what is owed once; whether nothing is left to be tried again.

        Where some at once were all refused, those that follow are not tried.
        """
        is_clean, after = True, 0
        while True:
            some = await self._database.read(
                partial(deliveries.list_owed, after=after, limit=AT_ONCE)
            )
            if not some:
                return is_clean
            settled = await self._send_some(some, send)
            is_clean = is_clean and all(settled)
            if not any(settled):
                return False
            after = some[-1].seq

    async def _send_some(self, some: list[Owed], send: Send) -> list[bool]:
        settled: list[bool] = []

        async def deliver(owed: Owed) -> None:
            settled.append(await self._deliver(owed, send))

        async with anyio.create_task_group() as group:
            for owed in some:
                group.start_soon(deliver, owed)
        return settled

    async def _deliver(self, owed: Owed, send: Send) -> bool:
        """One attempt; whether the message is settled now."""
        await self._database.write(partial(deliveries.note_attempt, seq=owed.seq))
        try:
            is_taken = await self._tell(owed, send)
        except ResourceNotFound:  # it is no longer kept, so there is nothing to tell
            await self._settle(deliveries.give_up, owed)
            return True
        except StoreError:
            raise
        except Exception as fault:  # what cannot be told must not hold up what can
            log_fault(self._log, "webhook.internal_error", fault, delivery=owed.seq)
            is_taken = False
        if is_taken:
            await self._settle(deliveries.note_delivered, owed)
            return True
        if owed.attempts + 1 < self._config.attempts:
            return False
        await self._settle(deliveries.give_up, owed)
        self._log.error(
            "webhook.given_up", delivery=owed.seq, approval_id=owed.approval_id, told=owed.event
        )
        return True

    async def _tell(self, owed: Owed, send: Send) -> bool:
        """Whether it was taken, as it is by now. Raises ResourceNotFound."""
        told = owed.document or told_of(await self._show(owed.approval_id))
        return await self._attempt(owed, told, send)

    async def _attempt(self, owed: Owed, told: JsonObject, send: Send) -> bool:
        """Whether it was taken. The address and what it answers stay out of the log."""
        now = self._now()
        body = strict_json.dumps(message_of(owed, told, now))
        headers = {"content-type": "application/json", HEADER: sign(self._secret, body, now)}
        try:
            with anyio.fail_after(self._config.timeout_seconds):
                status = await send(body, headers)
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            self._log.debug("webhook.failed", delivery=owed.seq, reason=type(error).__name__)
            return False
        is_taken = SUCCESS[0] <= status < SUCCESS[1]
        if not is_taken:
            self._log.debug("webhook.failed", delivery=owed.seq, status=status)
        return is_taken

    async def _settle(self, end: Callable[..., None], owed: Owed) -> None:
        await self._database.write(partial(end, seq=owed.seq, at=self._now()))

    async def _forget_old(self) -> None:
        now = self._now()
        if self._forgot_at is None or now - self._forgot_at > timedelta(days=1):
            self._forgot_at = now
            await self._database.write(partial(deliveries.forget_old, before=now - KEPT))

    def _pause_s(self) -> float:
        longest: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failed_rounds - 1, 20))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - so that engines do not march

    def _note_round(self, is_clean: bool) -> None:
        """Once an episode: it may last for days."""
        if not is_clean:
            self._failed_rounds += 1
            if self._failed_rounds == 1:
                self._log.warning("webhook.does_not_take")
        elif self._failed_rounds:
            self._log.info("webhook.takes_again", failed_rounds=self._failed_rounds)
            self._failed_rounds = 0


def told_of(approval: Approval) -> JsonObject:
    """The approval as it is when it is sent, which may be later than the event."""
    return {"approval": approval.model_dump(mode="json", exclude={"binding"})}


def message_of(owed: Owed, told: JsonObject, now: datetime) -> JsonObject:
    """The body of a message."""
    return {"event": owed.event, **told, "delivery": owed.seq, "sent_at": timestamp(now)}


async def _post(client: httpx2.AsyncClient, url: str, body: bytes, headers: dict[str, str]) -> int:
    async with client.stream("POST", url, content=body, headers=headers) as answer:
        return answer.status_code


__all__ = ["EngineWebhook", "message_of", "read_secret", "told_of"]
