"""Run attacks on all walls of a host, one after the other, in a limited time.

Host side. Invariants: walls and bait are removed however the run ends; a wall that cannot be tried
is reported with the reason, and never as held; `held` means that the attack ended exactly as
expected, every check from outside passed, and the harmless twin passed afterwards in the same
place.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import anyio

from fumehood.attack.attack import Attack, Expectation, arguments_of, misses, name_of, said_in
from fumehood.attack.bait import Bait
from fumehood.attack.corpus import attacks_on
from fumehood.attack.looks import Looked, looking
from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard, verdict_of
from fumehood.attack.targets import Standing, Target
from fumehood.core.errors import EndedBy, EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limits
from fumehood.sandbox.container.docker_api import DockerError
from fumehood.sandbox.wall import RunEnding

TOTAL_S = 115.0
"""Seconds for all attacks. Attacks that have not started by then are reported as untried."""

HELLO = {"calculator": "1 + 1", "function": "out = 2", "python": "1 + 1"}
"""Language → the harmless program that a wall must run before it is attacked."""

HELLO_S = 10.0
"""Time limit of the harmless first program, in seconds."""

OUT_OF_TIME = "The time for all attacks was used up."
OUT_OF_TIME_CURE = "Try one wall at a time (--wall), or when this host has less to do."

OnLine = Callable[[str, Line], None]
"""Called with the wall's name and the result of each attack as soon as it is known."""


async def run_attacks(
    targets: Sequence[Target | WallCard],
    *,
    engine_version: str,
    quick: bool = False,
    choose: Callable[[Attack], bool] = lambda attack: True,
    total_s: float = TOTAL_S,
    on_line: OnLine = lambda wall, line: None,
) -> Scorecard:
    """Run the chosen attacks on every target. Cards of absent runtimes are included unchanged.

    Raises:
        BaitFailed: the bait could not be made, so nothing was attacked.
    """
    began = time.monotonic()
    cards = []
    with Bait() as bait:
        for target in targets:
            if isinstance(target, WallCard):
                cards.append(target)
                continue
            attacks = [
                attack
                for attack in attacks_on(target.wall)
                if choose(attack) and (not quick or attack.is_quick_on(is_gvisor=target.is_gvisor))
            ]
            cards.append(await _attack_wall(target, attacks, bait, began + total_s, on_line))
    return Scorecard(engine_version, quick, round(time.monotonic() - began, 1), tuple(cards))


async def _attack_wall(
    target: Target, attacks: Sequence[Attack], bait: Bait, ends_at: float, on_line: OnLine
) -> WallCard:
    began = time.monotonic()
    lines: list[Line] = []
    why = cure = ""
    try:
        async with target.open() as standing:
            await _say_hello(standing)
            for attack in attacks:
                if time.monotonic() < ends_at:
                    line = await try_one(attack, standing, bait, is_gvisor=target.is_gvisor)
                else:
                    line = _not_tried(attack)
                lines.append(line)
                on_line(target.name, line)
    except CannotTry as cannot:
        why, cure = cannot.why, cannot.cure
    return WallCard(
        target.wall,
        target.runtime,
        verdict_of(lines),
        why,
        cure,
        round(time.monotonic() - began, 1),
        tuple(lines),
    )


class CannotTry(Exception):
    """The wall cannot be attacked on this host. Has the reason and the remedy."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(why)
        self.why = why
        self.cure = cure


async def _say_hello(standing: Standing) -> None:
    """Run a harmless program first, because a wall that refuses everything would seem to hold.

    Raises:
        CannotTry: the harmless program did not pass.
    """
    wall, language = standing.wall, standing.hello
    status = wall.status
    cure = status.remedy or "Run `fumehood doctor` to see what is missing."
    if status.faults or status.lacking:
        why = "; ".join(status.faults)
        why = why or f"It does not enforce {', '.join(sorted(status.lacking))} here."
        raise CannotTry(f"It serves no calls. {why}", cure)
    limits = Limits(HELLO_S, HELLO_S, standing.memory_mb, 4096)
    try:
        with anyio.fail_after(3 * HELLO_S):
            async with wall.lease(ATTACKER, fresh=False, memory_mb=standing.memory_mb) as lease:
                ending = await lease.run(
                    language.value, arguments_of(language, HELLO[language.value]), limits
                )
    except EngineError as error:
        raise CannotTry(error.message, cure) from None
    except DockerError as error:
        raise CannotTry(error.message, error.remedy) from None
    except TimeoutError:
        raise CannotTry("Its first program did not end.", cure) from None
    if ending.ended_by is not EndedBy.OK:
        raise CannotTry(f"Its first program ended as {ending.ended_by.value}.", cure)


def _not_tried(attack: Attack) -> Line:
    return Line(
        id=attack.id,
        topic=attack.topic.value,
        harm=attack.harm.value,
        tries=attack.tries,
        verdict=Verdict.UNTRIED,
        expected=attack.expected.ends,
        ended=None,
        twin=None,
        seen=(),
        why=OUT_OF_TIME,
        cure=OUT_OF_TIME_CURE,
        differs="",
        ms=0,
    )


GRACE_S = 10.0
"""Seconds that a run may exceed its time limit by the host's clock, since the kill takes time."""

