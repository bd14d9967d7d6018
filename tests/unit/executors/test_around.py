"""Around a run: parts add to what a program gets and to its outcome, and only make it stricter."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, strategies

from fumehood.call_options import CallOptions
from fumehood.core.call import CallRequest
from fumehood.core.envelope import NetworkReport
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    ExecutionError,
    InternalError,
    PermissionDenied,
    SandboxUnavailable,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.around import Around, Given, HeldBack, Ran, Share
from fumehood.executors.base import CallHandle, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.plan import executor_of
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool, Source
from fumehood.sandbox.streams import Stream, StreamKind
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

pytestmark = pytest.mark.anyio

REPORT = NetworkReport(requests=1, denied=0, held=0, bytes_in=0, bytes_out=0, hosts={})
LIMITS = Limits(30, 30, 256, 1 << 20)
CODE: JsonObject = {"code": "1", "env": [{"name": "MINE", "value": "caller"}]}


class Wall:
    """A lease whose program ends as it is told, and which keeps what it received."""

    queue_ms = 0.0

    def __init__(self, ended_by: EndedBy = EndedBy.OK, *, waits: bool = False) -> None:
        self.ending = RunEnding(ended_by, "call", stdout="out", exit_code=0)
        self.waits = waits
        self.runs: list[tuple[JsonObject, RunSinks]] = []

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        self.runs.append((arguments, sinks))
        try:
            await (anyio.sleep_forever() if self.waits else anyio.lowlevel.checkpoint())
        except BaseException:
            if sinks.ending is not None:
                sinks.ending(self.ending)
            raise
        return self.ending


def around(given: Given | None, left: list[str] | None = None, name: str = "") -> Around:
    @asynccontextmanager
    async def part(run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        yield given
        if left is not None:
            left.append(name)

    return part


async def run(
    wall: Wall, *parts: Around, handle: CallHandle | None = None, **fields: Any
) -> Outcome:
    tool = ToolDefinition(name="t", description="d", type="BUILTIN", executor="code:python")
    unused: Any = None  # no file comes back
    options = CallOptions(**fields.pop("options", {}))
    arguments = {**CODE, **fields.pop("arguments", {})}
    request = CallRequest("t", arguments, options, None, "call_1", "trace_1")
    return await executor_of(tool).run(
        ToolRun(
            RegisteredTool(tool, Source.BUILTIN, unused, None), arguments, LIMITS, wall,
            TrustDomain("ann", None, None), handle or CallHandle(), unused, unused, Redactor(),
            request, around=parts, **fields,
        )
    )  # fmt: skip


def stream_of(kind: str) -> Stream[Any]:
    """A stream that no wall opens."""
    return Stream(StreamKind(kind), lambda port: None)


def variables(arguments: JsonObject) -> dict[str, str]:
    """The program's variables: of a name that is there twice, the last one counts."""
    return {one["name"]: one["value"] for one in arguments["env"]}


# -- what a part adds ---------------------------------------------------------------------------


async def test_part_adds_variables_arguments_sinks_and_a_share_of_the_outcome() -> None:
    wall, seen = Wall(), list[Ran]()
    stream = stream_of("network")

    def share(ran: Ran) -> Share:
        seen.append(ran)
        return Share(
            fields={"more": 1}, warnings=("told",), sandbox={"network": REPORT}, kept="kept"
        )

    given = Given(
        arguments={"tools": []}, environment={"OWN": "part"}, streams=(stream,), share=share
    )
    outcome = await run(wall, around(given))
    ((arguments, sinks),) = wall.runs
    assert variables(arguments).items() >= {"OWN": "part", "MINE": "caller"}.items()
    assert (arguments["tools"], arguments["code"], sinks.streams) == ([], "1", (stream,))
    assert [ran.ending for ran in seen] == [wall.ending]
    assert outcome.data["more"] == 1
    assert (outcome.warnings[-1], outcome.kept) == ("told", ("kept",))
    assert outcome.sandbox == {"network": REPORT}


async def test_part_that_holds_an_effect_back_runs_the_program_and_makes_the_outcome() -> None:
    own, other, seen = Wall(), Wall(), list[bool]()
    action: Any = object()

    async def conclude(outcome: Outcome, held_back: Sequence[HeldBack]) -> Outcome:
        return replace(outcome, held=list(held_back))

    @asynccontextmanager
    async def acts(run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given]:
        seen.extend(one.holds_back for one in before)
        yield Given(share=lambda ran: Share(held_back=action))

    outcome = await run(own, around(Given(lease=other, holds_back=True, conclude=conclude)), acts)
    assert (len(own.runs), len(other.runs), seen) == (0, 1, [True])
    assert outcome.held == [action]
    assert (await run(own)).held is None  # twin
    for twice in (Given(lease=other), Given(conclude=conclude)):
        with pytest.raises(InternalError):
            await run(own, around(twice), around(twice))


