"""The supervisor: owns the channel to the host, keeps time, kills, measures, decides.

Guest side, the first process of every guest. Host above, zygote and children below.

host ──frames── supervisor ──one byte── zygote ──forks── child
                        └───── a pipe to and a pipe from each child ───┘

Host to guest: `{"op": "run", "id", "program", "arguments", "limits": {wall_s, cpu_s,
memory_bytes, output_bytes}}`, `{"op": "lend", "id", "memory_bytes", "cpu_s"}` (a checkout) and
`{"op": "cancel", "id"}`. Guest to host: `{"op": "ready", "enforces", "faults"}` once, then one
`{"op": "ended", "id", "ended_by", …}` for each run and each checkout. In the jail, a run's ending
may be preceded by up to 1 000 frames `{"op": "progress", "id", "percent", "message"}`, and by
`{"op": "part", "id", "text"}` with the output of a streaming function. A run gets a fresh child,
which dies after its answer. The pipes of a checked-out child are sent to the host, which exchanges
messages with the child and enforces its time limits; the supervisor only sets the child's limits,
kills it on request, and reaps it.

At start each defence is attacked once, by probes in ordinary children (`run_probe` in `zygote`).
Probes are runs with negative ids. The host cannot request a probe. Only defences that held are
reported as enforced.

Invariants: no child decides how its run ended; an ending is reported only after the child was
killed or has died; when the channel closes, every process of the guest ends. Single-threaded, one
selector: no call in this file waits for a child.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fumehood.guest.core import children, kernel, limits, pipes
from fumehood.guest.core.children import (
    decode_status,
    ending_of,
    is_sealed,
    judge,
    own_filters,
    peak_bytes,
)
from fumehood.guest.core.limits import Limits
from fumehood.guest.core.pipes import CHUNK_BYTES, write_all
from fumehood.guest.process.zygote import PID, order_child, run_zygote
from fumehood.protocol import framing

READY_FRAME_BYTES = 4096
REPLY_OVERHEAD_BYTES = 4096
"""Bytes by which a reply may exceed the output limit, for keys and escapes."""
CHECKOUT = struct.Struct("!qi")
"""A checkout's id and the child's process id, which are sent with the child's two pipes."""

DIED_UNSEALED = "a child died before it was sealed"
ZYGOTE_GONE = "the zygote is gone"


@dataclass
class Run:
    """One run of a program for a call. If the supervisor has killed the child that runs the
    program, `killed_for` is the reason, such as "wall_time". The host is then told this reason,
    whatever else was observed.
    """

    id: int
    program: str
    arguments: dict[str, Any]
    limits: Limits
    deadline: float = 0.0
    cpu_before_ns: int = 0
    killed_for: str | None = None
    received_bytes: int = 0
    reports: int = 0
    parts: list[str] = field(default_factory=list)
    """Parts of the result that were received but not forwarded yet."""


@dataclass
class Checkout:
    """The host's request to use a child directly, and the child's limits. The host gets the child's
    pipes, and then exchanges messages with the child itself.
    """

    id: int
    memory_bytes: int
    cpu_s: float
    killed_for: str | None = None


PROBE_MEMORY_BYTES = 16 << 20
PROBE_WALL_S = 0.02
PROBE_DEADLINE_S = 60.0
"""Time limit in seconds of each probe except `spin`. The limit exceeds the time that the host waits
for a guest, so that a busy machine is never taken for one that does not enforce its limits.
"""


def _was_refused(ending: dict[str, Any]) -> bool:
    return bool(ending["claim"] == {"result": {"outcome": "refused"}})


def _was_killed(ending: dict[str, Any]) -> bool:
    return bool(ending["signal"] == signal.SIGSYS)


Row = tuple[str, str, Callable[[dict[str, Any]], bool]]
"""A probe of `run_probe`, the limit that the probe tests, and a function that returns whether the
limit held."""

