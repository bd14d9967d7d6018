"""The host's end of a container's channel, as the supervisor sees it: frames in, frames out.

Guest side, descriptors 0 and 1. A peer that sends anything but the host's frames is not the host
that this guest was made for, and a peer that does not read is gone: either way the container ends,
and with its first process all others.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from fumehood.guest.container.run import Answer, Pause, Run
from fumehood.guest.core.limits import Limits
from fumehood.guest.core.pipes import write_all
from fumehood.protocol import framing

FRAME_BYTES = 1 << 20
MAX_REQUEST_BYTES = 32 << 20
"""Size limit of a request in parts; the daemon accepts far shorter ones."""

CHUNK_BYTES = 1 << 16
PATIENCE_S = 10.0
"""How long the host may leave a frame unread."""


class Host:
    """Reads the frames of the host and sends frames to it. A fault ends the container."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self._decoder = framing.Decoder(FRAME_BYTES)
        self._parts: list[str] = []
        self._parts_bytes = 0
        self._waiting = b""

    def read(self) -> list[Run | Answer | Pause | int]:
        """The requests since: runs to begin, the ids of those to cancel, and what a run gets."""
        try:
            chunk = os.read(0, CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            end()
        requests: list[Run | Answer | Pause | int] = []
        try:
            for message in self._decoder.feed(chunk):
                self._read_one(message, requests)
        except (framing.FrameError, KeyError, TypeError, ValueError):
            end()
        return requests

    def send(self, message: dict[str, Any], *, more: bool = False) -> None:
        """Send one frame; `more` says that another follows at once, and both go together."""
        self._waiting += framing.encode(message)
        if more and len(self._waiting) < CHUNK_BYTES:
            return
        self.flush()

    def flush(self) -> None:
        """Send the frames that wait for more."""
        data, self._waiting = self._waiting, b""
        try:
            write_all(1, data, PATIENCE_S)
        except OSError:
            end()

    def fail(self, why: str) -> NoReturn:
        """End this container for a reason that the host should log."""
        self.send({"op": "ready", "enforces": {}, "faults": [why[:200]]})
        end()

    def _read_one(
        self, message: dict[str, Any], requests: list[Run | Answer | Pause | int]
    ) -> None:
        match message["op"]:
            case "part":
                self._parts.append(message["text"])
                self._parts_bytes += len(message["text"])
                if self._parts_bytes > MAX_REQUEST_BYTES:
                    raise ValueError("a request is too long")
            case "run":
                requests.append(self._run(message))
            case "cancel":
                requests.append(int(message["id"]))
            case "answer":
                requests.append(self._answer(message))
            case "pause":
                requests.append(Pause(int(message["id"]), message["paused"] is True))

    def _answer(self, message: dict[str, Any]) -> Answer:
        """An answer to a call, which is passed to the child unread."""
        body = "".join([*self._parts, message["text"]]).encode("ascii")
        self._parts, self._parts_bytes = [], 0
        return Answer(int(message["id"]), framing.HEADER.pack(len(body)) + body)

    def _run(self, message: dict[str, Any]) -> Run:
        """A run, whose request is passed to the child unread."""
        if message["program"] == "probe":
            raise ValueError("a probe is not a program for calls")
        if message["arguments"] is None:
            arguments = "".join(self._parts).encode("ascii")
            start = framing.encode({"program": message["program"], "keep": message["keep"]})
            body = start[framing.HEADER.size : -1] + b',"arguments":%s}' % arguments
            request = framing.HEADER.pack(len(body)) + body
        else:
            request = framing.encode(
                {key: message[key] for key in ("program", "keep", "arguments")}
            )
        self._parts, self._parts_bytes = [], 0
        limits = Limits(**message["limits"])
        return Run(
            int(message["id"]),
            message["program"],
            limits,
            request,
            keep=message["keep"] is True,
            live=message["live"] is True,
            thin=message["thin"] is True,
            has_tools=message["tools"] is True,
            quiet=message.get("quiet") is True,
        )


def end() -> NoReturn:
    """The first process of a namespace takes all others with it."""
    os._exit(0)
