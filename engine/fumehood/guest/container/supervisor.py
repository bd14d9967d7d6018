"""The supervisor of a container: its first process, between the host and the programs.

Guest side. One run at a time. It owns the channel (its standard input and output), keeps time,
counts what a program prints, kills, measures, and puts the container back as it was.

    host ──frames── supervisor ──one byte── zygote ──forks── child, of another user
                        └── request, reply, stdout, stderr ──┘

Invariants: no program says how its run ended; `ended` is told only when nothing of the program
is alive; `reset` says clean only where the container was seen to be as it was before; when the
channel is gone or the lifetime over, so is the container.
Single-threaded, one selector: whatever a program does, no call in this file waits for it.
"""

from __future__ import annotations

import gc
import os
import resource
import selectors
import signal
import socket
import time
from typing import Any

from fumehood.guest import kernel
from fumehood.guest.container import housekeeping, processes, selfcheck
from fumehood.guest.container.counters import Counters
from fumehood.guest.container.host import Host, end
from fumehood.guest.container.meter import Meter
from fumehood.guest.container.nursery import READY_DEADLINE_S, Nursery, NurseryFailed
from fumehood.guest.container.run import Run, claimed_limits, ending_of
from fumehood.guest.container.stream import Stream
from fumehood.guest.container.workspace import Mounts, message_queues
from fumehood.guest.container.zygote import Word, run_zygote
from fumehood.guest.endings import decode_status
from fumehood.guest.limits import address_space_bytes
from fumehood.wire import framing

MAX_CLAIM_BYTES = 512 * 1024
"""All that a program may write into its reply's pipe; what follows is not read."""

CHUNK_BYTES = 1 << 16
OUTPUT_PAUSE_S = 0.02
"""How long printed text may wait for more before it is passed on."""
CPU_BACKSTOP_S = 1
MEMORY_LOOK_S = 0.1
"""How often the kernel is asked whether it killed one of the program's processes for memory; of
one that is not the first, nobody else is told."""
KILL_DEADLINE_S = 2.0
MAX_PROCESSES = 64


