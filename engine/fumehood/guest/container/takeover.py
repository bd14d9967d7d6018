"""Takeover: another engine becomes the host of a session whose own engine is gone.

Guest side. The container runtime of the next engine starts a sender. This process passes the next
engine's streams to the supervisor, through a socket in the container's network namespace. With
Docker, the sender is `relay`, which runs in the container (`docker exec`), passes its own standard
input and output, and waits until the supervisor releases it. Programs can also reach this socket.
So the supervisor accepts a message only if the operating system confirms that its sender runs as
root and that no process in the container has started the sender. The sender is read from each
message (SCM_CREDENTIALS), because gVisor's SO_PEERCRED returns the credentials of the reader.
Invariant: a host is refused if its epoch is not higher than that of the current host.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from fumehood.guest.container import processes
from fumehood.guest.container.places import MARK, TAKEOVER
from fumehood.guest.core.pipes import receive

DESCRIPTORS = 3
"""Number of descriptors in a relay's message. They are the relay's input, its output, and one end
of a socket that stays open until the relay is released.
"""

EPOCH_BYTES = 16
REFUSED = 3
"""Exit code of a relay that was refused or released."""


class Takeover:
    """The supervisor's side of takeovers, in which another engine becomes the host of this
    container.

    The other engine starts a relay in the container. A relay is a process that passes its own input
    and output to the supervisor. This object receives the messages of relays. The last accepted
    relay stays alive until `let_go` releases it.
    """

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.listener.bind(TAKEOVER)
        self.listener.setblocking(False)
        self._held: int | None = None
        self.processes = 0
        """Number of processes of the current relay in this container: 1, or 0 if there is no relay
        or if it runs outside.
        """

    def accept(self, epoch: int) -> tuple[int, int, int] | None:
        """Receive a relay's message. Return the epoch of the relay's engine, which is now the host,
        and descriptors of the relay's input and output. Return None if the message is refused, for
        example because its epoch is not above `epoch`.
        """
        try:
            said, descriptors, sender = receive(self.listener, EPOCH_BYTES, DESCRIPTORS)
        except OSError:
            return None
        is_higher = said.isdigit() and int(said) > epoch
        is_hosts = sender is not None and _is_of_host(*sender[:2])
        if not is_hosts or len(descriptors) != DESCRIPTORS or not is_higher:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        self.let_go()
        readable, writable, self._held = descriptors
        assert sender is not None
        self.processes = int(sender[0] != 0 and MARK is None)
        return int(said), readable, writable

    def let_go(self) -> None:
        """Release the current relay, if there is one, so that it ends."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
            self.processes = 0


def _is_of_host(pid: int, user: int) -> bool:
    """Return whether the sender of a message is an engine, or a relay that an engine has started.
    `user` is the user of the process `pid`.
    """
    if MARK is not None:  # programs have no sockets, and other users cannot reach this one
        return user in (0, os.geteuid()) and pid not in processes.all_pids()
    # The user root alone proves nothing: the guest's own processes also run as root.
    return user == 0 and processes.origin_of(pid) == 0


def relay(config: dict[str, Any]) -> None:
    """Make the engine that has started this process the host of the container. For this, pass this
    process's standard input and output to the supervisor. Exit when the supervisor has refused or
    released this process. `config["epoch"]` is the number of the engine.
    """
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.connect(TAKEOVER)
        socket.send_fds(end, [str(int(config["epoch"])).encode()], [0, 1, theirs.fileno()])
    theirs.close()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    ours.recv(1)
    os._exit(REFUSED)
