"""Options of a call that parts add: whose they are, what is stored of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood import Engine, call_options, tool
from fumehood.approvals.model import ApprovalQuery, NewDecision
from fumehood.call_options import (
    OF_PARTS,
    CallOptions,
    inherited,
    is_deciding,
    options_of,
    read_stored,
    stored,
    with_options,
)
from fumehood.core import call as kernel
from fumehood.core.identity import Principal, Scope
from fumehood.core.part import CallOption, Part
from fumehood.parts import PartError
from support.recording import bench

pytestmark = pytest.mark.anyio

COLOUR: CallOption[str | None] = CallOption(name="colour", type=str | None, default=None)
KEPT = CallOption(name="kept", type=bool, default=True)
SHADE = CallOption(name="shade", type=int, default=1, decides=False, inherited=True)
OPTIONS = (COLOUR,)
OPTIONS_OF_KERNEL = (CallOption(name="dry_run", type=bool, default=False),)
OPTIONS_OF_MODEL = (CallOption(name="model_dump", type=bool, default=False),)


def part(name: str, options: str = "OPTIONS") -> Part:
    return Part(name=name, call_options=f"{__name__}:{options}")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[Any]]:
    """Adds options to those of the product's parts, and returns the model with them."""

    def add(*options: CallOption[Any]) -> type[Any]:
        every = {**OF_PARTS, **{option.name: option for option in options}}
        monkeypatch.setattr(call_options, "OF_PARTS", every)
        model: type[Any] = with_options(every)
        monkeypatch.setattr(call_options, "CallOptions", model)
        return model

    return add


# -- whose an option is -------------------------------------------------------------------------


def test_two_parts_with_one_option_are_refused_and_both_are_named() -> None:
    with pytest.raises(PartError, match="'a' and 'b' both add the call option 'colour'"):
        options_of([part("a"), part("b")])
    assert list(options_of([part("a"), Part(name="b")])) == ["colour"]  # twin


@pytest.mark.parametrize("options", ["OPTIONS_OF_KERNEL", "OPTIONS_OF_MODEL"])
def test_attack_option_that_replaces_one_of_the_kernel_is_refused(options: str) -> None:
    with pytest.raises(
        PartError, match=r"The part 'a' adds the call option .*which the kernel has"
    ):
        options_of([part("a", options)])


def test_kernel_names_no_option_of_the_parts() -> None:
    assert OF_PARTS.keys() == {
        "enable_cache", "enable_streaming", "packages", "preview", "receipt", "replay",
    }  # fmt: skip
    assert OF_PARTS.keys().isdisjoint(kernel.CallOptions.model_fields)
    assert CallOptions.model_fields.keys() == {*kernel.CallOptions.model_fields, *OF_PARTS}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_cache", False),
        ("receipt", True),
        ("replay", {"exchanges": []}),
        ("preview", True),
        ("packages", ["humanize"]),
    ],
)
def test_option_of_an_absent_part_is_refused_under_its_name(name: str, value: Any) -> None:
    others = {other: option for other, option in OF_PARTS.items() if other != name}
    with pytest.raises(ValidationError) as refused:
        with_options(others).model_validate({name: value})
    assert [(fault["loc"], fault["type"]) for fault in refused.value.errors()] == [
        ((name,), "extra_forbidden")
    ]
    assert CallOptions.model_validate({name: value}) != CallOptions()  # twin


def test_option_that_options_lack_has_its_default() -> None:
    assert COLOUR.of(CallOptions()) is None
    assert SHADE.of(kernel.CallOptions()) == 1


# -- what is stored -----------------------------------------------------------------------------


def test_stored_options_name_only_parts_that_the_call_needs(added: Callable[..., Any]) -> None:
    model = added(COLOUR, KEPT, SHADE)
    own = kernel.CallOptions().model_dump(mode="json")
    assert stored(model()) == own
    assert stored(model(colour="red", kept=False)) == {**own, "colour": "red", "kept": False}
    assert stored(model(shade=2)) == {**own, "shade": 2}


