"""A guest that misbehaves on purpose: `python bad_guest.py MODE FD`. Speaks on descriptors 0 and 1.

Standard library only. Simulates a guest with a compromised supervisor.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

LIMITS = ("wall_time", "cpu_time", "memory", "output", "processes", "files", "network")


def send(message: object) -> None:
    os.write(1, frame(message))


def receive() -> dict:
    header = read(4)
    return json.loads(read(struct.unpack("!I", header)[0]))


def read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:
            sys.exit(0)
        data += chunk
    return data


def ready(**enforces: bool) -> None:
    send({"op": "ready", "enforces": {**dict.fromkeys(LIMITS, True), **enforces}, "faults": []})


def ended(run_id: int, **fields: object) -> dict:
    ending = {
        "op": "ended", "id": run_id, "ended_by": "ok", "cpu_ms": 0.1,
        "peak_memory_bytes": None, "output_bytes": 10, "exit_code": None, "signal": None,
        "claim": {"result": {"value": 4, "text": "4"}},
    }  # fmt: skip
    return {**ending, **fields}


def main(mode: str) -> None:
    if mode == "never-ready":
        time.sleep(60)
    if mode == "dies-at-once":
        sys.exit(3)
    if mode == "weak":
        ready(memory=False)
        time.sleep(60)
    ready()
    while True:
        message = receive()
        if mode.startswith("lends-"):
            lend_badly(mode.removeprefix("lends-"), message)
        elif message.get("op") == "lend":
            # A guest that lies in its frames has no child to lend: it says that it died.
            send(ended(message["id"], ended_by="sandbox_lost", claim=None))
        else:
            misbehave(mode, message.get("id", 0))


def lend_badly(mode: str, message: dict) -> None:
    """Answer a loan request with a non-child or an invalid child."""
    loan_id = message.get("id", 0)
    if message["op"] == "cancel":
        if mode != "never-buries":
            send(ended(loan_id, ended_by="cancelled", claim=None))
        return
    handover = socket.socket(fileno=os.dup(int(sys.argv[2])))
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    data, descriptors = struct.pack("!qi", loan_id, os.getpid()), [request_write, reply_read]
    if mode == "nothing":
        return
    if mode == "no-descriptors":
        handover.send(data)
        return
    if mode == "one-descriptor":
        descriptors = descriptors[:1]
    elif mode == "files":
        descriptors = [os.open("/dev/null", os.O_RDWR)] * 2
    elif mode == "sockets":
        descriptors = [each.detach() for each in socket.socketpair()]
    elif mode == "short-data":
        data = data[:3]
    elif mode == "other-loan":
        data = struct.pack("!qi", loan_id + 77, os.getpid())
    socket.send_fds(handover, [data], descriptors)
    if mode == "dead-pipes":
        for descriptor in (request_read, request_write, reply_read, reply_write):
            os.close(descriptor)
        send(ended(loan_id, ended_by="signal", claim=None, signal=9))
        return
    os.read(request_read, 65536)
    if mode in GARBLED:
        os.write(reply_write, GARBLED[mode])
    elif mode in ("honest", "answers-twice"):
        results = [{"value": 4, "text": "4"}, {"value": 5, "text": "5"}]
        for result in results if mode == "answers-twice" else results[:1]:
            os.write(reply_write, frame({"result": result}))
    elif mode == "closes":
        os.close(reply_write)
        send(ended(loan_id, ended_by="sandbox_lost", claim=None))


def frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


GARBLED = {
    "garbage": os.urandom(4096),
    "huge-frame": struct.pack("!I", 0xFFFFFFFF) + b"x" * 4096,
    "not-json": struct.pack("!I", 5) + b"hello",
    "deep-json": struct.pack("!I", 1011) + b'{"result":' + b"[" * 500 + b"]" * 500 + b"}",
}
"""Mode → what it sends in place of a frame."""

OTHER = {"claim": {"result": {"value": 5, "text": "5"}}}
ENDINGS: dict[str, list[dict]] = {
    "honest": [{}],
    "extra-field": [{"class": "os.system"}],
    "wrong-type": [{"cpu_ms": "fast"}],
    "unknown-ending": [{"ended_by": "victory"}],
    "ok-without-result": [{"claim": None}],
    "result-of-another-form": [{"claim": {"result": {"value": "<script>", "text": 4}}}],
    "answers-twice": [{}, OTHER],
    "answers-others-first": [{"id": 1_000_000, **OTHER}, {}],
}
"""Mode → the fields of each ending that it sends."""


def misbehave(mode: str, run_id: int) -> None:
    if mode in GARBLED:
        os.write(1, GARBLED[mode])
    elif mode in ENDINGS:
        for fields in ENDINGS[mode]:
            send({**ended(run_id), **fields})
    elif mode == "never-answers":
        time.sleep(60)
    elif mode == "dies":
        sys.exit(3)
    elif mode == "other-op":
        send({"op": "approve", "id": run_id})
    elif mode == "half-a-frame":
        os.write(1, struct.pack("!I", 100) + b"{")
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
