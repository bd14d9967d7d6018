"""The supervisor: the first process of a container, between the host and the container's programs.

Guest side. The supervisor serves one run at a time. It owns the channel (its standard input and
output), keeps the time and counts the output of a program, kills its processes, measures what they
used, and restores the container.

host ──frames── supervisor ──one byte── zygotes ──fork── child, of another user
                        └── request, reply, stdout, stderr ──┘

Invariants: no program decides how its run ended; `ended` is sent only when no process of the
program is alive; `reset` reports a clean container only after the supervisor has verified that it
is clean; when the container's lifetime ends or the channel closes, the container ends, but after
the channel has closed, a session's container first waits some time for another engine; nothing of a
run whose engine is gone is sent to the next engine; no call in this file waits for a program,
because the supervisor has a single thread with one selector.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import selectors
import signal
import socket
import time
from functools import partial
from typing import Any, NoReturn

from fumehood.guest.container import processes, selfcheck
from fumehood.guest.container.chain import WATCH_S, Chain
from fumehood.guest.container.child import limits_of, read_image
from fumehood.guest.container.cleaning import NOTHING_DONE, Cleaner
from fumehood.guest.container.host import Host, Reporter, end
from fumehood.guest.container.meter import Counters, Meter
from fumehood.guest.container.places import GATE_FD, MARK, WORKSPACE
from fumehood.guest.container.prefork_pool import (
    FAT_SPARES,
    Child,
    PreforkFailed,
    PreforkPool,
    PreforkPools,
    Standby,
    Stream,
    Zygote,
    make_child,
)
from fumehood.guest.container.registered import Registered
from fumehood.guest.container.run import Keep, Run, stays
from fumehood.guest.container.streams import Place, Streams
from fumehood.guest.container.takeover import Takeover
from fumehood.guest.container.trees import Trees
from fumehood.guest.container.watch import Watch
from fumehood.guest.container.workspace import Folders, Mounts
from fumehood.guest.container.zygote import Notice, run_zygote
from fumehood.guest.core import children, kernel
from fumehood.guest.core.children import peak_bytes
from fumehood.guest.core.limits import CPU_BACKSTOP_S, address_space_bytes
from fumehood.guest.core.pipes import CHUNK_BYTES, MAX_CLAIM_BYTES
from fumehood.protocol import framing
from fumehood.protocol.streams import StreamFrame

FILE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", 5)
"""The clock that the kernel of the operating system uses for the times of files. *Source*:
clock_gettime(2), <linux/time.h>.
"""

OUTPUT_PAUSE_S = 0.02
"""Maximum seconds for which printed text may wait for more text before it is forwarded."""
MEMORY_LOOK_S = 0.1
"""Seconds between checks whether a process of the program was killed because memory ran out. If the
killed process is not the program's first process, only this check detects it.
"""

HIDDEN_S = 2.0
"""Seconds between checks whether a killed process is dead, in case its end is never reported."""

FILES_PAUSE = 10
"""How much longer than a look at all files the pause after it is."""

QUIET_S = 0.25
"""Seconds without a program after which the fat zygote loads the image's modules. Loading takes
most of a second. If a program needs the modules, the zygote loads them earlier.
"""

CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7
"""The supervisor's capabilities: KILL, SETGID and SETUID. *Source*: capabilities(7),
<linux/capability.h>.
"""


SEES_MEMORY = 1 << 19
"""The capability SYS_PTRACE, with which the supervisor sees how much memory processes share. The
system calls that it also permits are refused to the whole container.
"""


def supervise(config: dict[str, Any]) -> None:
    """Run the supervisor of this container until the host closes the channel. The channel is this
    process's standard input and output. `config` has the host's settings for the container, such as
    its limits.
    """
    if MARK is None:
        kernel.empty_bounding_set()
        kernel.keep_capabilities(CAPABILITIES | (SEES_MEMORY if config["is_watched"] else 0))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    has_fat = bool(read_image().preload)
    gc.collect()
    gc.freeze()  # present objects are shared with the zygotes, and stay so
    # Both are forked before the first call arrives: a fork has a copy of all its parent's data.
    thin = _start_zygote(config, thin=True)
    fat = _start_zygote(config, thin=False) if has_fat else None
    Supervisor(thin, fat, config).loop()


def _start_zygote(config: dict[str, Any], *, thin: bool) -> Zygote:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        os.close(0)
        os.dup2(2, 1)
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, int(config["nofile"]))
        run_zygote(theirs, config, thin=thin)
        os._exit(0)
    theirs.close()
    return Zygote(pid, ours)


class Supervisor:
    """The event loop of the supervisor, and the data that it uses."""

    def __init__(self, thin: Zygote, fat: Zygote | None, config: dict[str, Any]) -> None:
        self._load_at = math.inf
        """Time at which the fat zygote should load the image's modules, if it has not loaded
        them.
        """
        self._max_processes = int(config["processes"])
        self._ends_at = time.monotonic() + float(config["lifetime_s"])
        self._host = Host()
        self._takeover: Takeover | None = None
        self._left_at: float | None = None
        """Time at which the host disappeared. None while there is a host."""
        self._enforces: dict[str, bool] = {}
        self._run: Run | None = None
        self._output_due: float | None = None
        self._output_told = 0.0
        self._watch_at = 0.0
        self._frozen = contextlib.ExitStack()
        """Resumes registered processes when it is closed. They are stopped if otherwise a run could
        not end.
        """
        self._orphaned: Run | None = None
        """A session's run whose first process has ended, but that was not yet concluded. None if
        there is no such run.
        """
        self._mounts: Mounts
        if MARK is not None:
            self._mounts = Folders(int(config["memory_bytes"]) // 2)
        else:
            self._mounts = Mounts(kept=[WORKSPACE] if config["disk_bytes"] else [])
        self._counters = Counters()
        self._selector = selectors.DefaultSelector()
        self._wakeup = children.watch()
        signal.signal(signal.SIGTERM, lambda *_: end())
        self._trees = Trees(
            lambda: self._registered.pids,
            lambda: (os.getpid(), *self._pools.zygote_pids, *self._pools.pids),
            cached=self._counters.read("processes") is not None,
        )
        self._chain = Chain(self._reap, self._trees.kill_living, self._trees.frozen)
        self._pools = PreforkPools(
            self._pool(thin, max(1, config["spares"])),
            None if fat is None else self._pool(fat, FAT_SPARES),
        )
        self._standby = Standby(self._pools.thin.take, self._limit)
        self._registered = Registered(
            self._host, self._selector, partial(self._limits, config), self._standby.end,
            is_watched=config["is_watched"],
        )  # fmt: skip
        self._watch = Watch(self._mounts, int(config["memory_bytes"]))
        self._is_watched = bool(config["is_watched"])
        """Whether no control group limits the memory of the programs, so that this process
        watches it.
        """
        self._watched = ["cpu_time", "memory"] if self._is_watched else config["watched_outside"]
        if MARK is not None:
            self._watched = [*self._watched, "disk"]
        self._files_look_at = 0.0
        """Time of the next look at the files, if they have no file system of their own."""
        """The names of the limits that this process enforces by looking at them from time to time.
        The others are enforced by the operating system.
        """
        self._look_at = 0.0
        """Time of the next look at the memory."""
        self._meter = Meter(
            self._counters,
            lambda: (*self._pools.zygote_pids, *self._pools.pids),
            self._pids_of,
        )
        self._cleaner = Cleaner(
            self._pools, self._chain, self._counters, self._mounts, self._reap, self._relays,
            self._registered, self._trees,
        )  # fmt: skip
        self._streams = Streams(Place(self._host, self._selector, self._write, self._stop))
        self._reporter = Reporter(self._host, self._meter, self._chain, thin.pid)
        self._check: selfcheck.SelfCheck | None = selfcheck.SelfCheck(
            config, self._counters, self._mounts, self._watch
        )

    # -- the loop ---------------------------------------------------------------

    def loop(self) -> None:
        """Serve until the container must end, and then exit. This method never returns."""
        self._selector.register(0, selectors.EVENT_READ, self._on_host)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_sigchld)
        if GATE_FD >= 0:  # readable only if the warden is gone
            self._selector.register(GATE_FD, selectors.EVENT_READ, end)
        assert self._check is not None
        self._run = self._check.run
        try:
            self._pools.stock()
            while True:
                for key, _ in self._selector.select(self._until_next_timer()):
                    key.data()
                if self._host.is_gone and self._left_at is None:
                    self._leave_host()
                    if self._takeover is not None:
                        self._takeover.let_go()
                self._check_time(time.monotonic())
        except PreforkFailed as failure:
            self._fail(str(failure))

    def _pool(self, zygote: Zygote, spares: int) -> PreforkPool:
        return PreforkPool(
            zygote,
            spares,
            self._selector,
            (self._chain.orders_end.fileno(), self._chain.wake_end.fileno()),
            on_ready=self._on_ready,
            on_end=self._on_end,
        )

    def _on_ready(self) -> None:
        if self._run is None:
            self._prepare_standby()
        else:
            self._begin()

    # -- host -------------------------------------------------------------------

    def _on_host(self) -> None:
        for request in self._host.read():
            if isinstance(request, Run):
                if self._run is not None:
                    end()  # the host never sends a second run
                self._run = request
                self._begin()
            elif isinstance(request, StreamFrame):
                self._streams.on_frame(self._run, request)
            else:
                self._on_order(request)

    def _on_order(self, order: dict[str, Any]) -> None:
        run = self._run
        if order["op"] == "keep":
            self._keep(Keep(order["epoch"], order["wait_s"]))
        elif order["op"] == "process":
            self._registered.on_request(order)
            if run is not None and self._registered.pids:
                run.is_beside = True
        elif run is None or run.id != order["id"]:
            return  # it has ended meanwhile
        elif order["op"] == "pause":
            _pause(run, is_paused=order["paused"])
        else:
            self._stop(run, "cancelled")

    def _keep(self, keep: Keep) -> None:
        """Make this a session's container, as `keep` describes. From now on, another engine may
        take over this container.
        """
        self._host.keep = keep
        if self._takeover is None:
            self._takeover = Takeover()
            self._selector.register(
                self._takeover.listener, selectors.EVENT_READ, self._on_takeover
            )

    def _relays(self) -> int | None:
        """Return the number of relays in use: processes that connect another engine to this
        container. Return None if this is not a session's container.
        """
        return None if self._takeover is None else self._takeover.processes

    def _leave_host(self) -> None:
        """Cancel the current run and wait for another engine, because the connection to the host is
        lost.
        """
        self._left_at = time.monotonic()
        self._unwatch(0)
        self._streams.leave()
        self._registered.leave()
        self._chain.drop()  # the next engine does not know of trials
        if self._run is not None:
            self._run.is_left, self._run.live = True, False
            self._stop(self._run, "cancelled")

    def _on_takeover(self) -> None:
        assert self._takeover is not None
        assert self._host.keep is not None
        taken = self._takeover.accept(self._host.keep.epoch)
        if taken is None:
            return
        if self._left_at is None:
            self._leave_host()
        epoch, readable, writable = taken
        self._host.keep = Keep(epoch, self._host.keep.wait_s)
        former = self._host.use(readable, writable)
        self._selector.register(former, selectors.EVENT_WRITE, lambda: self._dismiss(former))
        self._left_at = None
        self._selector.register(0, selectors.EVENT_READ, self._on_host)
        if self._run is None:
            self._greet()

    def _dismiss(self, former: int) -> None:
        self._selector.unregister(former)
        self._host.dismiss(former)

    def _greet(self) -> None:
        self._host.ready(self._enforces, [], self._streams.kinds, self._watched)
        self._registered.tell()

    def _write(self, run: Run, data: bytes) -> None:
        """Write bytes to the program of `run`, after the bytes that already wait to be written."""
        run.request += data
        self._flush_request()

    # -- a run --------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the run that waits, if a child is ready for it."""
        run = self._run
        if run is None or run.child is not None or run.status is not None:
            return
        is_next = self._is_chained(run) and self._begin_next_link(run)
        if not is_next and not self._begin_new_child(run):
            return
        child = run.child
        assert child is not None
        child.decoder.max_bytes = MAX_CLAIM_BYTES
        self._streams.begin(run)
        run.child_cpu_ns = kernel.process_cpu_ns(child.pid) or 0
        run.before = self._meter.read()
        if self._registered.pids:
            run.is_beside = True
            run.waited_cpu_ns = processes.waited_cpu_ns(child.pid)
        run.deadline = time.monotonic() + run.limits.wall_s
        run.since_ns = time.clock_gettime_ns(FILE_CLOCK)
        for descriptor, handler in (
            (child.reply_fd, self._on_reply),
            (child.stdout.descriptor, lambda: self._on_output(child.stdout)),
            (child.stderr.descriptor, lambda: self._on_output(child.stderr)),
        ):
            self._selector.register(descriptor, selectors.EVENT_READ, handler)
        self._flush_request()

    def _begin_new_child(self, run: Run) -> bool:
        cpu_s = int(run.limits.cpu_s) + 1 + CPU_BACKSTOP_S
        run.child = self._standby.give(run, cpu_s)
        # If memory is watched, a waiting Node would have a file in a directory that must be clean.
        if run.program == "javascript" and not self._is_watched:
            self._standby.expect(cpu_s)
        if run.child is not None:
            return True
        is_fat = run.program == "python" and not run.thin
        if is_fat:
            self._pools.load_fat()
        pool = self._pools.fat if is_fat else self._pools.thin
        run.child = child = pool.take()
        if child is None:
            pool.stock(1)
            return False
        if self._is_chained(run):
            self._reporter.zygote_pid = pool.zygote_pid
        self._limit(
            child,
            None if self._is_chained(run) else cpu_s,  # later calls may have a higher limit
            # Node reserves far more address space than it uses, so only the container's limit
            # applies to it.
            None if run.program == "javascript" else run.limits.memory_bytes,
        )
        run.request[:0] = b"G"
        return True

    def _limit(self, child: Child, cpu_s: int | None, memory_bytes: int | None = None) -> None:
        """Lower the limits of `child` that depend on the call. `cpu_s` limits its CPU time in
        seconds, and `memory_bytes` the memory that it may use in addition to preloaded memory. None
        leaves the limit unchanged.

        Memory and the number of processes are limited here only if the container has no such limit.
        Raises OSError if a limit cannot be changed.
        """
        if MARK is not None:
            child.limit(resource.RLIMIT_RTTIME, MARK - 1)
        if cpu_s is not None:
            child.limit(resource.RLIMIT_CPU, cpu_s)
        if memory_bytes is not None and self._counters.memory_limit is None:
            preloaded_bytes = max(map(address_space_bytes, self._pools.zygote_pids))
            child.limit(resource.RLIMIT_AS, preloaded_bytes + memory_bytes)
        if self._counters.process_limit is None:  # RLIMIT_NPROC counts over all containers
            child.limit(resource.RLIMIT_NPROC, self._max_processes)

    def _begin_next_link(self, run: Run) -> bool:
        """Let the process that holds the session's variables execute `run`, and return True. If
        there is no such process, return False. If the session had one earlier, also record in `run`
        that the variables are lost.
        """
        had_any = bool(self._chain.pids) or self._chain.tell_end()
        child, theirs = make_child()
        pid = self._chain.begin(*theirs)
        for descriptor in theirs:
            os.close(descriptor)
        if pid is None:
            child.close()
            run.lost_variables = run.lost_variables or had_any
            return False
        child.pid = pid
        run.child = child
        return True

    def _flush_request(self) -> None:
        """Write as much of the current run's request as the pipe accepts. The rest is written when
        the pipe has room again.
        """
        run = self._run
        if run is None or run.child is None or run.child.request_fd < 0:
            return
        descriptor = run.child.request_fd
        try:
            sent_bytes = os.write(descriptor, run.request)
            del run.request[:sent_bytes]
            run.sent_bytes += sent_bytes
            self._streams.on_written(run)
        except BlockingIOError:
            pass
        except BrokenPipeError:
            run.request.clear()  # the child is dead: its exit status has the reason
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
            self._unwatch(stream.descriptor)  # all writers have closed it
            return
        if stream.is_over:
            self._unwatch(stream.descriptor)
            self._stop(run, "output")
        elif self._output_due is None:
            now = time.monotonic()
            # A followed run's first text is sent at once. Other runs send fewer, longer pieces.
            wait_from = self._output_told if run.live else now
            self._output_due = max(now, wait_from + OUTPUT_PAUSE_S)

    def _on_reply(self) -> None:
        """Read and process new messages of the current run's program. Its last message that is
        neither a progress report nor for a stream is its claim. If the program sends invalid data,
        its claim is dropped, and nothing more is read.
        """
        run = self._run
        if run is None or run.child is None:
            return
        try:
            chunk = os.read(run.child.reply_fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        run.received_bytes += len(chunk)
        if not chunk:
            self._unwatch(run.child.reply_fd)
            return
        try:
            for message in run.child.decoder.feed(chunk):
                self._on_message(run, message)
        except framing.FrameError:
            run.claim = None
            self._unwatch(run.child.reply_fd)
            self._streams.on_garbage(run)
        if self._check is not None and run.claim is not None:
            self._check.look_at(run.child.pid, run.claim)
            run.deadline = time.monotonic() + selfcheck.PROBE_WALL_S
        if stays(run) and not run.is_over and run.status is None and run.killed_for is None:
            run.stayed = True
            run.largest_bytes = peak_bytes(run.child.pid) or 0
            self._conclude(run)

    def _on_message(self, run: Run, message: dict[str, Any]) -> None:
        if "progress" in message:
            self._reporter.progress(run, message["progress"])
        elif not self._streams.on_message(run, message):
            run.claim = message

    def _fail(self, why: str) -> NoReturn:
        """End the container because of the fault `why`. If memory ran out during a run, first
        report to the host that the run ended for this reason.
        """
        run = self._run
        if self._check is not None:
            self._host.fail(why)
        if run is not None and run.child is not None and self._meter.is_out_of_memory(run):
            run.killed_for = run.killed_for or "memory"
            run.is_over = True
            self._trees.kill_all()
            self._read_last_messages(run)
            self._reporter.ended(run, 0, None)
            self._host.send({"op": "reset", "id": run.id, "clean": False, "why": why[:200]})
        os.write(2, f"supervisor: {why}\n".encode()[:400])
        end()

    def _stop(self, run: Run, reason: str) -> None:
        """Kill the program of `run`. `reason` is a word such as "memory", and only the first reason
        is kept. The run's ending is reported later, when the program's process is known to be dead.
        If the run has no process yet, conclude it at once.
        """
        if run.killed_for is None:
            run.killed_for = reason
            run.look_at = time.monotonic() + HIDDEN_S
        if run.child is None:
            self._conclude(run)
            return
        try:
            processes.send(run.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    # -- its end ------------------------------------------------------------------

    def _on_end(self, ended: Notice) -> None:
        """Process a zygote's report `ended` that a child of the zygote has ended and was reaped.

        If the child is the current run's first process, conclude the run. If the run's program has
        created the child with clone(2), only add the child's resource usage to the run. If the
        child is the standby (a Node process that waits for its program), no run is affected.
        """
        self._cleaner.on_reaped(ended.pid)
        run = self._run
        if self._standby.has_ended(ended.pid) or run is None or run.child is None:
            return
        run.largest_bytes = max(run.largest_bytes, ended.largest_bytes)
        if run.child.pid != ended.pid:  # a sibling: clone can choose the parent
            run.reaped_cpu_ns += ended.cpu_ns
            return
        run.status = ended.status
        run.reaped_cpu_ns += max(0, ended.cpu_ns - run.child_cpu_ns)
        run.has_begun = kernel.unread_bytes(run.child.request_fd) < run.sent_bytes - 1
        if not run.is_over:
            self._conclude(run)

    def _on_sigchld(self) -> None:
        children.drain(self._wakeup)
        self._reap()
        ended, self._orphaned = self._orphaned, None
        if ended is not None and ended is self._run:
            self._conclude(ended)
        if self._run is None:
            self._pools.stock()

    def _reap(self) -> None:
        """Reap every dead child of the supervisor: zygotes, keepers, and processes of programs
        whose own parent is gone.

        Raises:
            PreforkFailed: a zygote is dead.
        """
        for ended in children.reap():
            if ended.pid in self._pools.zygote_pids:
                raise PreforkFailed("the zygote is gone")
            if self._registered.on_reaped(ended.pid):
                self._trees.forget()
            else:
                self._on_orphan(ended)

    def _on_orphan(self, ended: children.Ended) -> None:
        """Add the resource usage of the dead process `ended` to the current run. `ended` was a
        child of the supervisor, but neither a keeper nor a zygote. In a session, it may be the
        run's first process. If so, also record that this process has ended. Without a current run,
        do nothing.
        """
        run = self._run
        if run is None:
            return
        run.largest_bytes = max(run.largest_bytes, ended.largest_bytes)
        run.reaped_cpu_ns += ended.cpu_ns
        if run.child is not None and run.child.pid == ended.pid and run.status is None:
            run.status = ended.status
            run.has_begun = True
            if not run.stayed:
                self._orphaned = run

    def _conclude(self, run: Run) -> None:
        """End `run`: kill its remaining processes, clean up, and report the run's ending. The
        processes that hold a session's variables are not killed.
        """
        run.is_over = True
        state = self._settle(run)
        self._streams.end()
        is_over = self._cleaner.end_the_rest()
        self._streams.clear()
        self._chain.stop()
        self._watch_at = time.monotonic() + WATCH_S
        if run.child is not None:
            self._read_last_messages(run)
            if self._mounts.are_full():
                run.limits_hit.add("disk")
        housekeeper = NOTHING_DONE
        is_quick = self._cleaner.is_alone()
        if self._check is None or not is_over:
            housekeeper = self._cleaner.keep_house(run, is_over=is_over)
        self._output_due = None
        if run.is_left and state == "reset":
            self._chain.end()  # the next call reports the loss, because this run reports nothing
        if self._check is None and not run.is_left:
            self._reporter.ended(run, housekeeper.left_out, state)
        if not is_quick:
            self._host.flush()
        if run.child is not None:
            run.child.close()
        self._run = None
        self._frozen.close()
        why = self._cleaner.why_not_clean(run, housekeeper)
        if self._check is not None:
            self._finish_check(self._check, run, why)
        else:
            self._finish(run, why)
        self._pools.stock()
        self._prepare_standby()
        self._load_at = time.monotonic() + QUIET_S

    def _finish(self, run: Run, why: str | None) -> None:
        """Report whether the container is clean after `run`, and end the container if it is not.
        `why` says why the container is not clean, and is None if it is clean.
        """
        if not run.is_left:
            self._host.send({"op": "reset", "id": run.id, "clean": why is None, "why": why})
        elif not self._host.is_gone:
            self._greet()
        if why is not None:
            end()

    def _prepare_standby(self) -> None:
        """If a JavaScript program is expected next, start a Node process that waits for it. Do
        nothing while the session has registered processes, or processes that hold its variables.
        """
        if not self._chain.pids and not self._registered.pids:
            self._standby.prepare()

    def _settle(self, run: Run) -> str | None:
        """After `run`, decide which processes go on holding the session's variables, and return
        what has become of the variables. `kept` means that those of the run, or of its trial, are
        kept. `rolled_back` means that they are as before the run. `reset` means that they are lost.
        Return None if there is nothing to report, for example after a file operation.
        """
        if not run.keep:
            return None
        action, token = run.trial or ("", "")
        if run.program == "python":
            stayed = run.stayed and run.killed_for is None and run.child is not None
            pid = run.child.pid if stayed and run.child else None
            is_trial = action == "hold"
            state = self._chain.put_aside(pid, token) if is_trial else self._chain.settle(pid)
            return "reset" if run.lost_variables else state
        if action == "adopt":
            return "kept" if self._chain.adopt(token) else "reset"
        if action == "drop":
            self._chain.drop(token)
        if run.program == "files":  # file operations do not report the state of variables
            return None
        return None if self._chain.look() else "reset"

    def _read_last_messages(self, run: Run) -> None:
        child = run.child
        assert child is not None
        for descriptor in (child.request_fd, child.stdout.descriptor, child.stderr.descriptor):
            self._unwatch(descriptor)
        for stream in (child.stdout, child.stderr):
            while not stream.is_over and stream.read(run.limits.output_bytes):
                pass
            if stream.is_over and run.killed_for is None:
                run.killed_for = "output"
        # A pipe's maximum size (pipe-max-size), because other processes may still be writing.
        most = run.received_bytes + (1 << 20)
        while child.reply_fd in self._selector.get_map():
            before = run.received_bytes
            self._on_reply()
            if run.received_bytes == before or run.received_bytes > most:
                self._unwatch(child.reply_fd)

    def _finish_check(self, check: selfcheck.SelfCheck, run: Run, why: str | None) -> None:
        enforces, faults = check.result(run, self._meter.read())
        self._check = None
        if why is not None:
            faults = [why, *faults]
        self._enforces = enforces
        self._host.ready(enforces, faults, self._streams.kinds, self._watched)

    def _unwatch(self, descriptor: int) -> None:
        if descriptor >= 0 and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    # -- registered processes ----------------------------------------------------------

    def _limits(self, config: dict[str, Any]) -> list[tuple[int, int]]:
        """Return the resource limits of registered processes, each as its RLIMIT constant and its
        value. They are the limits of a call's program, except that CPU time is not limited.
        """
        limits = limits_of(config)
        if self._counters.memory_limit is None:
            preloaded_bytes = max(map(address_space_bytes, self._pools.zygote_pids))
            limits.append((resource.RLIMIT_AS, preloaded_bytes + int(config["memory_bytes"])))
        if self._counters.process_limit is None:
            limits.append((resource.RLIMIT_NPROC, self._max_processes))
        if MARK is not None:
            limits.append((resource.RLIMIT_RTTIME, MARK - 1))
        return limits

    def _pids_of(self, run: Run) -> list[int]:
        """Return the ids of a run's processes. Registered processes are not among them."""
        child = run.child.pid if run.child is not None else 0
        if run.is_over:  # all other processes were killed
            return [child] if run.stayed else []
        return self._trees.strangers(self._chain.pids - {child})

    def _look_after_registered(self, run: Run | None) -> None:
        """If a keeper is dead, make sure that the processes below it are killed. `run` is the
        current run, or None.

        If there is no run, kill them now, and end the container if that fails. If there is one, the
        cleaning after it kills them. If the supervisor did not kill the keeper, also stop `run` for
        the reason "memory".
        """
        if not self._registered.has_lost:
            return
        # Without its keeper, a registered process looks like a process of a call. A keeper that the
        # supervisor did not kill was killed because memory ran out.
        was_surprised, self._registered.was_surprised = self._registered.was_surprised, False
        self._registered.has_lost = False
        if run is not None:
            if was_surprised:
                self._stop(run, "memory")
        elif not self._cleaner.end_the_rest():
            end()

    # -- a session's processes that wait ---------------------------------------------

    @staticmethod
    def _is_chained(run: Run | None) -> bool:
        """Return whether `run` is a session's Python run. Only such a run uses the processes that
        hold the session's variables. At all other times, these processes are suspended (SIGSTOP).
        """
        return run is not None and run.keep and run.program == "python"

    def _watch_chain(self, run: Run | None, now: float) -> None:
        """Check that the processes that hold the session's variables are suspended (SIGSTOP). Do
        nothing while a run uses them, or if the next check is not yet due.

        If one of them does not stay suspended, kill all of them. Between runs, also kill them if
        the container has other processes of programs. `run` is the current run or None, and `now`
        the current time.
        """
        if now < self._watch_at or not self._chain.pids or self._is_chained(run):
            return
        self._watch_at = now + WATCH_S
        if self._chain.are_asleep() and (run is not None or self._cleaner.is_left_alone()):
            return
        self._chain.end()
        # During a run, the cleaning after the run kills the rest.
        if run is None and not self._cleaner.end_the_rest():
            end()

    # -- time ----------------------------------------------------------------------

    def _until_next_timer(self) -> float:
        now = time.monotonic()
        times = [self._ends_at, self._waits_until()]
        if self._chain.pids and not self._is_chained(self._run):
            times.append(self._watch_at)
        if not self._pools.is_fat_loaded and self._run is None:
            times.append(self._load_at)
        if self._output_due is not None:
            times.append(self._output_due)
        run = self._run
        if self._is_watched and (run is not None or self._registered.pids):
            times.append(self._look_at)
        if run is not None and run.child is not None and run.killed_for is not None:
            times.append(run.look_at)
        if run is not None and run.child is not None and run.killed_for is None:
            times += [run.deadline, now + MEMORY_LOOK_S]
            if _has_cpu_limit(run):
                times.append(now + max(self._meter.left_cpu_s(run), 0.001))
        return max(0.0, min(times) - now)

    def _waits_until(self) -> float:
        """Return the time until which this container waits for another engine. If no engine has
        taken it over by then, it ends. Return infinity if the container does not wait.
        """
        if self._left_at is None or self._host.keep is None:
            return math.inf
        return self._left_at + self._host.keep.wait_s

    def _check_idle_time(self, now: float) -> None:
        if now >= min(self._ends_at, self._waits_until()):
            end()
        if not self._pools.is_fat_loaded and now >= self._load_at:
            self._pools.load_fat()
            self._pools.stock()

    def _check_time(self, now: float) -> None:
        run = self._run
        self._look_after_registered(run)
        if run is None:
            self._check_idle_time(now)
        self._watch_chain(run, now)
        if self._is_watched and now >= self._look_at:
            self._look_at = now + MEMORY_LOOK_S
            self._watch_memory(run)
        if run is None or run.child is None:
            return
        if self._output_due is not None and now >= self._output_due:
            self._output_due = None
            self._output_told = now
            for stream in (run.child.stdout, run.child.stderr):
                self._reporter.output(run, stream)
        if run.killed_for is not None:
            self._look_at_killed(run, run.child.pid, now)
            return
        if self._meter.is_out_of_memory(run):
            self._stop(run, "memory")
        elif now >= run.deadline:
            self._stop(run, "wall_time")
        elif _has_cpu_limit(run) and self._meter.left_cpu_s(run) <= 0:
            self._stop(run, "cpu_time")

    def _watch_memory(self, run: Run | None) -> None:
        """If the programs together use too much memory, stop `run` for this reason. If there is no
        run, end the container.
        """
        use = self._watch.look()
        if run is not None:
            run.watched_bytes = max(run.watched_bytes, use.memory_bytes)
            if use.threads >= self._max_processes:
                run.limits_hit.add("processes")
        if MARK is not None and self._has_too_many_files(run):
            return
        if self._watch.is_too_much(use):
            if run is None:
                self._fail("memory ran out between two runs")
            self._stop(run, "memory")

    def _has_too_many_files(self, run: Run | None) -> bool:
        """Check the files if the next look at them is due. If they are too large, stop `run`, whose
        files count as memory, or end the container if there is no run. Return whether they are.
        """
        before = time.monotonic()
        if before < self._files_look_at or not self._mounts.are_full():
            self._files_look_at = max(
                self._files_look_at, time.monotonic() + FILES_PAUSE * (time.monotonic() - before)
            )
            return False
        if run is None:
            self._fail("the files became too large between two runs")
        run.limits_hit.add("disk")
        self._stop(run, "memory")
        return True

    def _look_at_killed(self, run: Run, pid: int, now: float) -> None:
        """Check whether a killed run is over although no zygote has reported its end. `pid` is the
        run's first process, and `now` is the current time. Do nothing if the next check is not yet
        due.

        If `pid` is dead, conclude the run. Otherwise, suspend all registered processes (SIGSTOP)
        until the run is concluded.
        """
        if now >= run.look_at:
            run.look_at = now + HIDDEN_S
            # If it has ended, another process of the run prevents the report.
            if processes.has_ended(pid):
                self._conclude(run)
            elif self._registered.pids:
                # The process needs CPU time to end, and may have the lowest priority (SCHED_IDLE).
                self._frozen.enter_context(self._trees.frozen(self._chain.pids))()


def _has_cpu_limit(run: Run) -> bool:
    """Return whether the CPU time of `run` must be checked. This is so if the CPU limit is below
    the wall time limit, or if the wall clock was paused during the run.
    """
    return run.was_paused or run.limits.cpu_s < run.limits.wall_s


def _pause(run: Run, *, is_paused: bool) -> None:
    """If `is_paused` is True, pause the wall clock of a run, otherwise let it continue."""
    now = time.monotonic()
    if is_paused and run.left_s is None:
        run.left_s, run.deadline, run.was_paused = run.deadline - now, math.inf, True
    elif not is_paused and run.left_s is not None:
        run.deadline, run.left_s = now + run.left_s, None