async def test_parts_are_left_in_the_reverse_order_and_see_what_earlier_ones_give() -> None:
    left, seen = list[str](), list[Any]()

    @asynccontextmanager
    async def last(run: ToolRun, before: Sequence[Given]) -> AsyncIterator[None]:
        seen.extend(one.offer for one in before)
        yield None
        left.append("last")

    await run(Wall(), around(Given(offer=1), left, "a"), around(None, left, "b"), last)
    assert seen == [1]
    assert left == ["last", "b", "a"]


async def test_calls_of_the_program_end_before_the_parts_are_left() -> None:
    left = list[str]()

    class Calls:
        async def close(self) -> None:
            left.append("calls")

    await run(Wall(), around(None, left, "part"), calls=Calls())
    assert left == ["calls", "part"]


async def test_part_that_cancels_its_scope_ends_the_program_by_policy() -> None:
    scope = anyio.CancelScope()
    scope.cancel()
    outcome = await run(Wall(waits=True), around(Given(scope=scope)))
    assert (outcome.ended_by, outcome.data) == (EndedBy.POLICY, None)
    assert outcome.error is not None


async def test_partial_outcome_of_a_cancelled_run_has_the_share() -> None:
    handle, wall = CallHandle(), Wall(waits=True)
    share = Share(fields={"more": 1}, fault=lambda fields: ExecutionError("another"), kept="kept")
    part = around(Given(share=lambda ran: share))
    handle.is_cancelled = True
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run(wall, part, handle=handle)
    assert handle.partial is not None
    assert handle.partial.error is not None
    assert (handle.partial.ended_by, handle.partial.error.code) == (EndedBy.CANCELLED, "CANCELLED")
    assert handle.partial.error.details is not None
    assert handle.partial.error.details["more"] == 1
    assert handle.partial.kept == ()  # so that no part answers for it, such as with a receipt


# -- what a run needs ---------------------------------------------------------------------------

ASKED: dict[str, dict[str, Any]] = {
    "network": {"network": ("api.example.test",)},
    "tools": {"arguments": {"tools": ["calculator"]}},
}


@pytest.mark.parametrize("name", ASKED)
async def test_attack_run_without_the_part_that_it_needs_does_not_begin(name: str) -> None:
    others = frozenset({"network", "tools"} - {name})
    wall = Wall()
    with pytest.raises(SandboxUnavailable, match=name) as refused:
        await run(wall, around(Given(needs=others)), **ASKED[name])
    assert (wall.runs, refused.value.may_retry) == ([], False)
    twin = await run(wall, around(Given(needs=frozenset({name}))), **ASKED[name])
    assert twin.error is None


async def test_run_that_two_parts_give_streams_of_one_kind_does_not_begin() -> None:
    wall = Wall()
    one, two = stream_of("network"), stream_of("calls")
    with pytest.raises(InternalError):
        await run(
            wall, around(Given(streams=(one,))), around(Given(streams=(two, stream_of("network"))))
        )
    assert wall.runs == []
    await run(wall, around(Given(streams=(one,))), around(Given(streams=(two,))))  # the twin
    ((_, sinks),) = wall.runs
    assert sinks.streams == (one, two)


async def test_part_can_refuse_a_run() -> None:
    @asynccontextmanager
    async def refuses(run: ToolRun, before: Sequence[Given]) -> AsyncIterator[None]:
        raise PermissionDenied("no")
        yield

    wall, left = Wall(), list[str]()
    with pytest.raises(PermissionDenied):
        await run(wall, around(None, left, "earlier"), refuses)
    assert wall.runs == []


# -- a part can only make a run stricter ----------------------------------------------------------

_names = strategies.sampled_from(["TRACEPARENT", "MINE", "OWN", "HTTP_PROXY"])
_keys = strategies.sampled_from(["code", "stdin", "files", "tools", "more"])
_fields = strategies.sampled_from(
    ["ended_by", "exit_code", "stdout", "stderr", "value", "files", "more"]
)
_texts = strategies.sampled_from(["", "ok", "part"])
_kinds = strategies.sampled_from(["network", "calls", "more"])


def failed(fields: JsonObject) -> EngineError:
    return ExecutionError("part", details=fields)