PROBES: tuple[Row, ...] = (
    ("memory", "memory", _was_refused),
    ("files", "files", _was_refused),
    ("processes", "processes", _was_killed),
    ("network", "network", _was_killed),
    ("spin", "wall_time", lambda e: bool(e["ended_by"] == "wall_time")),
)
JAIL: tuple[Row, ...] = tuple(
    ("outside", limit, holds) if probe == "files" else (probe, limit, holds)
    for probe, limit, holds in PROBES
)
"""The same as `PROBES`, but with the probe `outside` in place of `files`, because the jail may read
some files."""


class SelfTest:
    """Attacks each defence once at the start of the guest. The guest's `ready` reports which
    defences held.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._held: dict[str, bool] = {}

    def runs(self) -> Iterator[Run]:
        """Yield one run for each probe, a small program that attacks one defence. These runs have
        negative ids, and the host's runs do not.
        """
        for number, (probe, _, _) in enumerate(self._rows):
            wall_s = PROBE_WALL_S if probe == "spin" else PROBE_DEADLINE_S
            yield Run(
                id=-1 - number,
                program="probe",
                arguments={"probe": probe},
                limits=Limits(wall_s, PROBE_DEADLINE_S, PROBE_MEMORY_BYTES, 1024),
            )

    def ended(self, run: Run, ending: dict[str, Any]) -> dict[str, bool] | None:
        """Record how the probe of `run` ended. If it was the last probe, return for each limit, by
        name, whether it is enforced. Otherwise, return None.
        """
        _, limit, holds = self._rows[-1 - run.id]
        self._held[limit] = holds(ending)
        if len(self._held) < len(self._rows):
            return None
        # The supervisor enforces CPU time and output in the same way as wall time: with its own
        # counter and a kill. The spin probe has shown that this works.
        kept = self._held["wall_time"]
        counted = kernel.process_cpu_ns(os.getpid()) is not None
        return {**self._held, "cpu_time": kept and counted, "output": kept}


@dataclass(eq=False)
class Child:
    """A child process that was ordered from the zygote, and whose end the kernel has not yet
    reported.
    """

    request_fd: int
    reply_fd: int
    pid: int = 0
    sealed: bool = False
    base_bytes: int = 0
    """Size of the address space before any request. The program's memory limit is added to it."""
    run: Run | None = None
    checkout: Checkout | None = None
    outbox: bytes = b""
    decoder: framing.Decoder = field(
        default_factory=lambda: framing.Decoder(READY_FRAME_BYTES, pipes.MAX_REPLY_DEPTH)
    )
    doomed: bool = False
    reaped: bool = False


def supervise(config: dict[str, Any], handover_fd: int) -> None:
    """Run a guest until the host closes the channel. The channel is this process's standard input
    and output. `handover_fd` is a Unix socket, through which the host gets the pipes of children
    that it uses directly.
    """
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    gc.collect()
    gc.freeze()  # present objects are shared with the zygote, and stay so
    zygote_pid = os.fork()
    if zygote_pid == 0:
        ours.close()
        os.close(0)
        os.close(handover_fd)
        os.dup2(2, 1)
        run_zygote(theirs, config)
        os._exit(0)
    theirs.close()
    Supervisor(zygote_pid, ours, socket.socket(fileno=handover_fd), config).loop()


