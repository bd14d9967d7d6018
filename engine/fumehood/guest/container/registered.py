"""The supervisor's side of registered processes: their keepers, and the host's requests about them.

Guest side. The supervisor forks a keeper for each registered process, and forwards requests to it.
The supervisor never waits: it answers a request once the keeper has reported. If the keeper never
reports, the host gives up. Invariants: each request gets at most one answer; at most
`MAX_PROCESSES` processes run, and records of as many ended processes are kept.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fumehood.guest.container import processes
from fumehood.guest.container.host import Host
from fumehood.guest.container.keeper import Ring, run_keeper, the_filter
from fumehood.guest.container.walk import Refused
from fumehood.guest.core.pipes import CHUNK_BYTES
from fumehood.protocol import framing
from fumehood.protocol.framing import MAX_PROCESSES, OUTPUT_PIECE_BYTES


@dataclass(eq=False)
class _Process:
    name: str
    keeper_pid: int
    orders: socket.socket
    """The socket to the process's keeper."""
    ring: Ring
    started_at: float
    state: str = "starting"
    exit_code: int | None = None
    signal: int | None = None
    is_lost: bool = False
    """Whether the process was lost, because its keeper was killed."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Id of each request that was not answered yet → the kind of the request, such as `stop`."""
    decoder: framing.Decoder = field(
        default_factory=lambda: framing.Decoder(framing.MAX_REQUEST_BYTES)
    )
    unsent: bytearray = field(default_factory=bytearray)

    def shown(self) -> dict[str, Any]:
        """Return the process's name, state, exit code, signal, start time, and whether it was lost,
        in the form that the host receives.
        """
        return {
            "name": self.name, "state": self.state, "exit_code": self.exit_code,
            "signal": self.signal, "lost": self.is_lost, "started_at": self.started_at,
        }  # fmt: skip