_options = strategies.fixed_dictionaries(
    {},
    optional={
        "enable_cache": strategies.booleans(),
        "receipt": strategies.booleans(),
        "replay": strategies.none() | strategies.just({"exchanges": []}),
    },
)
"""Options of parts: the kernel does nothing with them."""

_shares = strategies.builds(
    Share,
    fields=strategies.dictionaries(_fields, _texts),
    fault=strategies.sampled_from([None, None, None, failed]),
    warnings=strategies.just(()) | strategies.just(("told",)),
    kept=strategies.none() | strategies.just("kept"),
)


@strategies.composite
def _parts(draw: Callable[..., Any]) -> Around:
    """A random part: what it gives, what it adds afterwards, and where it fails."""
    share, cuts = draw(_shares), draw(strategies.sampled_from([False, False, False, True]))
    fails = draw(
        strategies.sampled_from(["", "", "", "", "", "before", "after", "share", "suppresses"])
    )

    def shared(ran: Ran) -> Share:
        if fails == "share":
            raise ValueError("a bug of the part")
        return share  # type: ignore[no-any-return]

    given = Given(
        needs=frozenset(draw(strategies.sets(strategies.sampled_from(["network", "tools"])))),
        arguments=draw(strategies.dictionaries(_keys, _texts)),
        environment=draw(strategies.dictionaries(_names, _texts)),
        streams=tuple(map(stream_of, draw(strategies.sets(_kinds)))),
        with_digests=draw(strategies.booleans()),
        share=shared,
    )

    @asynccontextmanager
    async def part(run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        if fails == "before":
            raise PermissionDenied("part")
        scope = anyio.CancelScope()
        if cuts:
            scope.cancel()
        try:
            yield replace(given, scope=scope)
        except BaseException:
            if fails != "suppresses":
                raise
        if fails == "after":
            raise InternalError("part")

    return part


async def tried(
    ended_by: EndedBy,
    parts: Sequence[Callable[..., AbstractAsyncContextManager[Any]]],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Wall, Outcome | Exception]:
    wall = Wall(ended_by)
    try:
        return wall, await run(wall, *parts, options=options)
    except (EngineError, ValueError) as error:
        return wall, error


ENDINGS = [one for one in EndedBy if one is not EndedBy.CANCELLED]


@given(
    ended_by=strategies.just(EndedBy.OK) | strategies.sampled_from(ENDINGS),
    parts=strategies.lists(_parts(), min_size=1, max_size=3),
    options=_options,
)
def test_random_parts_never_make_a_run_more_permissive(
    ended_by: EndedBy, parts: list[Around], options: dict[str, Any]
) -> None:
    async def compare() -> None:
        bare, without = await tried(ended_by, ())
        optional, with_options = await tried(ended_by, (), options)
        assert isinstance(with_options, Outcome)
        assert with_options.data == without.data
        assert with_options.ended_by is without.ended_by
        assert optional.runs[0][0] == bare.runs[0][0]
        wall, outcome = await tried(ended_by, parts, options)
        assert isinstance(without, Outcome)
        if isinstance(outcome, Outcome):
            if without.error is not None:
                assert outcome.error is not None
                assert outcome.data is None
            if outcome.ended_by is not without.ended_by:  # a part has ended the program
                assert outcome.ended_by is EndedBy.POLICY
                assert outcome.error is not None
            if outcome.error is None:
                assert outcome.data.items() >= without.data.items()
            assert set(without.warnings) <= set(outcome.warnings)
        assert len(wall.runs) <= len(bare.runs) == 1
        for arguments, sinks in wall.runs:
            own_arguments, own_sinks = bare.runs[0]
            assert arguments.items() >= {**own_arguments, "env": arguments["env"]}.items()
            assert variables(arguments).items() >= variables(own_arguments).items()
            for name in ("files", "output", "ending", "progress"):
                assert type(getattr(sinks, name)) is type(getattr(own_sinks, name))
            assert sinks.trial is own_sinks.trial

    anyio.run(compare)


async def test_attack_part_that_suppresses_an_error_has_its_run_fail_anyway() -> None:
    @asynccontextmanager
    async def suppresses(run: ToolRun, before: Sequence[Given]) -> AsyncIterator[None]:
        with contextlib.suppress(BaseException):
            yield None

    class Broken(Wall):
        async def run(self, *given: Any, **more: Any) -> RunEnding:
            raise SandboxUnavailable("the wall broke")

    with pytest.raises(SandboxUnavailable, match="the wall broke"):
        await run(Broken(), suppresses)
    with pytest.raises(SandboxUnavailable, match="network"):
        await run(Wall(), suppresses, network=("api.example.test",))
