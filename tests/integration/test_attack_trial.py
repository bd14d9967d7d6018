"""One attack's verdict: held only if the attack, its twin and the checks from outside agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fumehood.attack.attack import Attack, Differs, Harm, Language, Look, Topic, ends, raises
from fumehood.attack.bait import Bait
from fumehood.attack.run import try_one
from fumehood.attack.scorecard import Line, Verdict
from fumehood.attack.targets import Standing
from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import FakeWall, SeenRun

pytestmark = pytest.mark.anyio

OPENS = Attack(
    "open", Topic.HOST, Harm.HOST_LEAK, "open a file", Language.PYTHON,
    code="attack", expected=raises("PermissionError"), twin="twin", twin_gives=4,
)  # fmt: skip
REFUSED = RunEnding(
    EndedBy.EXCEPTION, "call", claimed_error={"exception": {"type": "PermissionError"}}
)
FOUR = RunEnding(EndedBy.OK, "call", result={"value": 4})
POLICY = RunEnding(EndedBy.POLICY, "call")


@pytest.fixture(scope="module")
def bait() -> Iterator[Bait]:
    with Bait() as bait:
        yield bait


async def tried(
    bait: Bait,
    *,
    attack: Attack = OPENS,
    attacked: RunEnding | Callable[[], RunEnding] = REFUSED,
    twin: RunEnding | Callable[[], RunEnding] = FOUR,
    kind: str | None = None,
    guest_pid: Callable[[], int | None] = lambda: 1,
) -> Line:
    def answer(run: SeenRun) -> RunEnding:
        chosen = attacked if run.arguments["code"] == "attack" else twin
        return chosen if isinstance(chosen, RunEnding) else chosen()

    standing = Standing(FakeWall(answer=answer), Language.PYTHON, 128, guest_pid)
    return await try_one(attack, standing, bait, kind)


async def test_refused_attack_with_passing_twin_is_held(bait: Bait) -> None:
    line = await tried(bait)
    assert (line.verdict, line.ended, line.twin, line.why) == (
        Verdict.HELD, "exception:PermissionError", "ok", "",
    )  # fmt: skip
    assert line.seen == ("the bait is untouched",)


async def test_attack_with_unexpected_ending_is_failed(bait: Bait) -> None:
    line = await tried(bait, attacked=POLICY)
    assert line.verdict is Verdict.FAILED
    assert line.why == "it ended as policy and not as exception:PermissionError"
    assert (await tried(bait, attacked=FOUR)).verdict is Verdict.FAILED


async def test_refused_twin_is_failed(bait: Bait) -> None:
    for twin in (REFUSED, POLICY, RunEnding(EndedBy.OK, "call", result={"value": 5})):
        line = await tried(bait, twin=twin)
        assert line.verdict is Verdict.FAILED
        assert "it also refuses harmless programs" in line.why


async def test_wall_unavailable_after_attack_is_failed_and_before_it_is_untried(bait: Bait) -> None:
    def gone() -> RunEnding:
        raise SandboxUnavailable("It is gone.")

    line = await tried(bait, twin=gone)
    assert (line.verdict, line.why) == (Verdict.FAILED, "nothing ran after it: It is gone.")
    before = await tried(bait, attacked=gone)
    assert (before.verdict, before.why, before.ended) == (Verdict.UNTRIED, "It is gone.", None)


async def test_answer_containing_the_bait_secret_is_failed(bait: Bait) -> None:
    leaky = replace(REFUSED, stderr=f"see: {bait.word}")
    assert "the word that only the host knows" in (await tried(bait, attacked=leaky)).why


async def test_attack_that_does_not_end_at_its_limit_counts_as_failed(bait: Bait) -> None:
    floods = replace(OPENS, expected=raises("PermissionError", hits="disk"))
    assert (await tried(bait, attack=floods)).verdict is Verdict.FAILED
    hit = replace(REFUSED, limits_hit=("disk",))
    assert (await tried(bait, attack=floods, attacked=hit)).verdict is Verdict.HELD


async def test_replaced_guest_process_is_failed(bait: Bait) -> None:
    attack = replace(OPENS, looks=(Look.UNBROKEN,))
    pids = iter([7, 8])
    line = await tried(bait, attack=attack, guest_pid=lambda: next(pids))
    assert line.why == "the guest was ended"
    line = await tried(bait, attack=attack, guest_pid=lambda: 7)
    assert (line.verdict, line.seen[0]) == (Verdict.HELD, "the guest is the same process")


async def test_attack_with_failed_setup_is_untried(bait: Bait) -> None:
    attack = replace(OPENS, before="before")
    line = await tried(bait, attack=attack, twin=POLICY)
    assert (line.verdict, line.ended) == (Verdict.UNTRIED, None)


async def test_gvisor_specific_ending_is_held_on_gvisor_and_failed_elsewhere(bait: Bait) -> None:
    attack = replace(OPENS, on_gvisor=Differs("It differs.", ends("policy")))
    line = await tried(bait, attack=attack, attacked=POLICY, kind="gvisor")
    assert (line.verdict, line.differs, line.expected) == (
        Verdict.HELD, "It differs.", ("policy",),
    )  # fmt: skip
    elsewhere = await tried(bait, attack=attack, attacked=POLICY)
    assert (elsewhere.verdict, elsewhere.differs) == (Verdict.FAILED, "")