PATIENCE_S = 20.0
"""Seconds after a run's time limit until it is given up, so that it cannot delay the others."""

ATTACKER = TrustDomain("attack")
TWIN = Expectation(("ok",))


async def try_one(attack: Attack, standing: Standing, bait: Bait, *, is_gvisor: bool) -> Line:
    """Try one attack on one wall. If the trial itself fails, the returned line says why."""
    began = time.monotonic()
    trial = _Trial(attack, standing, bait, is_gvisor=is_gvisor)
    try:
        await trial.run()
    except (EngineError, DockerError) as error:
        trial.untried(error)
    return trial.line(round((time.monotonic() - began) * 1e3))


class _Trial:
    """The trial of one attack on one wall, with its findings so far."""

    def __init__(self, attack: Attack, standing: Standing, bait: Bait, *, is_gvisor: bool) -> None:
        self._attack = attack
        self._is_gvisor = is_gvisor
        self._standing = standing
        self._bait = bait
        self._expected = attack.expected_on(is_gvisor=is_gvisor)
        self._looked = Looked()
        self._ended: str | None = None
        self._twin: str | None = None
        self._why_untried = ""
        self._cure = ""

    async def run(self) -> None:
        """Run the attack, its checks and its twin.

        Raises:
            EngineError: the wall refused.
            DockerError: Docker could not be queried.
        """
        attack = self._attack
        if attack.before is not None:
            prepared = await self._send(attack.before, ATTACKER)
            if prepared is None or name_of(prepared) != "ok":
                self._why_untried = "Its preparation failed."
                return
        by = _stranger() if attack.by_stranger else ATTACKER
        wanted = attack.looks_on(is_gvisor=self._is_gvisor)
        containers = self._standing.containers
        if wanted and containers is not None and not await containers.names():
            await self._send(attack.twin, ATTACKER)  # the last attack may have ended the last one
        async with looking(attack, wanted, self._standing, self._bait) as self._looked:
            began = time.monotonic()
            ending = await self._send(attack.code, by)
            took_s = time.monotonic() - began
        self._judge(ending, took_s)
        await self._try_twin()

    def untried(self, error: EngineError | DockerError) -> None:
        """Record that the wall or Docker refused: a failure if the attack has already run, else
        untried.
        """
        words = error.message
        if self._ended is not None:
            self._looked.faults.append(f"nothing ran after it: {words}")
            return
        self._why_untried = words
        self._cure = "" if isinstance(error, EngineError) else error.remedy

    def line(self, ms: int) -> Line:
        """Return the result for the scorecard. `ms` is the trial's duration in milliseconds."""
        attack, faults = self._attack, self._looked.faults
        verdict = Verdict.FAILED if faults else Verdict.HELD
        if self._why_untried and not faults:
            verdict = Verdict.UNTRIED
        differs = attack.on_gvisor.why if self._is_gvisor and attack.on_gvisor else ""
        return Line(
            id=attack.id,
            topic=attack.topic.value,
            harm=attack.harm.value,
            tries=attack.tries,
            verdict=verdict,
            expected=self._expected.ends,
            ended=self._ended,
            twin=self._twin,
            seen=tuple(self._looked.seen),
            why="; ".join(faults) or self._why_untried,
            cure=self._cure,
            differs=differs,
            ms=ms,
        )

    # -- inside -----------------------------------------------------------------------------

    async def _send(self, code: str, domain: TrustDomain) -> RunEnding | None:
        """Run one program. Returns None if it did not end in time."""
        attack, standing = self._attack, self._standing
        limits = Limits(attack.wall_s, 60.0, standing.memory_mb, attack.output_bytes)
        arguments = arguments_of(attack.language, self._bait.fill(code))
        if standing.environment:
            variables = standing.environment.items()
            arguments["env"] = [{"name": name, "value": value} for name, value in variables]
        async with standing.wall.lease(domain, fresh=False, memory_mb=standing.memory_mb) as lease:
            with anyio.move_on_after(attack.wall_s + PATIENCE_S):
                return await lease.run(attack.language.value, arguments, limits, standing.sinks)
        return None

    def _judge(self, ending: RunEnding | None, took_s: float) -> None:
        attack, faults = self._attack, self._looked.faults
        self._ended = "never" if ending is None else name_of(ending)
        if ending is None:
            faults.append("it did not end")
        else:
            faults += misses(self._expected, attack.language, ending)
        if took_s > attack.wall_s + GRACE_S:
            faults.append(f"it took {took_s:.1f} s by the host's clock")
        lost = self._bait.losses("" if ending is None else said_in(ending))
        lost += self._standing.losses()
        faults += lost
        if not lost:
            self._looked.seen.append("the bait is untouched")

    async def _try_twin(self) -> None:
        ending = await self._send(self._attack.twin, ATTACKER)
        self._twin = "never" if ending is None else name_of(ending)
        expected = Expectation(TWIN.ends, self._attack.twin_gives)
        missing = (
            ["it did not end"]
            if ending is None
            else misses(expected, self._attack.language, ending)
        )
        if missing:
            told = "; ".join(missing)
            self._looked.faults.append(f"it also refuses harmless programs: of the twin, {told}")


def _stranger() -> TrustDomain:
    """Return the trust domain of a new principal."""
    return TrustDomain(f"attack:{secrets.token_hex(8)}")
