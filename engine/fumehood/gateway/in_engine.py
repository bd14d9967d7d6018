"""The gateway as a part of one engine: gives programs the network access that their calls request.

Host side. Invariants:

* A program gets no connection that its call did not request.
* When the run of a program ends, all tasks that serve its connections have ended.
* The requests of a trial are sent only after a human's approval, in their original order, each at
  most once.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio

from fumehood.core.errors import (
    EndedBy,
    EngineError,
    NetworkError,
    PermissionDenied,
    SandboxViolation,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.names import NET_TOOL
from fumehood.engine_part import EnginePart, Kernel
from fumehood.executors.around import Given, LastingProgram, Ran, Share
from fumehood.executors.base import HeldAction, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.gateway.door import Door, NetworkUse, Send, shown_request
from fumehood.gateway.placeholders import HeldRequest
from fumehood.gateway.request import Refusal
from fumehood.gateway.service import ENVIRONMENT, Gateway
from fumehood.gateway.settings import GatewaySettings
from fumehood.gateway.tape import Tape
from fumehood.observe.ended_call import EndedCall
from fumehood.observe.figures import Figure
from fumehood.sandbox.connections import Connections
from fumehood.sandbox.streams import RunClock, Stream

if TYPE_CHECKING:
    from fumehood.compose import Composition


class GatewayPart(EnginePart):
    """The gateway as a part of one engine. The attribute `gateway` is set while the engine runs."""

    gateway: Gateway
    tls: ssl.SSLContext | None = None
    """TLS settings for connections to hosts. None means the default. Set it before the engine
    runs.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._lasting: dict[str, _LastingUse] = {}
        self._sums: Counter[str] = Counter()
        """Name of a field of `NetworkReport` → the sum of its values over all calls."""

    def on_call(self, call: EndedCall) -> None:
        """Add the network use of a call, which has just ended, to the metrics."""
        if call.network is not None:
            self._sums.update(call.network.model_dump(exclude={"hosts"}))

    def figures(self) -> Iterator[Figure]:
        """Yield the metrics about the network use of all programs."""
        for name, words in (
            ("requests", "Requests of programs, including refused ones."),
            ("denied", "Requests of programs that the gateway refused."),
            ("held", "Requests of programs that waited for a human."),
            ("misused", "Requests that misused the placeholder of a secret."),
        ):
            yield Figure(f"gateway_{name}", words, self._sums[name], kind="counter")
        passed = {"in": float(self._sums["bytes_in"]), "out": float(self._sums["bytes_out"])}
        words = "Bytes of the requests of programs and of their answers."
        yield Figure("gateway_bytes", words, passed, "direction", "counter")

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Create the engine's gateway before the engine's first call."""
        settings = self.kernel.config.of("gateway", GatewaySettings)
        assert settings is not None
        services = made.services
        self.gateway = Gateway(
            settings, services.policy.decide_request, self.kernel.database.directory,
            services.registry.secrets, self.kernel.record, services.log, self.tls,
        )  # fmt: skip
        yield

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        """Give a call's program access to the network through the gateway. If the call names no
        hosts, yield None.

        `before` are the contributions of earlier parts to the run. If one of them offers a tape,
        the tape records or answers the program's requests. If one of them holds back the effects of
        the run, the program's requests are held back too.
        """
        if not run.network:
            yield None
            return
        held: list[HeldRequest] | None = [] if any(given.holds_back for given in before) else None
        offered = [given.offer for given in before if isinstance(given.offer, Tape)]
        tape = offered[0] if offered else None
        async with self._opened(run, tape, held) as (door, stream):
            yield Given(
                needs=frozenset({"network"}),
                environment={**ENVIRONMENT, **door.placeholders.environment},
                streams=(stream,),
                scope=door.use.scope,
                share=lambda ran: _share(ran, door.use, _Requests(self, held or [])),
            )

    def _opened(
        self, run: ToolRun, tape: Tape | None, held: list[HeldRequest] | None
    ) -> AbstractAsyncContextManager[tuple[Door, Stream[Connections]]]:
        """Open the door of a call. Return a context manager that yields the door, and the stream
        between the program and the gateway.

        The door decides which requests of the program are sent. If `tape` is given, it records or
        answers the requests. If `held` is given, requests are added to it instead of being sent.

        Raises:
            PermissionDenied: the operator has allowed no host and no package index, and no tape
                answers the requests.
        """
        calls, options = run.calls, run.request.options
        assert calls is not None
        if not self.gateway.is_open and not (tape is not None and tape.answers):
            raise PermissionDenied(
                "This engine gives programs no network: the operator has set no gateway.hosts. Do "
                "not retry."
            )

        async def ask(arguments: JsonObject, send: Send, clock: RunClock) -> EngineError | None:
            return await calls.ask(NET_TOOL, arguments, _WaitingRequest(send), clock)

        return self.gateway.door(
            run.network, ask, run.redactor, cancel=calls.cancel, spend=calls.spend,
            tape=tape, held_back=held, tool=run.tool.definition.name,
            call_id=run.request.call_id, principal_id=run.domain.principal_id,
            agent_id=options.agent_id, session_id=run.domain.session_id,
        )  # fmt: skip

    @asynccontextmanager
    async def around_lasting(self, program: LastingProgram) -> AsyncIterator[Given | None]:
        """Give a program that serves many calls access to the network through the gateway. If the
        program names no hosts, yield None.

        If the program misuses the placeholder of a secret, and the settings of this secret demand
        it, the program is ended.

        Raises:
            PermissionDenied: the operator has allowed no host and no package index.
            SandboxViolation: the program was ended because it misused a secret.
        """
        if not program.hosts:
            yield None
            return
        if not self.gateway.is_open:
            raise PermissionDenied("it needs network access, but gateway.hosts names no host")
        kept = self._lasting.setdefault(program.id, _LastingUse())
        async with self.gateway.door(
            program.hosts, _refuse, program.redactor, tool=program.tool, call_id=program.id,
            principal_id=program.id, agent_id=None, session_id=None,
        ) as (door, stream):  # fmt: skip
            kept.door = door
            with anyio.CancelScope() as scope:
                door.use = replace(kept.use, scope=scope)
                try:
                    yield Given(
                        needs=frozenset({"network"}),
                        environment={**ENVIRONMENT, **door.placeholders.environment},
                        streams=(stream,),
                        used=kept.share,
                    )
                finally:
                    kept.door, kept.use = None, replace(door.use, ended_for=None)
        if scope.cancelled_caught:
            raise SandboxViolation("it misused the placeholder of a secret, so it was ended")

    async def send(self, run: ToolRun, requests: Sequence[HeldRequest]) -> EngineError | None:
        """Send the requests that a trial held back, in their original order, until one fails.

        Return the error of the failed request, or None if all requests succeeded.
        """
        async with self._opened(run, None, None) as (door, _):
            assert door.deliver is not None
            for number, held in enumerate(requests, 1):
                try:
                    await door.deliver(held)
                except Refusal as refusal:
                    return NetworkError(
                        f"The session has the trial's files and variables, but of {len(requests)} "
                        f"requests only {number - 1} were sent. {held.request.method} "
                        f"{held.request.url[:200]}: {refusal.message}",
                        retryable=False,
                    )
        return None


class _WaitingRequest(HeldAction):
    """A program's network request that waits for a human's approval. After the approval, the
    gateway sends the request itself, so no tool runs.
    """

    needs = "program"
    gone = "The program that wanted to send this request has ended, so nothing was sent."
    place = Placement(
        "host", "host", "the gateway sends a program's requests from the engine's own process"
    )

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    async def carry_out(self, run: ToolRun) -> Outcome:
        """Send the request. Return an outcome with `{"sent": true}` as its data, or with the
        error.
        """
        error = await self._send()
        data = {"sent": True} if error is None else None
        return Outcome(EndedBy.OK, "none", data=data, error=error)


@dataclass(slots=True)
class _LastingUse:
    """The network use of a program that serves many calls. Its counts survive a restart of the
    program.
    """

    door: Door | None = None
    """The program's door while the program runs, otherwise None."""
    use: NetworkUse = field(default_factory=NetworkUse)
    """The network use before the program's last restart, as far as no call has reported it yet."""

    def share(self) -> Share:
        """Return what the gateway adds to the outcome of the call that ends now: the network use
        since the previous call ended.

        Also reset all counts, so that the next call has the full limits on network use.
        """
        if self.door is not None:
            used = self.door.take_use()
        else:
            used, self.use = self.use, NetworkUse()
        return Share(sandbox={"network": used.report()}, warnings=used.warnings())


async def _refuse(arguments: JsonObject, send: Send, clock: RunClock) -> EngineError | None:
    return PermissionDenied(
        "A request of a server belongs to no call, so no human can be asked. A policy rule for "
        "net can allow it."
    )


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests that a trial held back. If a human approves the trial, they are sent."""

    part: GatewayPart
    requests: Sequence[HeldRequest]

    @property
    def shown(self) -> JsonObject:
        if not self.requests:
            return {}
        return {"requests": [shown_request(held.request, held.body) for held in self.requests]}

    async def apply(self, run: ToolRun) -> EngineError | None:
        return await self.part.send(run, self.requests) if self.requests else None


def _share(ran: Ran, use: NetworkUse, requests: _Requests) -> Share:
    def violation(fields: JsonObject) -> EngineError:
        return SandboxViolation(
            f"The program misused the placeholder of the secret {use.ended_for!r}, so it was "
            "ended.",
            details=fields,
        )

    is_misuse = use.ended_for is not None and ran.ending.ended_by is EndedBy.POLICY
    return Share(
        fault=violation if is_misuse else None,
        warnings=use.warnings(),
        sandbox={"network": use.report()},
        held_back=requests,
    )
