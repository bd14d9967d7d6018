"""The frames about a run: its output and progress meanwhile, its ending, its figures.

Guest side, used by the supervisor. All but the claim was measured or decided outside the program.
"""

from __future__ import annotations

import signal
from typing import Any

from fumehood.guest.container import processes
from fumehood.guest.container.chain import Chain
from fumehood.guest.container.host import Host
from fumehood.guest.container.meter import Meter
from fumehood.guest.container.run import Run, claimed_exit, claimed_limits, ending_of
from fumehood.guest.container.stream import Stream
from fumehood.guest.core import progress
from fumehood.guest.core.endings import decode_status

MAX_CALLS = 1100
"""Tool calls of one run. The host answers fewer, so a program with more ignores answers."""

MAX_TOOL_CHARACTERS = 256


class Reporter:
    """Turns a run into frames."""

    def __init__(self, host: Host, meter: Meter, chain: Chain, zygote_pid: int) -> None:
        self.zygote_pid = zygote_pid
        """The zygote of the process that has a session's variables."""
        self._host = host
        self._meter = meter
        self._chain = chain

    def output(self, run: Run, stream: Stream, *, last: bool = False) -> None:
        """Send the text of a stream since the last time."""
        for text in stream.take(last=last):
            frame = {"op": "output", "id": run.id, "stream": stream.name, "text": text}
            self._host.send(frame, more=True)
        if not last:
            self._host.flush()

    def progress(self, run: Run, claim: Any) -> None:
        """Forward a report of the program, as long as there are not too many."""
        report = progress.read(claim)
        run.reports += 1
        if run.live and run.child is not None:
            for stream in (run.child.stdout, run.child.stderr):  # what was printed before it
                stream.read(run.limits.output_bytes)
                self.output(run, stream)
        if report is not None and run.live and run.reports <= progress.MAX_REPORTS:
            self._host.send({"op": "progress", "id": run.id, **report})

    def call(self, run: Run, claim: Any) -> bool:
        """Forward a program's call of a tool. False if it made too many, or it is no call."""
        run.calls += 1
        if run.calls > MAX_CALLS or not isinstance(claim, dict):
            return False
        number, tool, arguments = (claim.get(key) for key in ("number", "tool", "arguments"))
        if type(number) is not int or not isinstance(tool, str) or not isinstance(arguments, dict):
            return False
        if not 0 <= number < 1 << 31 or len(tool) > MAX_TOOL_CHARACTERS:
            return False
        call = {"op": "call", "id": run.id, "number": number, "tool": tool, "arguments": arguments}
        self._host.send(call)
        return True

    def ended(self, run: Run, files_left_out: int, state: str | None) -> None:
        """Send the ending, once nothing of the run is alive."""
        out_of_memory = self._meter.is_out_of_memory(run)
        exit_code, signal_number = self._status(run)
        cpu_ms = self._meter.cpu_ms(run)
        ended_by, claim = ending_of(
            run, exit_code, signal_number, out_of_memory=out_of_memory, cpu_ms=cpu_ms
        )
        hit = run.limits_hit | claimed_limits(run.claim)
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
            # Where cleaning takes no time, its outcome goes with the answer: one message to carry.
            more=True,
        )

    def _status(self, run: Run) -> tuple[int | None, int | None]:
        if run.stayed and run.killed_for is None:
            return claimed_exit(run), None
        return decode_status(run.status) if run.status is not None else (None, None)

    def _variables_bytes(self, state: str | None) -> int | None:
        """The memory of the first process, without that of its zygote."""
        first = self._chain.first
        if state is None or first is None:
            return None
        held, begun_with = processes.memory_bytes(first), processes.memory_bytes(self.zygote_pid)
        return None if held is None or begun_with is None else max(0, held - begun_with)