def test_stored_option_that_nobody_knows_is_named() -> None:
    options, lost = read_stored({"timeout_seconds": 3, "receipt": True, "colour": "red", "a": 1})
    assert (options, lost) == (CallOptions(timeout_seconds=3, receipt=True), ["a", "colour"])
    assert read_stored({"receipt": 3}) == (CallOptions(), ["receipt"])


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the option `packages` away, as without its part."""

    def take_away() -> None:
        others = {name: option for name, option in OF_PARTS.items() if name != "packages"}
        monkeypatch.setattr(call_options, "OF_PARTS", others)
        monkeypatch.setattr(call_options, "CallOptions", with_options(others))

    return take_away


def test_option_that_the_kernel_had_is_missed_only_by_calls_that_have_it(
    without_packages: Callable[[], None],
) -> None:
    """An earlier version stored it with every call."""
    absent, given = {"debug": True, "packages": None}, {"debug": True, "packages": ["humanize"]}
    assert read_stored(absent) == (CallOptions(debug=True), [])
    assert read_stored(given) == (CallOptions(debug=True, packages=["humanize"]), [])
    assert stored(CallOptions(packages=[])) == stored(CallOptions())
    without_packages()
    assert [read_stored(one)[1] for one in (absent, given)] == [[], ["packages"]]
    assert not is_deciding("packages", None)
    assert is_deciding("packages", ["humanize"])


def test_options_that_decide_are_those_of_the_kernel_and_what_parts_or_nobody_here_knows(
    added: Callable[..., Any],
) -> None:
    added(COLOUR, KEPT, SHADE)
    given = [
        ("timeout_seconds", 3), ("colour", "red"), ("kept", False), ("unknown", None),
        ("receipt", True),
    ]  # fmt: skip
    assert all(is_deciding(name, value) for name, value in given)
    twins = [
        ("timeout_seconds", None), ("preview", False), ("debug", True), ("colour", None),
        ("kept", True), ("shade", 2), ("enable_cache", False), ("receipt", False),
    ]  # fmt: skip
    assert not any(is_deciding(name, value) for name, value in twins)


def test_calls_of_a_program_take_over_inherited_options_alone(added: Callable[..., Any]) -> None:
    model = added(COLOUR, SHADE)
    given = {"shade": 2, "colour": "red", "receipt": True, "enable_cache": False}
    assert inherited(model(**given)) == {"shade": 2, "enable_cache": False}
    assert inherited(model()) == {}


@pytest.mark.parametrize(
    ("options", "is_hit"),
    [({}, True), ({"shade": 2}, True), ({"colour": "red"}, False), ({"kept": False}, False)],
)
async def test_result_of_an_equal_call_does_not_answer_one_with_an_option_that_decides(
    home: Path, added: Callable[..., Any], options: dict[str, Any], is_hit: bool
) -> None:
    @tool(sandboxed=False, read_only=True, cacheable=True, description="Look.")
    async def look() -> dict[str, int]:
        return {"seen": 1}

    model = added(COLOUR, KEPT, SHADE)
    async with bench(home, [look]) as made:
        hits = []
        for one in (model(), model(**options)):
            body = kernel.CallBody(options=one)
            cache = (await made.engine.run("look", body, made.engine.owner)).metadata.cache
            hits.append(cache is not None and cache.hit)
    assert hits == [False, is_hit]


# -- stored calls -------------------------------------------------------------------------------

ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def note(ran: list[str]) -> Iterator[Any]:
    @tool(sandboxed=False, dangerous=True, description="Note a text.")
    async def note(text: str) -> dict[str, str]:
        ran.append(text)
        return {"noted": text}

    return note


async def waiting(engine: Engine, options: Any) -> str:
    """Make a call that waits for approval, and return the approval's id."""
    await engine.approvers.add("alice", [Scope.APPROVE], by=ADMIN, now=engine.now())
    body = kernel.CallBody(arguments={"text": "a"}, options=options)
    envelope = await engine.run("note", body, engine.owner)
    assert envelope.error is not None
    assert envelope.error.approval_id is not None, envelope.error.message
    return envelope.error.approval_id


async def answer(engine: Engine, approval_id: str, decision: str) -> Any:
    choice = NewDecision.model_validate({"decision": decision})
    approval = await engine.approvals.decide(approval_id, choice, ALICE, channel="test")
    seen = 0
    while (found := await engine.approvals.answer_of(approval.call_id, engine.owner)) is None:
        seen = await engine.approvals.next_change(seen, within_s=1)
    return found


@pytest.mark.parametrize(
    ("decision", "code"), [("approve", "INVALID_PARAMS"), ("deny", "APPROVAL_DENIED")]
)
async def test_attack_stored_call_never_runs_without_the_option_of_an_absent_part(
    home: Path, added: Callable[..., Any], note: Any, ran: list[str], decision: str, code: str
) -> None:
    async with bench(home, [note]) as made:
        model = added(COLOUR)
        approval_id = await waiting(made.engine, model(colour="red"))
        added()  # the part is gone
        envelope = await answer(made.engine, approval_id, decision)
    assert (envelope.error.code, ran) == (code, [])
    if decision == "approve":
        assert "'colour'" in envelope.error.message
        assert envelope.error.fields == ("options.colour",)


async def test_stored_call_without_the_option_of_an_absent_part_runs(
    home: Path, added: Callable[..., Any], note: Any, ran: list[str]
) -> None:
    async with bench(home, [note]) as made:
        model = added(COLOUR)
        approval_id = await waiting(made.engine, model())
        added()
        assert (await answer(made.engine, approval_id, "approve")).success
    assert ran == ["a"]


@pytest.mark.parametrize("is_absent", [False, True])
async def test_call_stored_by_a_version_whose_kernel_had_the_option_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch, note: Any, ran: list[str],
    without_packages: Callable[[], None], is_absent: bool,
) -> None:  # fmt: skip
    def stored_before(options: Any) -> dict[str, Any]:
        return {**stored(options), "packages": None}

    monkeypatch.setattr("fumehood.approvals.stored_calls.stored_options", stored_before)
    async with bench(home, [note]) as made:
        approval_id = await waiting(made.engine, CallOptions())
        if is_absent:
            without_packages()
        assert (await answer(made.engine, approval_id, "approve")).success
    assert ran == ["a"]


async def test_option_that_decides_makes_it_another_call(
    home: Path, added: Callable[..., Any], note: Any
) -> None:
    model = added(COLOUR, SHADE)
    async with bench(home, [note]) as made:
        first = await waiting(made.engine, model())
        again = [
            (await made.engine.run("note", body, made.engine.owner)).error.approval_id  # type: ignore[union-attr]
            for options in (model(shade=2), model(colour="red"))
            for body in [kernel.CallBody(arguments={"text": "a"}, options=options)]
        ]
        waits = [one.id for one in (await made.engine.approvals.list(ApprovalQuery())).items]
    assert again[0] == first
    assert again[1] != first
    assert len(waits) == 2
