"""A door decides which requests the program of one call may send, and counts the requests.

Host side, in the event loop. Invariants:

* Nothing is sent to a host that the call did not name or that the operator does not allow.
* A request that needs approval is sent at most once, after the approval, exactly as the approver
  saw it.
* Bytes are counted before they are passed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from fumehood.core.envelope import NetworkReport
from fumehood.core.errors import EngineError
from fumehood.core.hosts import network_matches
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.core.long_text import shown_body
from fumehood.core.names import MAX_NAMED
from fumehood.gateway.placeholders import HeldRequest, Placeholders
from fumehood.gateway.request import (
    TUNNEL,
    HostFailure,
    Place,
    ProgramRequest,
    Refusal,
)
from fumehood.gateway.settings import GatewaySettings, ListedPackages
from fumehood.gateway.tape import Following, Headers, Tape, TapedAnswer
from fumehood.policy.model import Decision, Verdict
from fumehood.protocol.framing import MAX_OPEN_CALLS
from fumehood.sandbox.streams import RunClock
from fumehood.storage.errors import StoreError

Send = Callable[[], Awaitable[EngineError | None]]
"""Sends a request that waited for approval. Returns the error if this fails, otherwise None."""

Ask = Callable[[JsonObject, Send, RunClock], Awaitable[EngineError | None]]
"""Requests a human's approval of a request, and calls `Send` after the approval.

The first argument is the request as the approver sees it; the last is the program's clock. Returns
None if the request was sent and succeeded, otherwise the error that says why not.
"""


class Spend(Protocol):
    """Charges requests and bytes of a program to the budgets of its call. Returns False if a budget
    has too little left.
    """

    def __call__(self, *, requests: int = 0, passed_bytes: int = 0) -> bool: ...


def free(*, requests: int = 0, passed_bytes: int = 0) -> bool:
    """Charge nothing and return True. This is the `Spend` of a program without budgets."""
    return True


Record = Callable[[str, JsonObject], Awaitable[None]]
"""Writes an event to the audit log. The arguments are the event's kind and its fields."""

Lists = tuple[tuple[tuple[str, ...], ListedPackages], ...]
"""One pair for each package index that has a package list: the index's hosts, and the packages that
programs may download from it.
"""

REFUSED, SENT = "net.refused", "net.sent"
"""The kinds of the audit events for a request that was refused, and for a request that is sent."""

MAX_NOTED = 50
"""Maximum number of a call's refusals that get an audit event each. The audit event of the call
itself contains the total number of refusals.

It is also the maximum number of different hosts, and of different reasons, that a door counts
separately.
"""

OTHERS = "(others)"

MAX_HELD_BACK = 20
"""Maximum number of requests that one trial holds back."""


