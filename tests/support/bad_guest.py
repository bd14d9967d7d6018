"""A guest that misbehaves on purpose: `python bad_guest.py MODE`. Speaks on descriptors 0 and 1.

Standard library only; it stands in for a guest whose supervisor was taken over.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time

LIMITS = ("wall_time", "cpu_time", "memory", "output", "processes", "files", "network")


def send(message: object) -> None:
    body = json.dumps(message).encode()
    os.write(1, struct.pack("!I", len(body)) + body)


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
        "op": "ended", "id": run_id, "ended_by": "ok", "isolation": "call", "cpu_ms": 0.1,
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
        run_id = receive().get("id", 0)
        misbehave(mode, run_id)


def misbehave(mode: str, run_id: int) -> None:
    if mode == "honest":
        send(ended(run_id))
    elif mode == "never-answers":
        time.sleep(60)
    elif mode == "dies":
        sys.exit(3)
    elif mode == "garbage":
        os.write(1, os.urandom(4096))
    elif mode == "huge-frame":
        os.write(1, struct.pack("!I", 0xFFFFFFFF) + b"x" * 65536)
    elif mode == "not-json":
        os.write(1, struct.pack("!I", 5) + b"hello")
    elif mode == "deep-json":
        body = b"[" * 5000 + b"]" * 5000
        os.write(1, struct.pack("!I", len(body)) + body)
    elif mode == "other-op":
        send({"op": "approve", "id": run_id})
    elif mode == "extra-field":
        send({**ended(run_id), "class": "os.system"})
    elif mode == "wrong-type":
        send(ended(run_id, cpu_ms="fast"))
    elif mode == "unknown-ending":
        send(ended(run_id, ended_by="victory"))
    elif mode == "ok-without-result":
        send(ended(run_id, claim=None))
    elif mode == "result-of-another-form":
        send(ended(run_id, claim={"result": {"value": "<script>", "text": 4}}))
    elif mode == "answers-twice":
        send(ended(run_id))
        send(ended(run_id, claim={"result": {"value": 5, "text": "5"}}))
    elif mode == "answers-others-first":
        send(ended(run_id + 1000, claim={"result": {"value": 5, "text": "5"}}))
        send(ended(run_id))
    elif mode == "half-a-frame":
        os.write(1, struct.pack("!I", 100) + b"{")
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
