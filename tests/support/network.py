"""A network of its own: its loopback is not the machine's, and packets in it can be lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from support.wait import wait_until

LOOPBACK_UP = """
import fcntl, socket, struct
up = struct.pack("16sh14x", b"lo", 1)
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, up)
"""

OWN = "/proc/self/ns/net"


def free_port() -> int:
    """A port of loopback on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Network:
    """Programs whose command begins with `enter` are in it."""

    def __init__(self, pid: int) -> None:
        self.enter = ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]

    def run(self, command: Sequence[str]) -> bool:
        """Run a command in it; whether it succeeded."""
        done = subprocess.run(
            [*self.enter, *command], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
        return done.returncode == 0

    @contextmanager
    def cut(self, address: str) -> Iterator[None]:
        """Drop all packets from and to an address, as a cable that was pulled does."""
        rules = [["INPUT", way, address, "-j", "DROP"] for way in ("-s", "-d")]
        for rule in rules:
            assert self.run(["iptables", "-A", *rule])
        try:
            yield
        finally:
            for rule in rules:
                assert self.run(["iptables", "-D", *rule])


@contextmanager
def own_network() -> Iterator[Network]:
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as keeper:
        network = Network(keeper.pid)
        wait_until(lambda: os.readlink(f"/proc/{keeper.pid}/ns/net") != os.readlink(OWN))
        assert network.run([sys.executable, "-c", LOOPBACK_UP])
        yield network
        keeper.stdin.close()
