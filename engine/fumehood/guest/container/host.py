"""The supervisor's channel to the host: receives requests, and sends frames about runs.

Guest side, descriptors 0 and 1. A peer that sends invalid frames is not the host, and a peer that
does not read counts as gone. In both cases the container ends, with all its processes. There is one
exception: if the host of a session's container is gone, the container waits for another host.
Everything that is reported about a run, except the program's claim, was measured or decided outside
the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NoReturn

from fumehood.guest.container import processes
from fumehood.guest.container.chain import Chain
from fumehood.guest.container.meter import Meter
from fumehood.guest.container.prefork_pool import Stream
from fumehood.guest.container.run import (
    Keep,
    Run,
    claimed_exit,
    claimed_limits,
    ending_of,
)
from fumehood.guest.core import pipes
from fumehood.guest.core.children import decode_status
from fumehood.guest.core.limits import Limits
from fumehood.guest.core.pipes import CHUNK_BYTES, write_all
from fumehood.protocol import framing
from fumehood.protocol.streams import STREAM_START, StreamFrame

PATIENCE_S = 30.0
"""Maximum seconds for which the host may leave a frame unread. After that, the host counts as gone,
and the run in progress is rolled back. A host that takes over a container waits longer than this.
"""


Request = Run | StreamFrame | dict[str, Any]
"""A frame from the host. If it is a dictionary, its `op` says what it requests, and it concerns a
run, the session or the session's registered processes.
"""


class Host:
    """Receives frames from the host and sends frames to it. If the host sends an invalid frame, the
    container ends.

    If the channel is closed, the container also ends, unless it belongs to a session. In a session,
    `is_gone` is set, and frames are dropped until `use` sets the channel of the next host.
    """

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self.keep: Keep | None = None
        self.is_gone = False
        self._decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
        self._parts: list[str] = []
        self._waiting = b""

    def use(self, readable: int, writable: int) -> int:
        """Replace the channel by the descriptors `readable` and `writable`, which get the numbers 0
        and 1.

        Return a descriptor of the channel to the former host. As soon as it is writable, the caller
        must pass it to `dismiss`.
        """
        former = os.dup(1)
        for descriptor, own in ((readable, 0), (writable, 1)):
            os.dup2(descriptor, own)
            os.close(descriptor)
        os.set_blocking(0, False)
        self.is_gone = False
        self._decoder = framing.Decoder(framing.MAX_REQUEST_BYTES)
        self._parts, self._waiting = [], b""
        return former

    def read(self) -> list[Request]:
        """Read the bytes that the host has sent, and return the requests that are complete. Do not
        wait.
        """
        try:
            chunk = os.read(0, CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self._lose()
            return []
        requests: list[Request] = []
        try:
            for body in self._decoder.bodies(chunk):
                if body.startswith(STREAM_START):
                    requests.append(StreamFrame.parse(body))
                else:
                    self._read_one(framing.parse_body(body), requests)
        except (framing.FrameError, KeyError, TypeError, ValueError):
            end()
        return requests

    def send(self, message: dict[str, Any], *, more: bool = False) -> None:
        """Send one frame. If `more` is True, the frame may be held back and sent with the next
        frame.
        """
        self._waiting += framing.encode(message)
        if more and len(self._waiting) < CHUNK_BYTES:
            return
        self.flush()

    def send_frame(self, frame: StreamFrame) -> None:
        """Send one frame of a stream."""
        self._waiting += frame.encode()
        self.flush()

    def flush(self) -> None:
        """Send the frames that were held back."""
        data, self._waiting = self._waiting, b""
        if self.is_gone:
            return
        try:
            write_all(1, data, PATIENCE_S)
        except OSError:
            self._lose()

    def ready(
        self,
        enforces: dict[str, bool],
        faults: list[str],
        streams: list[str],
        watched: list[str],
    ) -> None:
        """Report that the container is ready. `enforces` says for each limit whether it holds,
        `faults` are the reasons why the container is unusable, if any, and `streams` are the kinds
        of streams that it supports. `watched` are the limits that the guest enforces by looking at
        them from time to time.
        """
        words = {"enforces": enforces, "faults": faults, "streams": streams, "watched": watched}
        self.send({"op": "ready", **words})

    def fail(self, why: str) -> NoReturn:
        """Report `why` to the host as the container's fault, and end this container."""
        self.ready({}, [why[:200]], [], [])
        end()

    @staticmethod
    def dismiss(former: int) -> None:
        """Make the former host give up this container, by sending it a frame that a host does not
        expect.

        `former` is the descriptor of the channel to that host. It is closed afterwards.
        """
        # Closing `former` alone would not inform the host, because a zygote still has its standard
        # error open on the same channel.
        with contextlib.suppress(OSError):
            os.write(former, framing.encode({"op": "ready", "enforces": {}, "faults": []}))
        os.close(former)

    def _lose(self) -> None:
        if self.keep is None:
            end()
        self.is_gone = True

    def _read_one(self, message: dict[str, Any], requests: list[Request]) -> None:
        match message["op"]:
            case "part":
                self._parts.append(message["text"])
            case "run":
                requests.append(self._run(message))
            case _:
                requests.append(message)

    def _run(self, message: dict[str, Any]) -> Run:
        """Return the run that `message` requests. It contains the encoded request frame for the
        child.

        If the arguments arrived in parts, they are joined without being parsed.
        """
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
        self._parts = []
        limits = Limits(**message["limits"])
        return Run(
            int(message["id"]),
            message["program"],
            limits,
            bytearray(request),
            keep=message["keep"] is True,
            live=message["live"] is True,
            thin=message["thin"] is True,
            streams=message.get("streams") or {},
            quiet=message.get("quiet") is True,
            trial=message.get("trial"),
        )