class Supervisor:
    """The supervisor's event loop and state."""

    def __init__(
        self,
        zygote_pid: int,
        orders: socket.socket,
        handover: socket.socket,
        config: dict[str, Any],
    ) -> None:
        self._zygote_pid = zygote_pid
        self._orders = orders
        self._handover = handover
        self._spares: int = config["spares"]
        self._host = framing.Decoder(framing.MAX_REQUEST_BYTES)
        self._ordered: deque[Child] = deque()  # in the order in which the zygote answers
        self._children: dict[int, Child] = {}
        self._ready: deque[Child] = deque()
        self._unnamed: dict[int, children.Ended] = {}
        """Processes that have ended, and may be children whose process ids the zygote has not
        reported yet."""
        self._waiting: deque[Run | Checkout] = deque()
        self._is_jail = config.get("wall") == "jail"
        self._selftest = SelfTest(JAIL if self._is_jail else PROBES)
        self._strays: set[int] = set()
        self._own_filters = own_filters()
        self._selector = selectors.DefaultSelector()
        self._wakeup = children.watch()

    # -- the loop ---------------------------------------------------------------

    def loop(self) -> None:
        """Serve until the host closes the channel, and then exit. Never returns."""
        os.set_blocking(0, False)
        os.set_blocking(self._orders.fileno(), False)
        self._selector.register(0, selectors.EVENT_READ, self._on_host)
        self._selector.register(self._orders, selectors.EVENT_READ, self._on_zygote)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_sigchld)
        self._waiting += self._selftest.runs()
        while True:
            self._dispatch()
            for key, _ in self._selector.select(self._until_next_timer()):
                key.data()
            self._expire(time.monotonic())

    # -- host -------------------------------------------------------------------

    def _on_host(self) -> None:
        try:
            chunk = os.read(0, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._end()
        try:
            for message in self._host.feed(chunk):
                if message["op"] == "run":
                    if message["program"] == "probe":
                        raise framing.FrameError("a probe is not a program for calls")
                    run = Run(
                        id=message["id"],
                        program=message["program"],
                        arguments=message["arguments"],
                        limits=Limits(**message["limits"]),
                    )
                    self._waiting.append(run)
                elif message["op"] == "lend":
                    lent = Checkout(message["id"], message["memory_bytes"], message["cpu_s"])
                    self._waiting.append(lent)
                elif message["op"] == "cancel":
                    self._cancel(message["id"])
        except (framing.FrameError, KeyError, TypeError):
            # The sender is not the host that this guest was made for.
            self._end()

    def _end(self) -> NoReturn:
        # Parent-death signals end all other processes, even if this line is never reached.
        self._kill_all()
        os._exit(0)

    def _fail(self, why: str) -> NoReturn:
        """Report a fault to the host, and wait until the host closes the channel. The host will
        then start a new guest.
        """
        self._kill_all()
        self._announce({}, why)
        os.set_blocking(0, True)
        with suppress(OSError):
            while os.read(0, CHUNK_BYTES):
                pass
        self._end()

    def _kill_all(self) -> None:
        for child in list(self._children.values()):
            self._kill(child)

    def _announce(self, enforces: dict[str, bool], *faults: str) -> None:
        self._tell_host({"op": "ready", "enforces": enforces, "faults": faults})

    def _tell_host(self, message: dict[str, Any]) -> None:
        """Send one frame to the host. End the guest if the channel is closed."""
        try:
            write_all(1, framing.encode(message))
        except OSError:
            self._end()

    # -- runs -------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Assign ready children to waiting runs, then order more children."""
        while self._waiting and self._ready:
            first = self._waiting.popleft()
            if isinstance(first, Checkout):
                self._check_out(self._ready.popleft(), first)
            else:
                self._start(self._ready.popleft(), first)
        coming = len(self._ordered) + sum(not child.sealed for child in self._children.values())
        wanted = self._spares + len(self._waiting)
        for _ in range(wanted - len(self._ready) - coming):
            self._order_child()

    def _start(self, child: Child, run: Run) -> None:
        used_ns = self._limit(child, run.limits.memory_bytes, run.limits.cpu_s)
        if used_ns is None:
            self._waiting.appendleft(run)
            return
        child.run = run
        child.decoder.max_bytes = run.limits.output_bytes + REPLY_OVERHEAD_BYTES
        run.cpu_before_ns = used_ns
        run.deadline = time.monotonic() + run.limits.wall_s
        child.outbox = framing.encode(
            {
                "program": run.program,
                "output_bytes": run.limits.output_bytes,
                "arguments": run.arguments,
            }
        )
        self._flush(child)

    def _check_out(self, child: Child, checkout: Checkout) -> None:
        """Let the host use `child` directly: set the child's limits, and send the child's pipes to
        the host. If the limits cannot be set, `checkout` waits for another child.
        """
        if self._limit(child, checkout.memory_bytes, checkout.cpu_s) is None:
            self._waiting.appendleft(checkout)
            return
        self._selector.unregister(child.reply_fd)
        try:
            socket.send_fds(
                self._handover,
                [CHECKOUT.pack(checkout.id, child.pid)],
                [child.request_fd, child.reply_fd],
            )
        except OSError:  # only if the host is gone
            self._end()
        child.checkout = checkout
        self._close_pipes(child)

    def _limit(self, child: Child, memory_bytes: int, cpu_s: float) -> int | None:
        """Set a child's limits from outside. `memory_bytes` and `cpu_s` limit what the child may
        use from now on. Return the CPU time in nanoseconds that the child has used so far. If the
        limits cannot be set, kill the child and return None.
        """
        used_ns = kernel.process_cpu_ns(child.pid) or 0
        try:
            limits.limit_child(
                child.pid, memory_bytes=child.base_bytes + memory_bytes, cpu_s=used_ns / 1e9 + cpu_s
            )
        except OSError:
            self._doom(child)
            return None
        return used_ns

    def _cancel(self, wanted_id: int) -> None:
        for waiting in list(self._waiting):
            if waiting.id == wanted_id:
                self._waiting.remove(waiting)
                self._report(waiting, "cancelled")
        for child in self._children.values():
            busy_with = child.run or child.checkout
            if busy_with is not None and busy_with.id == wanted_id:
                self._stop(child, "cancelled")

    def _stop(self, child: Child, reason: str) -> None:
        """Kill a child for a reason. The ending is reported when the kernel confirms the death."""
        busy_with = child.run or child.checkout
        if busy_with is not None and busy_with.killed_for is None:
            busy_with.killed_for = reason
        self._doom(child)

    def _on_reply(self, child: Child, reply: dict[str, Any], size: int) -> None:
        run = child.run
        if run is None:  # no run expects a reply: the child does not run our program any more
            self._doom(child)
            return
        child.run = None
        ended_by, claim = judge(reply)
        cpu_ms = _cpu_ms(child, run)
        peak = peak_bytes(child.pid)
        self._doom(child)
        self._report(run, ended_by, claim=claim, cpu_ms=cpu_ms, peak_bytes=peak, size=size)

    def _report(
        self,
        run: Run | Checkout,
        ended_by: str,
        *,
        claim: dict[str, Any] | None = None,
        cpu_ms: float | None = None,
        peak_bytes: int | None = None,
        size: int = 0,
        exit_code: int | None = None,
        signal_number: int | None = None,
    ) -> None:
        ending = {
            "op": "ended",
            "id": run.id,
            "ended_by": ended_by,
            "cpu_ms": cpu_ms,
            "peak_memory_bytes": peak_bytes,
            "output_bytes": size,
            "exit_code": exit_code,
            "signal": signal_number,
            "claim": claim,
        }
        if run.id < 0 and isinstance(run, Run):
            enforces = self._selftest.ended(run, ending)
            if enforces is not None:
                self._announce(enforces)
        else:
            self._tell_host(ending)

    # -- children ---------------------------------------------------------------

    def _order_child(self) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        child = Child(request_write, reply_read)
        os.set_blocking(request_write, False)
        os.set_blocking(reply_read, False)
        try:
            order_child(self._orders, request_read, reply_write)
        except ConnectionError:
            self._fail(ZYGOTE_GONE)
        os.close(request_read)
        os.close(reply_write)
        self._ordered.append(child)

    def _on_zygote(self) -> None:
        try:
            answer = self._orders.recv(PID.size)
        except BlockingIOError:
            return
        except ConnectionError:  # it died with an order unread
            answer = b""
        if len(answer) != PID.size:
            self._fail(ZYGOTE_GONE)
        child = self._ordered.popleft()
        (child.pid,) = PID.unpack(answer)
        self._children[child.pid] = child
        self._selector.register(child.reply_fd, selectors.EVENT_READ, lambda: self._on_child(child))
        if (ended := self._unnamed.pop(child.pid, None)) is not None:
            self._release(child, ended)
        if self._unnamed and not self._ordered:
            self._fail(DIED_UNSEALED)

    def _on_child(self, child: Child) -> None:
        if child.pid not in self._children:
            return  # reaped by an earlier event of the same round
        try:
            chunk = os.read(child.reply_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:  # its exit status has the reason
            self._selector.unregister(child.reply_fd)
            return
        try:
            _count(child, len(chunk))
            messages = child.decoder.feed(chunk)
        except framing.FrameError as fault:
            is_large = isinstance(fault, framing.FrameTooLarge)
            self._stop(child, "output" if is_large else "sandbox_lost")
            return
        for message in messages:
            if not child.sealed:
                self._on_sealed(child, message)
            elif not child.doomed:
                self._on_message(child, message)
        if child.run is not None:
            self._pass_on_parts(child.run)

    def _on_message(self, child: Child, message: dict[str, Any]) -> None:
        run = child.run
        if self._is_jail and run is not None and "progress" in message:
            self._on_progress(run, message["progress"])
        elif run is not None and _streams(run) and isinstance(message.get("part"), str):
            run.parts.append(message["part"])
        else:
            if run is not None:
                self._pass_on_parts(run)
            self._on_reply(child, message, child.decoder.last_size)

    def _pass_on_parts(self, run: Run) -> None:
        """Forward to the host all received parts of the run's result that were not forwarded yet.
        If the run was killed, drop them.
        """
        parts, run.parts = run.parts, []
        # One frame for all parts, because a child can send very small parts.
        if parts and run.killed_for is None:
            self._tell_host({"op": "part", "id": run.id, "text": "".join(parts)})

    def _on_progress(self, run: Run, claim: Any) -> None:
        """Forward a progress report if it is valid, and if the run has not already sent the maximum
        number of reports.
        """
        report = pipes.read_report(claim)
        if report is not None and run.reports < framing.MAX_REPORTS and run.killed_for is None:
            run.reports += 1
            self._tell_host({"op": "progress", "id": run.id, **report})

    def _on_sealed(self, child: Child, message: dict[str, Any]) -> None:
        if message.get("sealed") is not True or not is_sealed(child.pid, self._own_filters):
            self._fail(str(message.get("fault", "a child was not sealed"))[:200])
        child.sealed = True
        child.base_bytes = int(message["base_bytes"])
        self._ready.append(child)

    def _flush(self, child: Child) -> None:
        """Write as much of a child's request as the pipe accepts. Write the rest when the pipe has
        room again.
        """
        if child.pid not in self._children:
            return
        try:
            written = os.write(child.request_fd, child.outbox)
        except BlockingIOError:
            written = 0
        except BrokenPipeError:
            return  # the child is dead: its exit status has the reason
        child.outbox = child.outbox[written:]
        watched = child.request_fd in self._selector.get_map()
        if child.outbox and not watched:
            self._selector.register(
                child.request_fd, selectors.EVENT_WRITE, lambda: self._flush(child)
            )
        elif not child.outbox and watched:
            self._selector.unregister(child.request_fd)

    def _doom(self, child: Child) -> None:
        """Kill a child and never use it again."""
        child.doomed = True
        if child in self._ready:
            self._ready.remove(child)
        self._kill(child)

    def _kill(self, child: Child) -> None:
        # Once a child was reaped, its process id may belong to another process.
        if not child.pid or child.reaped:
            return
        if self._is_jail:
            # The filter forbids new processes. If one exists nevertheless, it is killed here.
            self._strays |= children.kill_below(child.pid)
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _on_sigchld(self) -> None:
        children.drain(self._wakeup)
        for ended in children.reap():
            if ended.pid in self._strays:
                self._strays.discard(ended.pid)
            elif ended.pid in self._children:
                self._release(self._children[ended.pid], ended)
            elif ended.pid == self._zygote_pid:  # the host starts a new guest
                self._fail(ZYGOTE_GONE)
            elif self._ordered:
                self._unnamed[ended.pid] = ended
            else:
                self._fail(DIED_UNSEALED)

    def _release(self, child: Child, ended: children.Ended) -> None:
        """Release the resources of a dead child, and report the run that died with it."""
        child.reaped = True
        self._read_last_messages(child)
        if not child.sealed:
            self._fail(DIED_UNSEALED)
        del self._children[child.pid]
        run, child.run = child.run, None
        self._doom(child)
        self._close_pipes(child)
        if run is not None:
            self._report_death(run, ended.status, _used_ms(run, ended.cpu_ns))
        elif child.checkout is not None:
            self._report_death(child.checkout, ended.status, ended.cpu_ns / 1e6)

    def _report_death(self, run: Run | Checkout, status: int, cpu_ms: float | None) -> None:
        """Report to the host that the child of `run`, a run or a checkout, has died. `status` is
        the child's exit status. `cpu_ms` is the CPU time of the run or, for a checkout, of the
        whole child.
        """
        exit_code, signal_number = decode_status(status)
        self._report(
            run,
            run.killed_for or ending_of(exit_code, signal_number),
            cpu_ms=cpu_ms,
            exit_code=exit_code,
            signal_number=signal_number,
        )

    def _close_pipes(self, child: Child) -> None:
        """Close the supervisor's ends of a child's pipes, if they are still open."""
        if child.request_fd < 0:
            return
        for descriptor in (child.request_fd, child.reply_fd):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)
        child.request_fd = child.reply_fd = -1

    def _read_last_messages(self, child: Child) -> None:
        """Read the messages that are still in the pipe of a dead child."""
        run = child.run
        if child.sealed and (run is None or run.killed_for is not None):
            return
        if child.reply_fd in self._selector.get_map():
            self._on_child(child)

    # -- time -------------------------------------------------------------------

    def _until_next_timer(self) -> float | None:
        now = time.monotonic()
        times = []
        for child in self._children.values():
            run = child.run
            if run is None or child.doomed:
                continue
            times.append(run.deadline)
            if run.limits.cpu_s < run.limits.wall_s:
                left_s = run.limits.cpu_s - (_cpu_ms(child, run) or 0.0) / 1e3
                times.append(now + max(left_s, 0.001))
        return max(0.0, min(times) - now) if times else None

    def _expire(self, now: float) -> None:
        for child in list(self._children.values()):
            run = child.run
            if run is None or child.doomed:
                continue
            if now >= run.deadline:
                self._stop(child, "wall_time")
            elif (_cpu_ms(child, run) or 0.0) >= run.limits.cpu_s * 1e3:
                self._stop(child, "cpu_time")


def _count(child: Child, received_bytes: int) -> None:
    """Add `received_bytes` to the number of bytes that the child's run has sent. If the child has
    no run, do nothing. Raises FrameTooLarge if the run has sent too many bytes.
    """
    if child.run is None:
        return
    child.run.received_bytes += received_bytes
    # A streaming function sends its parts as they are made, and again in the result.
    most = child.decoder.max_bytes * (2 if _streams(child.run) else 1) + pipes.MAX_CLAIM_BYTES
    if child.run.received_bytes > most:
        raise framing.FrameTooLarge(f"a run wrote more than {most} bytes in all")


def _streams(run: Run) -> bool:
    """Return whether a run calls a function that yields its result in parts."""
    return run.program == "function" and bool(run.arguments.get("stream"))


def _cpu_ms(child: Child, run: Run) -> float | None:
    now_ns = kernel.process_cpu_ns(child.pid)
    return None if now_ns is None else _used_ms(run, now_ns)


def _used_ms(run: Run, total_ns: int) -> float:
    return max(0.0, (total_ns - run.cpu_before_ns) / 1e6)
