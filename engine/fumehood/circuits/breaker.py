"""The circuit breakers of an engine. There is one *circuit* for each service that tools call.

The pipeline calls this module before each request to a service. The module uses only plain values
and the log. A closed circuit lets all requests through, an open circuit none. A half-open circuit
lets exactly `trials` requests through, however many calls arrive at the same time. Invariants:

* A request without a permit is never sent.
* A permit ends with its call, however the call ends. So no unfinished trial keeps a circuit
  half-open.
* A permit that was given before the circuit's last change of state changes nothing.

The circuits are in memory only, so a restart closes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

from pydantic import Field, model_validator

from fumehood.core.errors import CircuitOpen, EngineError, Fault, Timeout
from fumehood.core.status import CircuitState, CircuitStatus
from fumehood.core.value import Value
from fumehood.observe.clock import Window
from fumehood.observe.log import Logger

TRIAL_WAIT_MS = 1000
"""Delay in milliseconds that callers are told to wait while all trial requests are under way."""

HEALTHY, FAILING = 0, 1


def health_of(error: EngineError | None, *, was_hurried: bool = False) -> int | None:
    """Return what the end of a request says about the service: HEALTHY or FAILING. Return None if
    it says nothing about the service.

    `error` is the error with which the request ended, or None if the request succeeded.
    `was_hurried` says whether the request had less time than its tool allows.

    * Timeouts, broken connections and 5xx responses mean FAILING.
    * Any other answer means HEALTHY, even a refusal of the caller's arguments.
    * A request that never reached the service, was cancelled, or exceeded a rate limit says
      nothing.
    * A timeout of a hurried request says nothing. Otherwise, a caller could make the engine suspend
      a service for everybody.
    """
    if error is None:
        return HEALTHY
    if was_hurried and isinstance(error, Timeout):
        return None
    if error.fault is Fault.UPSTREAM:
        return FAILING
    answered = error.fault is Fault.GUEST and error.was_sent and not isinstance(error, Timeout)
    return HEALTHY if answered else None


class Permit:
    """Permission to send one request. The first call of `conclude` or `give_back` ends the permit;
    later calls do nothing.

    A permit is also a context manager. On leaving the context, the permit is given back, unless it
    has already ended.
    """

    __slots__ = ("_circuit", "_generation", "_is_over")

    def __init__(self, circuit: Circuit, generation: int) -> None:
        self._circuit = circuit
        self._generation = generation
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_back()

    def conclude(self, error: EngineError | None, *, was_hurried: bool = False) -> None:
        """End the permit, and count how its request ended.

        `error` is the error with which the request ended, or None if it succeeded. `was_hurried`
        says whether the request had less time than its tool allows; then a timeout does not count.
        """
        self._end(health_of(error, was_hurried=was_hurried))

    def give_back(self) -> None:
        """End the permit without counting anything, because its request was not sent or was
        cancelled.
        """
        self._end(None)

    def _end(self, health: int | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._circuit.leave(self._generation, health)


class Circuit:
    """The circuit breaker of one service: it suspends the requests to the service while too many of
    them fail. `upstream` is the name of the service, and `now` returns monotonic seconds.
    """

    def __init__(
        self, upstream: str, settings: CircuitSettings, now: Callable[[], float], log: Logger
    ) -> None:
        self.upstream = upstream
        self._settings = settings
        self._now = now
        self._log = log
        self._state = CircuitState.CLOSED
        self._generation = 0
        """Number of changes of the state. A permit from before the last change does not affect the
        circuit.
        """
        self._recent = Window(settings.window_seconds)
        self._open_s = settings.open_seconds
        self._opens_until = 0.0
        self._trials_out = 0
        self._trials_ok = 0

    def enter(self) -> Permit:
        """Return a permit for one request.

        Raises:
            CircuitOpen: requests are suspended, or all trial requests are under way.
        """
        self.require_passable()
        if self._state is CircuitState.OPEN:
            self._become(CircuitState.HALF_OPEN)
        if self._state is CircuitState.HALF_OPEN:
            self._trials_out += 1
        return Permit(self, self._generation)

    def require_passable(self) -> None:
        """Raise CircuitOpen if `enter` would raise it now. No permit is taken."""
        wait_ms = self.wait_ms()
        if wait_ms:
            raise CircuitOpen(
                "The service that this tool calls failed too often, so calls to it are suspended. "
                f"Nothing was sent. Repeat the call in {math.ceil(wait_ms / 1000)} s.",
                retry_after_ms=wait_ms,
            )

    def leave(self, generation: int, health: int | None) -> None:
        """End a permit, and count how its request ended.

        `health` is the result of `health_of` for the request. If it is None, nothing is counted.
        `generation` is the circuit's number of state changes at the time when the permit was given.
        If the state has changed since then, this method does nothing.

        Only `Permit` calls this method.
        """
        if generation != self._generation:
            return
        if self._state is CircuitState.HALF_OPEN:
            self._end_trial(health)
        elif health is not None:
            self._count(health)

    def status(self) -> CircuitStatus:
        """Return the current state of the circuit, for administrators."""
        calls, failures = self._counts()
        wait_ms = self.wait_ms()
        is_due = self._state is CircuitState.OPEN and not wait_ms
        return CircuitStatus(
            upstream=self.upstream,
            state=CircuitState.HALF_OPEN if is_due else self._state,
            requests=calls,
            failures=failures,
            retry_after_ms=wait_ms or None,
        )

    def wait_ms(self) -> int:
        """Return the number of milliseconds for which requests will be refused from now on. Return
        0 if a request would be let through.
        """
        if self._state is CircuitState.OPEN:
            return max(0, math.ceil((self._opens_until - self._now()) * 1000))
        if self._state is CircuitState.HALF_OPEN:
            is_full = self._trials_out + self._trials_ok >= self._settings.trials
            return TRIAL_WAIT_MS if is_full else 0
        return 0

    def _counts(self) -> tuple[int, int]:
        """Return the number of all requests in the window, and the number of those that failed."""
        healthy, failures = map(int, self._recent.totals(self._now()))
        return healthy + failures, failures

    def _count(self, health: int) -> None:
        self._recent.add(self._now(), health == HEALTHY, health == FAILING)
        if health is not FAILING:
            return
        settings = self._settings
        calls, failures = self._counts()
        if failures >= settings.min_failures and failures >= settings.failure_rate * calls:
            self._open(settings.open_seconds)

    def _end_trial(self, health: int | None) -> None:
        self._trials_out -= 1
        if health is FAILING:
            self._recent.add(self._now(), 0, 1)
            self._open(min(self._open_s * 2, self._settings.max_open_seconds))
        elif health is HEALTHY:
            self._trials_ok += 1
            if self._trials_ok >= self._settings.trials:
                self._recent.clear()
                self._become(CircuitState.CLOSED)

    def _open(self, open_s: float) -> None:
        self._open_s = open_s
        self._opens_until = self._now() + open_s
        self._become(CircuitState.OPEN)

    def _become(self, state: CircuitState) -> None:
        self._state = state
        self._generation += 1
        self._trials_out = self._trials_ok = 0
        calls, failures = self._counts()
        event, facts = f"circuit.{state.value}", {"upstream": self.upstream}
        if state is CircuitState.OPEN:
            self._log.warning(
                event, **facts, open_s=self._open_s, requests=calls, failures=failures
            )
        else:
            self._log.info(event, **facts)


class Circuits:
    """The circuits to all services. A circuit is created at the first call of a tool that uses its
    service.
    """

    def __init__(self, settings: CircuitSettings, now: Callable[[], float], log: Logger) -> None:
        self._settings = settings
        self._now = now
        self._log = log
        # There is at most one circuit for each service that administrators have registered.
        self._circuits: dict[str, Circuit] = {}

    def of(self, upstream: str | None) -> Circuit | None:
        """Return the circuit to a service, or None if `upstream` is None. `upstream` is the name of
        the service, or None for a tool that calls no service.
        """
        if upstream is None:
            return None
        circuit = self._circuits.get(upstream)
        if circuit is None:
            circuit = Circuit(upstream, self._settings, self._now, self._log)
            self._circuits[upstream] = circuit
        return circuit

    def statuses(self) -> list[CircuitStatus]:
        """Return the status of every circuit. Circuits that are not closed come first."""
        found = [circuit.status() for circuit in self._circuits.values()]
        return sorted(found, key=lambda one: (one.state is CircuitState.CLOSED, one.upstream))

    def broken(self) -> int:
        """Return the number of circuits that are not closed."""
        return sum(one.state is not CircuitState.CLOSED for one in self.statuses())


class CircuitSettings(Value):
    """The settings of circuit breakers. A circuit breaker opens, that is, suspends the requests to
    a service, if too many of them fail. The settings apply to every service.

    A circuit opens if at least `min_failures` requests have failed within the last
    `window_seconds`. In addition, they must be at least the fraction `failure_rate` of all requests
    in this time. After `open_seconds`, the circuit lets `trials` trial requests through. If a trial
    request fails, the circuit opens again for twice as long, up to `max_open_seconds`.
    """

    window_seconds: float = Field(default=60, ge=1, le=3600)
    min_failures: int = Field(default=5, ge=1, le=100_000)
    failure_rate: float = Field(default=0.5, gt=0, le=1)
    open_seconds: float = Field(default=30, gt=0, le=3600)
    max_open_seconds: float = Field(default=300, gt=0, le=86_400)
    trials: int = Field(default=2, ge=1, le=100)
    """Number of trial requests that a half-open circuit lets through. The circuit closes once all
    of them have succeeded.
    """

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.max_open_seconds < self.open_seconds:
            raise ValueError("max_open_seconds must be at least open_seconds")
        return self