def end() -> NoReturn:
    """End the container, by ending this process: the kernel then kills all other processes. If the
    host gives no namespaces, the warden does.
    """
    os._exit(0)


class Reporter:
    """Sends the frames that report a run to the host."""

    def __init__(self, host: Host, meter: Meter, chain: Chain, zygote_pid: int) -> None:
        self.zygote_pid = zygote_pid
        """Process id of the zygote from which the process with a session's variables descends."""
        self._host = host
        self._meter = meter
        self._chain = chain

    def output(self, run: Run, stream: Stream, *, last: bool = False) -> None:
        """Send the new text of one of a run's output streams. If the host that began the run is
        gone, do nothing.

        If `last` is True, no more text follows.
        """
        if run.is_left:
            return
        for text in stream.take(last=last):
            frame = {"op": "output", "id": run.id, "stream": stream.name, "text": text}
            self._host.send(frame, more=True)
        if not last:
            self._host.flush()

    def progress(self, run: Run, claim: Any) -> None:
        """Forward the program's progress report `claim`, unless `MAX_REPORTS` reports of the run
        were already forwarded.
        """
        report = pipes.read_report(claim)
        run.reports += 1
        if run.live and run.child is not None:
            for stream in (run.child.stdout, run.child.stderr):  # text printed before the report
                stream.read(run.limits.output_bytes)
                self.output(run, stream)
        if report is not None and run.reports <= framing.MAX_REPORTS:
            self._host.send({"op": "progress", "id": run.id, **report})

    def ended(self, run: Run, files_left_out: int, state: str | None) -> None:
        """Send the ending of a run to the host. The caller must ensure that no process of the run
        is alive.

        `files_left_out` is the number of the run's files that were not sent. `state` is the state
        of the session's variables, or None if the run could not change them.
        """
        out_of_memory = self._meter.is_out_of_memory(run)
        exit_code, signal_number = self._status(run)
        cpu_ms = self._meter.cpu_ms(run)
        ended_by, claim = ending_of(
            run, exit_code, signal_number, out_of_memory=out_of_memory, cpu_ms=cpu_ms
        )
        hit = run.limits_hit | claimed_limits(run)
        if out_of_memory and ended_by != "memory":
            hit.add("memory")
        if self._meter.has_refused_processes(run):
            hit.add("processes")
        if signal_number == signal.SIGXFSZ:
            hit.add("file_size")
        stdout_bytes = stderr_bytes = 0
        if run.child is not None:
            for stream in (run.child.stdout, run.child.stderr):
                self.output(run, stream, last=True)
            stdout_bytes = run.child.stdout.received_bytes
            stderr_bytes = run.child.stderr.received_bytes
        self._host.send(
            {
                "op": "ended",
                "id": run.id,
                "ended_by": ended_by,
                "cpu_ms": cpu_ms,
                "peak_memory_bytes": self._meter.peak_bytes(run, ended_by=ended_by),
                "stdout_bytes": stdout_bytes,
                "stderr_bytes": stderr_bytes,
                "exit_code": exit_code,
                "signal": signal_number,
                "limits_hit": sorted(hit),
                "files_left_out": files_left_out,
                "state": state,
                "variables_bytes": self._variables_bytes(state),
                "claim": claim,
            },
            # If cleaning takes no time, its outcome is sent together with this frame.
            more=True,
        )

    def _status(self, run: Run) -> tuple[int | None, int | None]:
        if run.stayed and run.killed_for is None:
            return claimed_exit(run), None
        return decode_status(run.status) if run.status is not None else (None, None)

    def _variables_bytes(self, state: str | None) -> int | None:
        """Return the memory in bytes that a session's variables need: the memory of the process
        that holds them, minus that of its zygote.

        `state` is the state of the variables. Return None if `state` is None, if there is no such
        process, or if its memory is unknown.
        """
        first = self._chain.first
        if state is None or first is None:
            return None
        held, begun_with = processes.memory_bytes(first), processes.memory_bytes(self.zygote_pid)
        return None if held is None or begun_with is None else max(0, held - begun_with)
