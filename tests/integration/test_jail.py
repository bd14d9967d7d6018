"""Sandboxed functions through the engine: arguments, results, errors, limits, endings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fumehood import Config, Engine
from support import jailed_tools
from support.answers import code_of, details_of, error_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("landlock")]

TESTS = Path(__file__).parents[1]
TOOLS = [
    jailed_tools.run_code, jailed_tools.run_in_little_memory, jailed_tools.add,
    jailed_tools.wait_and_double, jailed_tools.find_city, jailed_tools.costly,
    jailed_tools.report, jailed_tools.fail_below,
]  # fmt: skip


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """One shared engine, because each call has its own process."""
    config = Config(home=tmp_path_factory.mktemp("home"))
    async with Engine(tools=TOOLS, config=config) as running:
        yield running


async def test_asynchronous_function_is_awaited(engine: Engine) -> None:
    assert (await engine.call("wait_and_double", {"number": 21})).data == {"value": 42}


@pytest.mark.row("E1")
async def test_exception_reports_a_traceback_of_the_tools_own_modules_only(
    engine: Engine,
) -> None:
    envelope = await engine.call("fail_below")
    assert code_of(envelope) == "EXECUTION_ERROR"
    assert details_of(envelope)["type"] == "LookupError"
    assert [frame.split(" in ")[1] for frame in details_of(envelope)["traceback"]] == [
        "fail_below",
        "_fail",
    ]
    assert details_of(envelope)["message"] == "nothing in support/data"
    assert str(TESTS) not in envelope.model_dump_json()


async def test_jail_calls_share_no_module_state(engine: Engine) -> None:
    poison = "import builtins, fumehood; builtins.canary = 1; fumehood.canary = 2; out = 'done'"
    assert (await engine.call("run_code", {"code": poison})).data == {"value": "done"}
    look = "import builtins, fumehood; out = [hasattr(m, 'canary') for m in (builtins, fumehood)]"
    assert (await engine.call("run_code", {"code": look})).data == {"value": [False, False]}


FITS = {
    "nothing": ("pass", {"value": None}),
    "a-date": ("import datetime; out = datetime.date(2026, 1, 1)", {"value": "2026-01-01"}),
    "an-object": ("out = {'a': [1, 2.5, None, True, 'ü']}", {"a": [1, 2.5, None, True, "ü"]}),
    "a-decimal": ("import decimal; out = decimal.Decimal('1.5')", {"value": "1.5"}),
    "an-extension-module": (
        "import sqlite3, ssl, zlib\nout = sqlite3.connect(':memory:').execute('select 2').fetchone()[0]",
        {"value": 2},
    ),
    "a-time-zone": (
        "import zoneinfo; out = str(zoneinfo.ZoneInfo('Europe/Oslo'))",
        {"value": "Europe/Oslo"},
    ),
}


@pytest.mark.parametrize("name", FITS)
async def test_ordinary_function_works_in_the_jail(engine: Engine, name: str) -> None:
    code, data = FITS[name]
    envelope = await engine.call("run_code", {"code": code})
    assert envelope.error is None
    assert envelope.data == data


@pytest.mark.row("S4")
async def test_reached_time_memory_or_output_limit_is_reported(engine: Engine) -> None:
    slow = await engine.call("run_code", {"code": "while True: pass"}, timeout_seconds=0.2)
    assert error_of(slow).details == {"ended_by": "wall_time", "limit": {"timeout_seconds": 0.2}}
    large = await engine.call("run_in_little_memory", {"code": "out = len(bytearray(100 << 20))"})
    assert code_of(large) == "MEMORY_LIMIT_EXCEEDED"
    assert error_of(large).details == {"ended_by": "memory", "limit": {"memory_mb": 64}}
    fits = await engine.call("run_in_little_memory", {"code": "out = len(bytearray(20 << 20))"})
    assert fits.data == {"value": 20 << 20}
    long = await engine.call("run_code", {"code": "out = 'x' * (3 << 20)"})
    assert code_of(long) == "OUTPUT_LIMIT_EXCEEDED"
