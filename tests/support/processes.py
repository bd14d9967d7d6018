"""An engine's processes as the host sees them, independent of the guest's reports."""

from __future__ import annotations

from pathlib import Path

import psutil

from support.wait import wait_until

MADE_WITHIN_S = 0.05


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below one, as the kernel lists them now."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def guest_of(pid: int) -> psutil.Process:
    """The supervisor below a daemon."""
    children = psutil.Process(pid).children()
    (guest,) = [child for child in children if "fumehood.web.server" not in child.cmdline()]
    return guest


def children_of_guest(guest: psutil.Process) -> list[psutil.Process]:
    """The zygote, which started first, and the sealed children.

    Sorted by start time, because process ids wrap around.
    """
    return sorted(guest.children(), key=lambda process: process.create_time())


def sealed_children_of(guest: psutil.Process) -> list[psutil.Process]:
    """Wait until every child except the zygote has its filter, and return them."""
    wait_until(lambda: all(_is_filtered(child) for child in children_of_guest(guest)[1:]))
    return children_of_guest(guest)[1:]


def _is_filtered(process: psutil.Process) -> bool:
    try:
        return "\nSeccomp:\t2\n" in Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_computing(guest: psutil.Process) -> bool:
    """Whether a child has used more CPU time than its start takes, so that it runs a call."""
    return computing_child(guest) is not None


def computing_child(guest: psutil.Process) -> psutil.Process | None:
    """The child that runs a call, if any."""
    for child in children_of_guest(guest)[1:]:
        try:
            if child.cpu_times().user >= MADE_WITHIN_S:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended; an unreaped zombie counts as ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
