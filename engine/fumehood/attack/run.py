"""All attacks on all walls of a host, one after the other, within a time that is known before.

Host side. Invariants: leaving it, by its end, an error or a cancellation, takes away all walls
and the bait; and a wall that cannot be tried says why instead of looking as if it had held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio

from fumehood.attack.attack import Attack
from fumehood.attack.bait import Bait
from fumehood.attack.corpus import attacks_on
from fumehood.attack.languages import arguments_of
from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard, verdict_of
from fumehood.attack.standing import CannotTry, Standing, Target
from fumehood.attack.trial import ATTACKER, try_one
from fumehood.core.errors import EndedBy, EngineError
from fumehood.core.limits import Limits
from fumehood.sandbox.container.docker_api import DockerError

TOTAL_S = 115.0
"""For everything. What is not begun by then is not tried, and the scorecard says so."""

HELLO = {"calculator": "1 + 1", "function": "out = 2", "python": "1 + 1"}
HELLO_S = 10.0
OUT_OF_TIME = "The time for all attacks was over."
OUT_OF_TIME_CURE = "Try one wall at a time (--wall), or when this host has less to do."

OnLine = Callable[[str, Line], None]
"""Hears of every line as soon as it is there, with the name of its wall."""


async def run_attacks(
    targets: Sequence[Target | WallCard],
    *,
    engine_version: str,
    quick: bool = False,
    choose: Callable[[Attack], bool] = lambda attack: True,
    total_s: float = TOTAL_S,
    on_line: OnLine = lambda wall, line: None,
) -> Scorecard:
    """Attack every target with the attacks that are chosen. A card that is there already (of an
    absent runtime) is passed on.

    Raises:
        BaitFailed: there was nothing to attack.
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
                    line = await try_one(attack, target, standing, bait)
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


async def _say_hello(standing: Standing) -> None:
    """A first harmless program: without it every refusal would look like a defence.

    Raises:
        CannotTry: it did not pass.
    """
    wall, language = standing.wall, standing.hello
    faults = getattr(wall, "faults", ())
    cure = getattr(wall, "cure", "") or "Run `fumehood doctor` to see what is missing."
    if faults or wall.required - wall.enforced:
        missing = ", ".join(sorted(wall.required - wall.enforced))
        why = "; ".join(faults) or f"It does not enforce {missing} here."
        raise CannotTry(f"It serves nobody. {why}", cure)
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
        raise CannotTry(error.public, error.cure) from None
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
