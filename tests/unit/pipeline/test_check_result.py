"""Result checkers: they add an assessment to a successful answer and cannot break it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import CheckedResult, Config, ConfigError, Engine, ResultCheck, tool
from fumehood.core.call import ResultChecker
from fumehood.core.envelope import Envelope
from fumehood.pipeline import check_result
from fumehood.pipeline.check_result import load_checkers
from fumehood.testing import FakeWall

pytestmark = [pytest.mark.anyio, pytest.mark.row("P13")]


@tool(sandboxed=False)
async def answer(query: str) -> dict[str, Any]:
    """Answer a question."""
    return {"answer": f"{query}: perhaps"}


async def doubts(result: CheckedResult) -> ResultCheck:
    return ResultCheck(True, f"{result.tool} is not sure of {result.arguments['query']!r}")


async def agrees(result: CheckedResult) -> ResultCheck:
    return ResultCheck()


async def passes(result: CheckedResult) -> None:
    return None


async def fails(result: CheckedResult) -> ResultCheck:
    raise RuntimeError("the model is away")


async def never_ends(result: CheckedResult) -> ResultCheck:
    await anyio.sleep_forever()
    return ResultCheck()


async def changes(result: CheckedResult) -> ResultCheck:
    result.data["answer"] = "another"
    result.arguments.clear()
    return ResultCheck()


async def called(home: Path, checkers: Sequence[ResultChecker], **options: Any) -> Envelope:
    config = Config(home=home, host_tools=("answer",))
    async with Engine(
        [answer], config=config, interpreter=FakeWall(), container=FakeWall(),
        result_checkers=checkers,
    ) as engine:  # fmt: skip
        return await engine.call("answer", {"query": "why"}, **options)


OBJECTION = {"checked": True, "needs_correction": True, "correction": "answer is not sure of 'why'"}


@pytest.mark.parametrize(
    ("checkers", "expected"),
    [
        ([doubts], OBJECTION),
        ([agrees], {"checked": True, "needs_correction": False}),
        ([agrees, doubts, passes], OBJECTION),
        ([], None),
        ([passes], None),
    ],
)
async def test_envelope_has_the_opinion_of_the_checkers_if_they_have_one(
    home: Path, checkers: list[ResultChecker], expected: object
) -> None:
    envelope = await called(home, checkers)
    assert envelope.success
    assert envelope.model_dump(mode="json")["metadata"].get("metacognition") == expected


@pytest.mark.parametrize("bad", [fails, never_ends])
async def test_failing_or_hanging_checker_adds_a_warning_and_keeps_the_answer(
    home: Path, bad: ResultChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_result, "CHECK_S", 0.05)
    envelope = await called(home, [doubts, bad])
    assert (envelope.success, envelope.data) == (True, {"answer": "why: perhaps"})
    assert not envelope.metadata.metacognition.checked
    assert envelope.metadata.metacognition.needs_correction  # what was said before it counts
    (warning,) = envelope.metadata.warnings
    assert bad.__name__ in warning
    assert "the model is away" not in envelope.model_dump_json()


async def test_checker_cannot_change_the_answer(home: Path) -> None:
    assert (await called(home, [changes])).data == {"answer": "why: perhaps"}


async def test_checkers_are_not_called_for_failures_and_dry_runs(home: Path) -> None:
    seen: list[CheckedResult] = []

    async def sees(result: CheckedResult) -> None:
        seen.append(result)

    await called(home, [sees], dry_run=True)
    config = Config(home=home)
    async with Engine([answer], config=config, result_checkers=[sees]) as engine:
        await engine.call("answer", {"wrong": 1})
        assert seen == []
        await engine.call("answer", {"query": "why"}, trace_id="t1")
    (result,) = seen
    assert (result.tool, result.arguments, result.trace_id) == ("answer", {"query": "why"}, "t1")


def test_synchronous_checker_is_refused(home: Path) -> None:
    wrong: Any = print
    with pytest.raises(TypeError, match="print is not an asynchronous function"):
        Engine(config=Config(home=home), result_checkers=[wrong])


class Offered:
    def __init__(self, name: str, checker: object) -> None:
        self.name, self._checker = name, checker

    def load(self) -> object:
        if isinstance(self._checker, Exception):
            raise self._checker
        return self._checker


def test_only_configured_checkers_of_installed_packages_are_loaded() -> None:
    offered: Any = [Offered("one", doubts), Offered("two", ImportError("no such module"))]
    assert load_checkers(["one"], offered) == [doubts]
    assert load_checkers([], offered) == []
    with pytest.raises(ConfigError, match="there are: one, two"):
        load_checkers(["three"], offered)
    with pytest.raises(ConfigError, match="no such module"):
        load_checkers(["two"], offered)