class Registered:
    """The registered processes of a session, which continue to run when the call that started them
    has ended. Each of them has a keeper, which is a process and its parent.
    """

    def __init__(
        self,
        host: Host,
        selector: selectors.BaseSelector,
        limits: Callable[[], list[tuple[int, int]]],
        before_start: Callable[[], None],
        *,
        is_watched: bool,
    ) -> None:
        """`host` is the connection to the host, and `selector` watches the keepers' sockets.
        `limits` returns the resource limits of a registered process, each as its RLIMIT constant
        and its value. `before_start` is called before a registered process is started. `is_watched`
        says that no control group limits the memory.
        """
        self._host = host
        self._selector = selector
        self._limits = limits
        self._before_start = before_start
        self._is_watched = is_watched
        self._all: dict[str, _Process] = {}
        """Name → registered process, in the order of their starts."""
        self._keepers: dict[int, _Process] = {}
        """Process id of each keeper that exists → the registered process that it keeps."""
        self._told = 0
        self.has_lost = False
        """Whether there may be processes without a keeper, because their keeper was killed or does
        not become the parent of orphans.
        """
        self.get_orphans = True
        """Whether keepers become the parents of the orphans below them."""
        self.was_surprised = False
        """Whether a keeper was killed by something other than the supervisor."""

    @property
    def pids(self) -> set[int]:
        """Process ids of all keepers that are not yet reaped."""
        return set(self._keepers)

    @property
    def running(self) -> int:
        """The number of registered processes that have not ended."""
        return sum(one.state == "running" for one in self._all.values())

    def on_request(self, request: dict[str, Any]) -> None:
        """Carry out a request of the host, such as to start or stop a registered process, and send
        the answer. If a keeper must report first, the answer is sent later.
        """
        try:
            answer = self._handle(request)
        except Refused as refused:
            answer = _fault(refused.kind, str(refused))
        if answer is not None:
            self._answer(request["id"], answer)

    def on_reaped(self, pid: int) -> bool:
        """Release the keeper with the process id `pid`, which was reaped. Return False if `pid` is
        not a keeper, otherwise True.

        If the keeper's registered process has not ended, it is recorded as lost.
        """
        process = self._keepers.get(pid)
        if process is None:
            return False
        while self._read(process):
            pass
        del self._keepers[pid]
        self._unwatch(process)
        process.orders.close()
        if process.state != "ended":
            self.has_lost = True
            self.was_surprised = self.was_surprised or not process.is_lost
            process.is_lost = True
            self._on_over(process)
        return True

    def kill_all(self) -> None:
        """Kill all keepers. The processes below them survive until the cleaning kills them, which
        the caller must ensure.
        """
        for process in self._keepers.values():  # the cleaning spares only what is below keepers
            process.is_lost = True
            processes.send(process.keeper_pid, signal.SIGKILL)

    def leave(self) -> None:
        """Forget all requests that were not answered, because the host that sent them is gone."""
        for process in self._all.values():
            process.waiting.clear()

    def tell(self) -> None:
        """Report the number of running registered processes to the host."""
        self._told = self.running
        self._host.send({"op": "processes", "running": self._told})

    # -- requests --------------------------------------------------------------------------

    def _handle(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Carry out a request of the host, and return the answer. Return None if the answer is sent
        later, when the keeper has reported.

        Raises Refused if the request cannot be carried out.
        """
        if self._host.keep is None:
            raise Refused("unavailable", "Only the container of a session has processes.")
        if request["do"] == "list":
            begun = [one for one in self._all.values() if one.state != "starting"]
            return {"processes": [one.shown() for one in begun]}
        if request["do"] == "start":
            self._start(request)
            return None
        process = self._all.get(request["name"])
        if process is None:
            shown = ascii(request["name"])
            raise Refused("not_found", f"No process of this session is called {shown}.")
        if request["do"] == "read":
            piece = process.ring.read(
                request["after"], OUTPUT_PIECE_BYTES, is_over=process.state == "ended"
            )
            return {
                "output": {
                    "text": piece.text, "offset": piece.offset, "skipped": piece.skipped,
                    "ended": piece.is_last,
                }
            }  # fmt: skip
        if request["do"] == "stop":
            if process.state == "ended":
                return {"process": process.shown()}
            self._order(process, request, {"grace_s": request["grace_s"]})
            return None
        if process.state == "ended":
            raise Refused("invalid", "The process has ended.")
        order = {"data": request["data"], "close": request["close"]}
        self._order(process, request, order)
        return None

    def _start(self, request: dict[str, Any]) -> None:
        name = request["name"]
        before = self._all.get(name)
        if before is not None and before.state != "ended":
            raise Refused("invalid", f"{name} runs already. Stop it first, or give another name.")
        if sum(one.state != "ended" for one in self._all.values()) >= MAX_PROCESSES:
            raise Refused("invalid", f"{MAX_PROCESSES} processes of this session run already.")
        self._before_start()
        the_filter(is_watched=self._is_watched)  # built once, and not in each keeper
        ours, theirs = socket.socketpair()
        ring = Ring()
        config = {"limits": self._limits(), "is_watched": self._is_watched}
        try:
            pid = processes.fork()
        except OSError as error:
            for one in (ring, ours, theirs):
                one.close()
            raise Refused("unavailable", f"It cannot be started: {error.strerror}.") from None
        if pid == 0:
            run_keeper(theirs, ring, config, request)
        theirs.close()
        ours.setblocking(False)
        self._forget(name)
        process = _Process(name, pid, ours, ring, time.time())
        self._all[name] = self._keepers[pid] = process
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._on_event(process))
        process.waiting[request["id"]] = "start"

    def _order(self, process: _Process, request: dict[str, Any], order: dict[str, Any]) -> None:
        process.unsent += framing.encode({"id": request["id"], "do": request["do"], **order})
        process.waiting[request["id"]] = request["do"]
        self._send(process)

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        self._told = self.running
        self._host.send({"op": "process", "id": number, "running": self._told, **answer})

    # -- keepers ---------------------------------------------------------------------------

    def _on_event(self, process: _Process) -> None:
        if self._keepers.get(process.keeper_pid) is not process:
            return  # the keeper's end was handled in the same turn of the loop
        self._read(process)
        if process.unsent:
            self._send(process)

    def _send(self, process: _Process) -> None:
        try:
            del process.unsent[: process.orders.send(process.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the keeper is gone, and will be reaped
            process.unsent.clear()
        if process.orders in self._selector.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
            self._selector.modify(process.orders, events, lambda: self._on_event(process))

    def _unwatch(self, process: _Process) -> None:
        if process.orders in self._selector.get_map():
            self._selector.unregister(process.orders)

    def _read(self, process: _Process) -> bool:
        """Read and handle the messages of a process's keeper. Return False if there are none
        now.
        """
        try:
            data = process.orders.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        for message in process.decoder.feed(data):
            self._on_message(process, message)
        if not data:
            self._unwatch(process)  # the keeper is gone, and will be reaped
        return bool(data)

    def _on_message(self, process: _Process, message: dict[str, Any]) -> None:
        if "started" in message:
            process.state = "running"
            self.get_orphans = message["gets_orphans"]
            self._settle(process, "start", {"process": process.shown()})
        elif "failed" in message:
            self._settle(process, "start", _fault("invalid", message["failed"]))
            process.state = "ended"
            self._forget(process.name)
        elif "first" in message:
            process.exit_code = message["first"]["exit_code"]
            process.signal = message["first"]["signal"]
        elif "over" in message:
            self.has_lost = self.has_lost or not self.get_orphans
            self._on_over(process)
        elif process.waiting.pop(message["id"], None) is not None:
            fault = message["fault"]
            self._answer(
                message["id"],
                {"process": process.shown()} if fault is None else _fault("invalid", fault),
            )

    def _on_over(self, process: _Process) -> None:
        """Record the end of a registered process, and answer the requests that wait for it.

        If more than `MAX_PROCESSES` ended processes are recorded, forget the oldest.
        """
        process.state = "ended"
        lost = _fault("unavailable", "It was killed, because its keeper was.")
        self._settle(process, "stop", lost if process.is_lost else {"process": process.shown()})
        self._settle(process, "start", lost)
        self._settle(process, "write", _fault("invalid", "The process has ended."))
        ended = [one for one in self._all.values() if one.state == "ended"]
        for one in ended[:-MAX_PROCESSES]:
            self._forget(one.name)
        if self.running < self._told:
            self.tell()

    def _settle(self, process: _Process, do: str, answer: dict[str, Any]) -> None:
        """Answer all requests of the kind `do`, such as `stop`, that wait for this process."""
        for number in [one for one, kind in process.waiting.items() if kind == do]:
            del process.waiting[number]
            self._answer(number, answer)

    def _forget(self, name: str) -> None:
        process = self._all.pop(name, None)
        if process is not None:
            process.ring.close()


def _fault(kind: str, message: str) -> dict[str, Any]:
    return {"fault": {"kind": kind, "message": message}}
