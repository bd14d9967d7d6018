"""Inputs whose cost could grow with the product of two of their sizes, and all others that are long.

None may keep a daemon's event loop busy: beside each of them a client asks for the daemon's health,
as beside every other attack (`conftest`). They come from callers, from services and from programs.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import running_daemon
from fumehood import Client, Envelope
from support.definition_files import definition_directory
from support.health import LONGEST_WAIT_S, Health
from support.wait import wait_until
from upstream import Reply, Upstream, running_upstream

pytestmark = [pytest.mark.row("S3", "E8")]

SECRET = "s3cret-of-a-tool/1"
KEY = "ghp_" + "a" * 36
ANYTHING: dict[str, Any] = {"type": "array"}
ARRAYS = {
    "free": ANYTHING,
    "numbers": {"type": "array", "items": {"type": "integer"}},
    "objects": {
        "type": "array",
        "items": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
    "unique": {"type": "array", "uniqueItems": True},
    "matching": {"type": "array", "items": {"type": "string", "pattern": "^(a|a)*$"}},
}


def tool(name: str, upstream: Upstream, **fields: Any) -> dict[str, Any]:
    return {
        "name": name, "type": "REST", "description": "Ask.", "method": "POST",
        "endpoint": f"{upstream.url}/{name}",
        "headers": {"authorization": "Bearer ${secret:key}"}, **fields,
    }  # fmt: skip


@dataclass(frozen=True)
class House:
    client: Client
    upstream: Upstream


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with running_upstream() as upstream, definition_directory() as definitions:
        taking = tool("take", upstream, parameters={"properties": ARRAYS})
        listing = tool(
            "list", upstream, parameters={"properties": {}}, response={"items": "/items"}
        )
        asking = tool("ask", upstream, parameters={"properties": {}})
        relaying = tool("relay", upstream, parameters={"properties": {}}, streaming=True)
        for one in (taking, listing, asking, relaying):
            definitions.put(f"{one['name']}.json", one)
        secrets = {
            "key": {"env": "KEY", "hosts": ["127.0.0.1"], "tools": ["take", "list", "ask", "relay"]}
        }
        with (
            running_daemon(
                {"KEY": SECRET},
                tools_directory=str(definitions.path),
                secrets=json.dumps(secrets),
                rest__allowed_hosts=json.dumps(["127.0.0.1"]),
            ) as daemon,
            Client(daemon.socket) as client,
        ):
            yield House(client, upstream)


PRIVATE_KEY = "-----BEGIN PRIVATE KEY-----\n"
TAKEN: dict[str, tuple[dict[str, Any], str | None]] = {
    "many-almost-keys": ({"free": ["sk-aa"] * 800_000}, None),
    "many-keys": ({"free": [KEY] * 180_000}, None),
    "text-of-keys": ({"free": [f"{KEY} " * 180_000]}, None),
    "nested": ({"free": [[[[[["a"]]]]]] * 200_000}, None),
    "numbers": ({"numbers": list(range(900_000))}, "INVALID_PARAMS"),
    "objects": ({"objects": [{"a": 1}] * 700_000}, "INVALID_PARAMS"),
    "unique": ({"unique": [{"a": number} for number in range(50_000)]}, None),
    "unique-lists": ({"unique": [[number] for number in range(90_000)]}, None),
    "matching": ({"matching": ["a" * 40] * 90_000}, None),
    "matching-long": ({"matching": ["a" * 7_000_000]}, None),
    "names": ({f"x{number}": number for number in range(400_000)}, "INVALID_PARAMS"),
}
"""Arguments that a caller sends, as long as a request may be, and the code of the answer."""

ANSWERED = {
    "many-texts": json.dumps({"items": ["aaaaaaaa"] * 80_000}),
    "many-secrets": json.dumps({"items": [SECRET] * 40_000}),
    "many-almost-keys": json.dumps({"items": ["sk-aa"] * 100_000}),
    "many-names": json.dumps({"items": [], **{f"{SECRET}{n}": 1 for n in range(30_000)}}),
    "numbers": json.dumps({"items": list(range(120_000))}),
    "text-of-secrets": json.dumps({"items": [SECRET * 50_000]}),
    "text-of-beginnings": json.dumps({"items": [SECRET[:-1] * 50_000]}),
    "text-of-keys": json.dumps({"items": [f"{KEY} " * 24_000]}),
}
"""Bodies of answers, as long as they may be."""

NO_JSON = {"private-keys": PRIVATE_KEY * 30_000, "nested": "[" * 500_000}

TINY_PIECES = f"""
import os
os.write(1, {PRIVATE_KEY!r}.encode() + b"a" * 15_000)
for _ in range(60_000): os.write(1, b"a")
"""
PROGRAMS: dict[str, tuple[str, str | None]] = {
    "tiny-pieces-of-a-key": (TINY_PIECES, None),
    "many-almost-keys": ("['sk-aa'] * 110_000", None),
    "text-of-keys": (f"'{KEY} ' * 24_000", None),
    "printed-keys": (f"print('{KEY} ' * 24_000)", None),
    "message-of-keys": (f"raise ValueError('{KEY} ' * 24_000)", "EXECUTION_ERROR"),
    "many-files": ("for n in range(60): open(f'f{n}', 'w').write('sk-aa ' * 100_000)", None),
}


def code(answer: Envelope) -> str | None:
    return answer.error.code if answer.error is not None else None


@pytest.mark.parametrize(("arguments", "ends"), TAKEN.values(), ids=TAKEN)
def test_attack_long_arguments_keep_nobody_waiting(
    house: House, arguments: Mapping[str, Any], ends: str | None
) -> None:
    """Twin: short ones of each kind, last."""
    house.upstream.script("/take", Reply(body=b'{"took": true}'))
    assert code(house.client.call("take", arguments)) == ends
    for name in arguments.keys() & ARRAYS:
        assert house.client.call("take", {name: arguments[name][:1]}).data == {"took": True}


@pytest.mark.parametrize("name", ["ask", "list", "relay"])
@pytest.mark.parametrize("body", ANSWERED.values(), ids=ANSWERED)
def test_attack_long_answer_of_a_service_keeps_nobody_waiting(
    house: House, name: str, body: str
) -> None:
    house.upstream.script(f"/{name}", Reply(body=body.encode()))
    answer = house.client.call(name)
    assert code(answer) is None
    assert SECRET not in str(answer)


@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
def test_attack_long_answer_that_is_no_json_keeps_nobody_waiting(house: House, body: str) -> None:
    """Twin: as a text it is passed on."""
    for name, ends in (("ask", "EXECUTION_ERROR"), ("list", "EXECUTION_ERROR"), ("relay", None)):
        house.upstream.script(f"/{name}", Reply(body=body.encode()))
        assert code(house.client.call(name)) == ends


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
@pytest.mark.parametrize(("program", "ends"), PROGRAMS.values(), ids=PROGRAMS)
def test_attack_long_output_of_a_program_keeps_nobody_waiting(
    house: House, program: str, ends: str | None
) -> None:
    answer = house.client.call("run_python", {"code": program})
    assert code(answer) == ends
    assert KEY not in str(answer)


# -- controls: what keeps others waiting is found -------------------------------------------


def spin(processor_s: float) -> None:
    """Use this much processor time, however long that takes."""
    until = time.thread_time() + processor_s
    while time.thread_time() < until:
        pass


@pytest.mark.anyio
async def test_control_busy_loop_of_an_engine_in_this_process_is_found(health: Health) -> None:
    spun = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: spun.set_result(spin(2 * LONGEST_WAIT_S)))
    await spun
    assert health.longest_s >= 2 * LONGEST_WAIT_S
    health.longest_s = 0.0


BUSY = """
import os, socket, sys, time
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1] + ".new")
    listener.listen()
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    while True:
        with listener.accept()[0] as connection:
            until = time.process_time() + float(sys.argv[2])
            while time.process_time() < until: pass
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
"""


@pytest.mark.parametrize("busy_s", [2 * LONGEST_WAIT_S, 0.0])
def test_control_busy_loop_of_a_daemon_is_found(
    home: Path, busy_s: float, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: one that answers at once."""
    command = [sys.executable, "-c", BUSY, str(home / "engine.sock"), str(busy_s)]
    health.limit_s = math.inf
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: (home / "engine.sock").exists())
            monkeypatch.setattr("support.health.DAEMONS", [(process, home / "engine.sock")])
            # The first answer may have cost nothing: the process waits a second time for its turn.
            wait_until(lambda: health.longest_s >= LONGEST_WAIT_S if busy_s else health.what)
        finally:
            process.kill()
    assert (health.longest_s >= LONGEST_WAIT_S) is (busy_s > 0)