@dataclass
class NetworkUse:
    """How much the program of one call has used the network so far, and how its requests ended."""

    requests: int = 0
    denied: int = 0
    held: int = 0
    tunnels: int = 0
    misused: int = 0
    replayed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    hosts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """The message of a refusal → the number of requests that were refused with it."""
    failures: Counter[str] = field(default_factory=Counter)
    """The message about a host's failure → the number of requests that failed with it."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """The scope in which the program runs. Cancelling it ends the program."""
    ended_for: str | None = None
    """Name of the secret whose misuse ended the program, or None if no misuse ended it."""

    def report(self) -> NetworkReport:
        """Return the counts as the `NetworkReport` of the call's envelope."""
        return NetworkReport(
            requests=self.requests,
            denied=self.denied,
            held=self.held,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            hosts=dict(self.hosts),
            tunnels=self.tunnels,
            misused=self.misused,
            replayed=self.replayed,
        )

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the refused and failed requests of the program.

        Each warning is about one reason, and says how many requests were refused or failed for this
        reason. There are warnings for the `MAX_NAMED` most frequent reasons for refusals, and for
        as many reasons for failures.
        """
        return tuple(
            f"The gateway refused {count} of the program's requests: {why}"
            for why, count in self.refusals.most_common(MAX_NAMED)
        ) + tuple(
            f"{count} of the program's requests failed: {why}"
            for why, count in self.failures.most_common(MAX_NAMED)
        )


class Door:
    """Decides which requests of one call's program may be sent, and counts all of them."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        settings: GatewaySettings,
        decide: Callable[[JsonObject], Decision],
        ask: Ask,
        placeholders: Placeholders,
        record: Record,
        tape: Tape | None = None,
        spend: Spend = free,
        held_back: list[HeldRequest] | None = None,
        lists: Lists = (),
    ) -> None:
        """Create the door of one call.

        Args:
            hosts: the host patterns that the call names.
            settings: the gateway's settings. If the call requests package indexes, the settings
                must also allow the hosts of those indexes that have no package list.
            decide: returns the decision of the policy about a request. Its argument is what policy
                rules can test about the request.
            ask: requests a human's approval, then sends the request.
            placeholders: the placeholders of the secrets that the program may use.
            record: writes an event to the audit log.
            tape: if given, either records the requests and their answers, or answers the requests
                from an earlier recording.
            spend: charges requests and bytes to the budgets of the call.
            held_back: if given, the call is a trial. Its requests are added to this list instead of
                being sent.
            lists: the package lists of the requested indexes.
        """
        self.placeholders = placeholders
        self.tape = tape
        self.held_back = held_back
        self.deliver: Callable[[HeldRequest], Awaitable[int]] | None = None
        """Sends a request that a trial held back, and returns the HTTP status of the answer. Raises
        Refusal.
        """
        self._record = record
        self._hosts = hosts
        self._settings = settings
        self._decide = decide
        self._ask = ask
        self._spend = spend
        self._lists = lists
        self.use = NetworkUse()
        self._tries = 0
        self._held_now = 0
        self._noted = 0

    def take_use(self) -> NetworkUse:
        """Return the network use since this method was last called, and reset all counts.

        This is for a program that serves several calls.
        """
        used = self.use
        self.use = NetworkUse(scope=used.scope, ended_for=used.ended_for)
        self._tries = self._noted = 0
        return used

    @property
    def is_answered(self) -> bool:
        """Whether the tape answers all requests of the program, so that nothing is sent to hosts.
        The tape is a recording of earlier requests and their answers.
        """
        return self.tape is not None and self.tape.answers

    def follow(self, request: ProgramRequest, status: int, headers: Headers) -> Following | None:
        """Begin to record the answer to `request` on the tape, and return the object that records
        it.

        Return None if there is no tape, or if the tape does not record this answer.
        """
        return self.tape.begin(request, status, headers) if self.tape is not None else None

    def play(self, request: ProgramRequest, digest: str) -> TapedAnswer:
        """Count `request`, and return the answer that the tape has recorded for it. The door must
        have a tape.

        `digest` is the SHA-256 of the request's body.

        Raises:
            Refusal: the tape has no answer, or the call has already made the maximum number of
                requests.
        """
        assert self.tape is not None
        self._count_host(request.place.host)
        try:
            answer = self.tape.take(request, digest)
        except Refusal as refusal:
            raise self.refused(refusal.status, refusal.code, refusal.message) from None
        self.use.replayed += 1
        return answer

    def _count_host(self, host: str) -> None:
        use = self.use
        use.requests += 1
        if use.requests > self._settings.max_requests:
            raise self._no_more()
        use.hosts[host if len(use.hosts) < MAX_NOTED or host in use.hosts else OTHERS] += 1

    def require_short(self, length: int) -> None:
        """Raise Refusal if a body of `length` bytes is too long to be shown to an approver."""
        if length > self._settings.max_held_kb * 1024:
            raise self.refused(
                413, "REQUEST_TOO_LARGE", "Its body is too long to be shown to an approver."
            )

    def judge(self, request: ProgramRequest) -> bool:
        """Count `request`, and decide whether it may be sent. Return True if it may be sent now, or
        False if it needs approval first.

        Raises:
            Refusal: the request must not be sent.
        """
        place = request.place
        self._count_host(place.host)
        if not network_matches(place.host, place.port, self._hosts):
            raise self.refused(
                403, "PERMISSION_DENIED",
                f"The call did not ask for {place.authority}: its option network names the hosts "
                "that its program may reach.",
            )  # fmt: skip
        if not network_matches(place.host, place.port, self._settings.hosts):
            self._require_listed(request)
        if (misuse := self.placeholders.misused(request)) is not None:
            raise self.misused(*misuse)
        try:
            self.placeholders.require_searchable(request)
        except Refusal as refusal:
            raise self.refused(refusal.status, refusal.code, refusal.message) from None
        if not self._spend(requests=1):
            raise self.refused(429, "QUOTA_EXCEEDED", "A budget has no request left.")
        self.sent(request.head_bytes)
        decision = self._decide(request.facts())
        is_default = decision.rule.startswith("default:")
        verdict = decision.verdict
        if is_default:  # tunnels are allowed: the operator has named their hosts
            is_known = request.is_read or request.method == TUNNEL
            verdict = Verdict.ALLOW if is_known else Verdict(self._settings.writes)
        if verdict is Verdict.DENY:
            why = decision.reason or f"by {'the setting' if is_default else decision.rule}"
            raise self.refused(
                403,
                "PERMISSION_DENIED",
                f"{request.method} {place.authority} is not allowed: {why}.",
            )
        return verdict is Verdict.ALLOW

    def _require_listed(self, request: ProgramRequest) -> None:
        """Raise Refusal unless the requested package is in a package list of an index at the
        request's host.
        """
        place = request.place
        lists = [of for hosts, of in self._lists if network_matches(place.host, place.port, hosts)]
        if not any(listed.has(request.target) for listed in lists):
            what = "this package of " if lists else ""
            raise self.refused(
                403, "PERMISSION_DENIED", f"The operator does not allow {what}{place.authority}."
            )

    def is_tunnel(self, place: Place) -> bool:
        """Whether the operator lets TLS connections to this host and port pass without
        decryption.
        """
        return network_matches(place.host, place.port, self._settings.tunnels)

    def count(self) -> None:
        """Count an attempt to send a request or to open a tunnel, even if the attempt is invalid.

        The limit for attempts is twice the maximum number of requests. Raises Refusal if it is
        exceeded.
        """
        self._tries += 1
        if self._tries > 2 * self._settings.max_requests:
            raise self._no_more()

    def _no_more(self) -> Refusal:
        return self.refused(429, "QUOTA_EXCEEDED", "This call may make no more requests.")

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Count a request as held while the `with` block runs. A held request waits for a human's
        approval.

        Raises Refusal if `MAX_OPEN_CALLS` of the program's requests are already held.
        """
        if self._held_now >= MAX_OPEN_CALLS:  # each held request keeps its body in memory
            raise self.refused(
                429,
                "RATE_LIMITED",
                f"{MAX_OPEN_CALLS} of the program's requests are already waiting.",
            )
        self._held_now += 1
        try:
            yield
        finally:
            self._held_now -= 1

    async def ask(
        self, request: ProgramRequest, body: bytes, send: Send, clock: RunClock
    ) -> EngineError | None:
        """Request a human's approval of `request`. If it is approved, call `send`.

        Return None if the request was sent and succeeded, otherwise the error that says why not.
        `clock` is the program's clock, which is paused while the human decides.
        """
        self.use.held += 1
        return await self._ask(shown_request(request, body), send, clock)

    def hold_back(self, request: ProgramRequest, body: bytes) -> Refusal:
        """Hold back a request of a trial until a human approves it. Return the refusal that the
        program gets as the answer.

        If the request cannot be held back, the refusal says why.
        """
        assert self.held_back is not None
        if request.is_upgrade or request.method == TUNNEL:
            return self.refused(
                403,
                "PERMISSION_DENIED",
                "A trial holds requests back, but cannot hold back this one.",
            )
        if len(self.held_back) >= MAX_HELD_BACK:
            return self.refused(
                429, "RATE_LIMITED", f"A trial holds back {MAX_HELD_BACK} requests at most."
            )
        self.use.held += 1
        self.held_back.append(HeldRequest(request, body, self.placeholders))
        return Refusal(403, "REQUIRES_HUMAN_APPROVAL", "held for approval")

    def misused(self, name: str, why: str) -> Refusal:
        """Count a request that misuses the placeholder of the secret `name`, and return the refusal
        of this request. `why` is a clause that says how the placeholder is misused.

        If the settings of the secret require it, also end the program.
        """
        self.use.misused += 1
        if self.placeholders.ends_program(name):
            self.use.ended_for = name
            self.use.scope.cancel()
        return self.refused(
            403, "PERMISSION_DENIED",
            f"The placeholder of the secret {name!r} must not be in this request: {why}.",
        )  # fmt: skip

    async def note_refusal(self, request: ProgramRequest, refusal: Refusal) -> None:
        """Record a refusal of `request` in the audit log.

        If the refusal only reports that a host failed, nothing is recorded. Nothing is recorded
        either if the call has already had `MAX_NOTED` refusals.

        Raises:
            Refusal: the audit log could not be written.
        """
        if isinstance(refusal, HostFailure):
            return
        self._noted += 1
        if self._noted <= MAX_NOTED:
            await self.note(REFUSED, request, why=refusal.message)

    async def note(self, kind: str, request: ProgramRequest, **more: Any) -> None:
        """Record `request` in the audit log, as an event of the kind `kind` with the fields `more`.

        Raises:
            Refusal: the audit log could not be written, so the request must not be sent.
        """
        place = request.place.authority
        try:
            await self._record(kind, {"method": request.method, "host": place, **more})
        except StoreError:
            raise Refusal(
                503, "STATE_UNAVAILABLE", "The request could not be recorded, so it was not sent."
            ) from None

    def refused(self, status: int, code: str, message: str) -> Refusal:
        """Count a refusal, and return it as an exception. The caller must raise it.

        The program gets the HTTP status `status`, and the error code `code` with `message`.
        """
        self.use.denied += 1
        _count(self.use.refusals, message)
        return Refusal(status, code, message)

    def failed(self, message: str) -> HostFailure:
        """Count a failure of a host, and return it as an exception. The caller must raise it.
        `message` says what failed.
        """
        _count(self.use.failures, message)
        return HostFailure(502, "NETWORK_ERROR", message)

    def sent(self, count: int) -> None:
        """Count `count` bytes that the program sends to hosts. Raises Refusal if they exceed a
        limit or a budget.
        """
        self._require_room(count)
        self.use.bytes_out += count

    def received(self, count: int) -> None:
        """Count `count` bytes that the program receives from hosts. Raises Refusal if they exceed a
        limit or a budget.
        """
        self._require_room(count)
        self.use.bytes_in += count

    def _require_room(self, count: int) -> None:
        if self.use.bytes_in + self.use.bytes_out + count > self._settings.max_mb * MB:
            raise self.refused(
                429,
                "QUOTA_EXCEEDED",
                f"This call may send and receive at most {self._settings.max_mb} MB.",
            )
        if not self.is_answered and not self._spend(passed_bytes=count):
            raise self.refused(429, "QUOTA_EXCEEDED", "A budget has too few bytes left.")


def _count(messages: Counter[str], message: str) -> None:
    if len(messages) < MAX_NOTED or message in messages:
        messages[message] += 1


def shown_request(request: ProgramRequest, body: bytes) -> JsonObject:
    """Return a request and its body in the form that an approver sees."""
    values: dict[str, list[str]] = {}
    for name, value in request.headers:  # a repeated header is shown with all its values
        values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    headers = {name: ", ".join(texts) for name, texts in values.items()}
    return {**request.facts(), "headers": headers, **(shown_body(body) if body else {})}
