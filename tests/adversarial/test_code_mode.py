"""Code mode's boundary: programs that call tools with hand-made frames.

Programs go through the socket, as an agent's would. Their effects are checked from outside: in the
file written by the dangerous tool, in the list of approvals and in the call log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EndedBy
from support.approving import approving_daemon, ran
from support.attacks import Attack, Harm

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("B3", "S3")]

RAW = """\
import json, os, struct

def send(body):
    data = struct.pack("!I", len(body)) + body
    while data:
        data = data[os.write(4, data):]

def raw(number, tool, arguments, **more):
    call = {"number": number, "tool": tool, "arguments": arguments, **more}
    send(json.dumps({"call": call}).encode())

def take(count):
    data = b""
    while len(data) < count:
        data += os.read(3, count - len(data))
    return data

def answer():
    return json.loads(take(struct.unpack("!I", take(4))[0]))

def code(tool, arguments, number=1, **more):
    raw(number, tool, arguments, **more)
    told = answer()
    return told["error"]["code"] if "error" in told else "OK"

SUM = {"expression": "1+1"}
"""

ONE_CALL = "assert code('calculator', SUM) == 'OK'"

REFUSED = [
    Attack("unlisted-dangerous-tool", Harm.ESCAPE, "code('note', {'text': 'x'})", "TOOL_NOT_FOUND",
           "code('calculator', SUM)"),
    Attack("program-in-a-program", Harm.HOST_DOS, "code('run_python', {'code': '1'})",
           "TOOL_NOT_FOUND", "code('calculator', SUM)"),
    Attack("tool-by-its-version", Harm.ESCAPE, "code('note@1.0.0', {'text': 'x'})",
           "TOOL_NOT_FOUND", "code('calculator', SUM)"),
    Attack("impersonating-another-agent", Harm.LATERAL,
           "code('note', {'text': 'x'}, agent_id='admin', principal='approver:owner')",
           "TOOL_NOT_FOUND", "code('calculator', SUM, agent_id='admin')"),
    Attack("options-among-the-arguments", Harm.LATERAL,
           "code('calculator', {**SUM, 'precision': {'wait_for_approval': True}})",
           "INVALID_PARAMS", "code('calculator', {**SUM, 'precision': 2})"),
    Attack("too-many-concurrent-calls", Harm.PEER_DOS,
           "for n in range(200):\n    raw(n, 'calculator', {'expression': 'comb(9000, 4000) % 7'})\n"
           "codes = [a.get('error', {}).get('code', 'OK') for a in (answer() for _ in range(200))]\n"
           "max(codes, key=lambda code: code != 'OK')",
           "RATE_LIMITED",
           "for n in range(8):\n    raw(n, 'calculator', SUM)\n[answer() for n in range(8)]\n'OK'"),
]  # fmt: skip

ENDED = [
    Attack("frame-of-100-mb", Harm.HOST_DOS,
           "os.write(4, struct.pack('!I', 100 << 20))\nwhile True:\n    os.write(4, bytes(1 << 16))",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("length-of-four-gigabytes", Harm.HOST_DOS,
           "os.write(4, b'\\xff' * 4)\nos.read(3, 1)", "SANDBOX_VIOLATION", ONE_CALL),
    Attack("not-json", Harm.HOST_DOS, "send(b'{')\nos.read(3, 1)", "SANDBOX_VIOLATION", ONE_CALL),
    Attack("too-deep", Harm.HOST_DOS,
           "send(b'{\"call\":' + b'[' * 90 + b']' * 90 + b'}')\nos.read(3, 1)",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("two-tools-in-one-call", Harm.ESCAPE,
           "send(b'{\"call\":{\"number\":1,\"tool\":\"calculator\",\"tool\":\"note\","
           "\"arguments\":{}}}')\nos.read(3, 1)",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("not-a-call", Harm.HOST_DOS, "send(b'{\"call\":5}')\nos.read(3, 1)",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("negative-number", Harm.HOST_DOS, "raw(-1, 'calculator', SUM)\nos.read(3, 1)",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("number-of-100-digits", Harm.HOST_DOS,
           "raw(10**99, 'calculator', SUM)\nos.read(3, 1)", "SANDBOX_VIOLATION", ONE_CALL),
    Attack("overlong-name", Harm.HOST_DOS, "raw(1, 'x' * 300, SUM)\nos.read(3, 1)",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("endless-calls", Harm.PEER_DOS,
           "while True:\n    try:\n        tools.calculator('1')\n    except tools.ToolError:\n        pass",
           "SANDBOX_VIOLATION", "for _ in range(50):\n    tools.calculator('1')"),
    Attack("answers-unread", Harm.HOST_DOS,
           "n = 0\nwhile True:\n    n += 1\n    raw(n, 'calculator', SUM)",
           "SANDBOX_VIOLATION", ONE_CALL),
    Attack("over-its-time-limit", Harm.PEER_DOS,
           "while True:\n    code('calculator', SUM)\n    import time\n    time.sleep(0.2)",
           "TIMEOUT", ONE_CALL),
]  # fmt: skip


@pytest.fixture(scope="module")
def daemon(python_image: Any) -> Iterator[Daemon]:
    """A daemon with an approver, so that a dangerous call that got through would become pending."""
    with approving_daemon() as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


def run(client: Client, code: str, **options: Any) -> Envelope:
    options.setdefault("timeout_seconds", 120)
    arguments = {"code": RAW + code, "tools": options.pop("tools", ["calculator"])}
    return client.call("run_python", arguments, **options)


def require_no_effect(client: Client, daemon: Daemon) -> None:
    """Assert that no dangerous call ran or is pending."""
    assert ran(daemon) == []
    assert client.approvals.list(state="pending").items == ()


@pytest.mark.parametrize("attack", REFUSED, ids=str)
def test_attack_call_frame_is_refused_and_reaches_no_tool(
    attack: Attack, client: Client, daemon: Daemon
) -> None:
    envelope = run(client, attack.code)
    assert envelope.data["value"] == attack.ends
    assert run(client, attack.twin).data["value"] == "OK"
    require_no_effect(client, daemon)


@pytest.mark.parametrize("attack", ENDED, ids=str)
def test_attack_on_tool_channel_ends_the_program(
    attack: Attack, client: Client, daemon: Daemon
) -> None:
    limit = 2 if attack.ends == "TIMEOUT" else 600
    envelope = run(client, attack.code, timeout_seconds=limit)
    assert envelope.error.code == attack.ends
    if attack.name == "endless-calls":
        made = envelope.error.details["tool_calls"]
        assert made["failed"] >= made["made"] - 1000
    assert run(client, attack.twin).success
    require_no_effect(client, daemon)
    calls = [c for c in client.calls(limit=100).items if c.parent_id is not None]
    assert len({c.call_id for c in calls}) == len(calls)


def test_control_program_without_tools_cannot_call_any(client: Client, daemon: Daemon) -> None:
    """The same frames, in a program without a tool channel."""
    code = (
        "raw(1, 'calculator', SUM)\ntry:\n    import tools\nexcept ImportError:\n    print('none')"
    )
    envelope = client.call("run_python", {"code": RAW + code})
    assert envelope.data["stdout"] == "none\n"
    newest = client.calls(limit=1).items[0]
    assert (newest.tool_name, newest.code) == ("run_python", "OK")


def test_forged_ending_and_answer_frames_are_ignored(client: Client) -> None:
    forged = (
        "send(json.dumps({'op': 'answer', 'id': 1, 'text': '{}'}).encode())\n"
        "send(json.dumps({'op': 'ended', 'id': 1, 'ended_by': 'ok'}).encode())\n"
        "code('calculator', SUM)"
    )
    assert run(client, forged).data["value"] == "OK"


@pytest.mark.parametrize("in_session", [False, True])
def test_leftover_child_process_cannot_call_tools_after_program_end(
    in_session: bool, client: Client, daemon: Daemon
) -> None:
    code = (
        "readable, writable = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    n = 0\n"
        "    while True:\n"
        "        n += 1\n"
        "        raw(n, 'calculator', SUM)\n"
        "        answer()\n"
        "        os.write(writable, b'x')\n"
        "len(os.read(readable, 1))"
    )
    options = {"session_id": client.create_session(image="python").id} if in_session else {}
    assert run(client, code, **options).data["value"] == 1  # it has begun
    newest = client.calls(limit=1).items[0].call_id
    twin = run(client, "code('calculator', SUM)", **options)
    assert twin.data["value"] == "OK"
    later = [call.call_id for call in client.calls(limit=3).items]
    assert later[2] == newest
    assert later[1].startswith(f"{later[0]}_") or later[0].startswith(f"{later[1]}_")


def test_tools_and_channel_of_earlier_session_call_are_unusable_later(
    client: Client, daemon: Daemon
) -> None:
    session = client.create_session(image="python").id
    kept = "kept = os.dup(4)\nimport tools as earlier\ncode('calculator', SUM)"
    first = run(client, kept, tools=["calculator", "note"], session_id=session)
    assert first.data["value"] == "OK"
    attack = (
        "try:\n    os.write(kept, b'x')\nexcept BrokenPipeError:\n    print('broken')\n"
        "try:\n    earlier.note(text='x')\nexcept earlier.ToolError as error:\n"
        "    print(error.code)\n"
        "earlier.calculator('2')['value']"  # the twin
    )
    data = run(client, attack, session_id=session).data
    assert (data["stdout"], data["value"]) == ("broken\nTOOL_NOT_FOUND\n", 2)
    require_no_effect(client, daemon)


def test_forked_child_cannot_call_tools(client: Client) -> None:
    code = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        tools.calculator('1')\n"
        "    except tools.ToolError as error:\n"
        "        print(error.code, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "tools.calculator('1')['value']"
    )
    data = run(client, code).data
    assert (data["stdout"], data["value"]) == ("PERMISSION_DENIED\n", 1)


def test_concurrent_threads_each_receive_their_own_answer(client: Client) -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(50) as pool:\n"
        "    found = list(pool.map(lambda n: tools.calculator(f'{n}*2')['value'], range(200)))\n"
        "found == [n * 2 for n in range(200)]"
    )
    assert run(client, code).data["value"] is True


def test_program_timeout_cancels_its_open_tool_call(client: Client) -> None:
    slow = "tools.calculator('pow(7, 10**4200, 10**4200 + 9)')"
    envelope = run(client, slow, timeout_seconds=1)
    assert envelope.error.code == "TIMEOUT"
    codes = {call.tool_name: call.code for call in client.calls(limit=2).items}
    assert codes == {"run_python": "TIMEOUT", "calculator": "CANCELLED"}


def test_program_waiting_for_approval_is_still_subject_to_cpu_limit(
    client: Client, daemon: Daemon
) -> None:
    """The wall clock is paused, so other threads and processes could otherwise compute for free."""
    code = (
        "import threading\n"
        "def spin():\n"
        "    while True:\n"
        "        pass\n"
        "if os.fork() == 0:\n"
        "    spin()\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        "tools.note(text='x')"
    )
    envelope = run(client, code, tools=["note"], timeout_seconds=1, wait_for_approval=True)
    assert envelope.error.code == "TIMEOUT"
    assert envelope.metadata.sandbox.ended_by is EndedBy.CPU_TIME
    assert [one.state for one in client.approvals.list(limit=1).items] == ["cancelled"]
    assert ran(daemon) == []