def supervise(config: dict[str, Any]) -> None:
    """Run a guest on descriptors 0 and 1 until the host closes the channel."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    gc.collect()
    gc.freeze()  # what stands now is shared with the zygote, and stays so
    zygote_pid = os.fork()
    if zygote_pid == 0:
        ours.close()
        os.close(0)
        os.dup2(2, 1)
        run_zygote(theirs, config)
        os._exit(0)
    theirs.close()
    Supervisor(ours, zygote_pid, config).loop()


class Supervisor:
    """The event loop and everything it knows."""

    def __init__(self, orders: socket.socket, zygote_pid: int, config: dict[str, Any]) -> None:
        self._config = config
        self._spares: int = config["spares"]
        self._ends_at = time.monotonic() + float(config["lifetime_s"])
        self._host = Host()
        self._run: Run | None = None
        self._output_due: float | None = None
        self._mounts = Mounts()
        self._counters = Counters()
        self._selector = selectors.DefaultSelector()
        self._wakeup = self._watch_children()
        self._nursery = Nursery(
            orders, self._selector, zygote_pid, on_ready=self._begin, on_end=self._on_end
        )
        self._meter = Meter(self._counters, lambda: (zygote_pid, *self._nursery.pids))
        self._check: selfcheck.SelfCheck | None = selfcheck.SelfCheck(
            config, self._counters, self._mounts
        )

    # -- the loop ---------------------------------------------------------------

    def loop(self) -> None:
        """Serve until the channel ends. Never returns otherwise."""
        self._selector.register(0, selectors.EVENT_READ, self._on_host)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_sigchld)
        assert self._check is not None
        self._run = self._check.run
        try:
            self._nursery.stock(max(1, self._spares))
            while True:
                for key, _ in self._selector.select(self._until_next_timer()):
                    key.data()
                self._check_time(time.monotonic())
        except NurseryFailed as failure:
            self._host.fail(str(failure))

    def _watch_children(self) -> socket.socket:
        readable, writable = socket.socketpair()
        readable.setblocking(False)
        writable.setblocking(False)
        signal.set_wakeup_fd(writable.detach())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: end())
        return readable

    # -- host -------------------------------------------------------------------

    def _on_host(self) -> None:
        for wish in self._host.read():
            if isinstance(wish, Run):
                if self._run is not None:
                    end()  # one at a time; the host knows that
                self._run = wish
                self._begin()
            elif self._run is not None and self._run.id == wish:
                self._stop(self._run, "cancelled")

    # -- a run --------------------------------------------------------------------

    def _begin(self) -> None:
        """Give the run that waits a child, if there is one."""
        run = self._run
        if run is None or run.child is not None or run.status is not None:
            return
        child = self._nursery.take()
        if child is None:
            self._nursery.stock(1)
            return
        run.child = child
        child.decoder.max_bytes = MAX_CLAIM_BYTES
        cpu_s = int(run.limits.cpu_s) + 1 + CPU_BACKSTOP_S
        try:
            child.limit(resource.RLIMIT_CPU, cpu_s)
            if self._counters.memory_limit is None:  # then the limit is one process's
                child.limit(
                    resource.RLIMIT_AS, address_space_bytes(child.pid) + run.limits.memory_bytes
                )
            if self._counters.process_limit is None:  # where there is one, this would count
                child.limit(resource.RLIMIT_NPROC, MAX_PROCESSES)  # all containers together
        except OSError:
            self._stop(run, "sandbox_lost")
            return
        run.child_cpu_ns = kernel.process_cpu_ns(child.pid) or 0
        run.before = self._meter.read()
        run.deadline = time.monotonic() + run.limits.wall_s
        run.request = b"G" + run.request
        for descriptor, handler in (
            (child.reply_fd, self._on_reply),
            (child.stdout.descriptor, lambda: self._on_output(child.stdout)),
            (child.stderr.descriptor, lambda: self._on_output(child.stderr)),
        ):
            self._selector.register(descriptor, selectors.EVENT_READ, handler)
        self._flush_request()
        # Made while the program runs, the next child costs no call any time.
        self._nursery.stock(self._spares)

    def _flush_request(self) -> None:
        """Write what fits; a request larger than the pipe goes on when there is room."""
        run = self._run
        if run is None or run.child is None or run.child.request_fd < 0:
            return
        descriptor = run.child.request_fd
        try:
            sent_bytes = os.write(descriptor, run.request)
            run.request = run.request[sent_bytes:]
            run.sent_bytes += sent_bytes
        except BlockingIOError:
            pass
        except BrokenPipeError:
            run.request = b""  # dead: the exit status tells
        watched = descriptor in self._selector.get_map()
        if run.request and not watched:
            self._selector.register(descriptor, selectors.EVENT_WRITE, self._flush_request)
        elif not run.request and watched:
            self._selector.unregister(descriptor)

    def _on_output(self, stream: Stream) -> None:
        run = self._run
        if run is None:
            return
        if not stream.read(run.limits.output_bytes):
            self._unwatch(stream.descriptor)  # closed; it may be written to no more
            return
        if stream.is_over:
            self._unwatch(stream.descriptor)
            self._stop(run, "output")
        elif self._output_due is None:
            self._output_due = time.monotonic() + OUTPUT_PAUSE_S

    def _on_reply(self) -> None:
        """What a program claims: the last well-formed words count, and only after its end."""
        run = self._run
        if run is None or run.child is None:
            return
        try:
            chunk = os.read(run.child.reply_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        run.received_bytes += len(chunk)
        if not chunk or run.received_bytes > MAX_CLAIM_BYTES:
            self._unwatch(run.child.reply_fd)
            return
        try:
            for message in run.child.decoder.feed(chunk):
                run.claim = message
        except framing.FrameError:
            run.claim = None
            self._unwatch(run.child.reply_fd)
        if self._check is not None and run.claim is not None:
            self._check.look_at(run.child.pid, run.claim)
            run.deadline = time.monotonic() + selfcheck.PROBE_WALL_S

    def _stop(self, run: Run, reason: str) -> None:
        """Kill the program; its ending is told when the kernel confirms the death."""
        if run.killed_for is None:
            run.killed_for = reason
        if run.child is None:
            self._conclude(run)
            return
        try:
            os.kill(run.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    # -- its end ------------------------------------------------------------------

    def _on_end(self, word: Word) -> None:
        """The zygote buried the program's first process."""
        run = self._run
        if run is None or run.child is None:
            return
        run.largest_bytes = max(run.largest_bytes, word.largest_bytes)
        if run.child.pid != word.pid:  # it can have brothers: who is a parent is a clone's choice
            run.reaped_cpu_ns += word.cpu_ns
            return
        run.status = word.status
        run.reaped_cpu_ns += max(0, word.cpu_ns - run.child_cpu_ns)
        run.has_begun = kernel.unread_bytes(run.child.request_fd) < run.sent_bytes - 1
        self._conclude(run)

    def _on_sigchld(self) -> None:
        try:
            while self._wakeup.recv(512):
                pass
        except BlockingIOError:
            pass
        self._reap()
        if self._run is None:
            self._nursery.stock(self._spares)

    def _reap(self) -> None:
        """Take every exit status that there is: orphans of the program, or the zygote.

        Raises:
            NurseryFailed: the zygote is dead.
        """
        while True:
            try:
                pid, _, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._nursery.zygote_pid:
                raise NurseryFailed("the zygote is gone")
            if self._run is not None:
                self._run.reaped_cpu_ns += int((usage.ru_utime + usage.ru_stime) * 1e9)
                largest_bytes = usage.ru_maxrss * 1024
                self._run.largest_bytes = max(self._run.largest_bytes, largest_bytes)

    def _conclude(self, run: Run) -> None:
        """Nothing of the program may be alive when its ending is told."""
        is_over = self._end_the_rest()
        if run.child is not None:
            self._read_last_words(run)
            if self._mounts.are_full():
                run.limits_hit.add("disk")
        housekeeper = housekeeping.NOTHING_DONE
        is_quick = self._is_alone()
        if not is_over:
            left_out = int(not self._mounts.are_clean())  # at least
            fault = "a process of the program could not be ended"
            housekeeper = housekeeping.Housekeeper(left_out, fault)
        elif self._check is None and run.child is not None:
            housekeeper = housekeeping.keep_house(run.id, self._mounts)
        self._output_due = None
        if self._check is None:
            self._report(run, housekeeper.left_out)
        if not is_quick:
            self._host.flush()
        if run.child is not None:
            run.child.close()
        self._run = None
        self._nursery.stock(self._spares)
        why = self._why_not_clean(housekeeper)
        if self._check is not None:
            self._finish_check(self._check, run, why)
            return
        self._host.tell({"op": "reset", "id": run.id, "clean": why is None, "why": why})
        if why is not None:
            end()

    def _end_the_rest(self) -> bool:
        """Kill what the program started until none of it is left; False where that fails."""
        if self._is_alone():
            return True
        give_up = time.monotonic() + KILL_DEADLINE_S
        while processes.kill_all() or self._is_one_unseen():
            self._reap()
            if time.monotonic() > give_up:
                return False
            time.sleep(0.0005)  # killed is not yet dead, and dead not yet gone
        self._reap()
        return True

    def _is_alone(self) -> bool:
        """Whether the kernel counts as many processes as this guest has of its own."""
        is_still = self._nursery.is_settled
        return is_still and self._counters.processes() == 2 + len(self._nursery.pids)

    def _is_one_unseen(self) -> bool:
        """Whether the kernel counts more than there are to be seen; a list of them takes time."""
        is_counted = self._nursery.is_settled and self._counters.processes() is not None
        return is_counted and not self._is_alone()

    def _read_last_words(self, run: Run) -> None:
        child = run.child
        assert child is not None
        for descriptor in (child.request_fd, child.stdout.descriptor, child.stderr.descriptor):
            self._unwatch(descriptor)
        for stream in (child.stdout, child.stderr):
            stream.drain(run.limits.output_bytes)
            if stream.is_over and run.killed_for is None:
                run.killed_for = "output"
        while child.reply_fd in self._selector.get_map():
            before = run.received_bytes
            self._on_reply()
            if run.received_bytes == before:
                self._unwatch(child.reply_fd)

    def _report(self, run: Run, files_left_out: int) -> None:
        out_of_memory = self._meter.is_out_of_memory(run)
        exit_code, signal_number = (
            decode_status(run.status) if run.status is not None else (None, None)
        )
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
                self._pass_on(run, stream, last=True)
            stdout_bytes = run.child.stdout.received_bytes
            stderr_bytes = run.child.stderr.received_bytes
        self._host.tell(
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
                "claim": claim,
            },
            # Where cleaning takes no time, its outcome goes with the answer: one message to carry.
            more=True,
        )

    def _pass_on(self, run: Run, stream: Stream, *, last: bool = False) -> None:
        for text in stream.take(last=last):
            self._host.tell(
                {"op": "output", "id": run.id, "stream": stream.name, "text": text}, more=last
            )

    def _why_not_clean(self, housekeeper: housekeeping.Housekeeper) -> str | None:
        """What a program left that could not be taken away; None where there is nothing."""
        if housekeeper.fault is not None:
            return housekeeper.fault
        if not self._is_alone() and processes.strangers():
            return "a process of the program is left"
        are_clean = self._mounts.are_clean()
        if are_clean is False or (are_clean is None and not self._mounts.are_empty()):
            return "a file of the program is left"
        if not self._mounts.are_the_same():
            return "a mount has changed"
        if message_queues():
            return "a message queue of the program is left"
        return None

    def _finish_check(self, check: selfcheck.SelfCheck, run: Run, why: str | None) -> None:
        enforces, faults = check.result(run, self._meter.read())
        self._check = None
        if why is not None:
            faults = [why, *faults][: selfcheck.MAX_FAULTS]
        self._host.tell({"op": "ready", "enforces": enforces, "faults": faults})

    def _unwatch(self, descriptor: int) -> None:
        if descriptor >= 0 and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    # -- time ----------------------------------------------------------------------

    def _until_next_timer(self) -> float:
        now = time.monotonic()
        times = [self._ends_at]
        late = self._nursery.until_late()
        if late is not None:
            times.append(late + READY_DEADLINE_S)
        if self._output_due is not None:
            times.append(self._output_due)
        run = self._run
        if run is not None and run.child is not None and run.killed_for is None:
            times += [run.deadline, now + MEMORY_LOOK_S]
            if run.limits.cpu_s < run.limits.wall_s:
                left_s = run.limits.cpu_s - (self._meter.cpu_ms(run) or 0.0) / 1e3
                times.append(now + max(left_s, 0.001))
        return max(0.0, min(times) - now)

    def _check_time(self, now: float) -> None:
        self._nursery.check_time(now)
        run = self._run
        if now >= self._ends_at and run is None:
            end()
        if run is None or run.child is None:
            return
        if self._output_due is not None and now >= self._output_due:
            self._output_due = None
            for stream in (run.child.stdout, run.child.stderr):
                self._pass_on(run, stream)
        if run.killed_for is not None:
            return
        if self._meter.is_out_of_memory(run):
            self._stop(run, "memory")
        elif now >= run.deadline:
            self._stop(run, "wall_time")
        elif (
            run.limits.cpu_s < run.limits.wall_s
            and (self._meter.cpu_ms(run) or 0.0) >= run.limits.cpu_s * 1e3
        ):
            self._stop(run, "cpu_time")
