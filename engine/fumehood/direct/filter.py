"""The system-call filter of everything in a sandbox, including the guest itself.

Host side, pure functions. A program in the sandbox has the guest's own filter also, which is
stricter. Invariant: this filter refuses whatever Docker's default profile refuses to a container
without capabilities, and `ptrace`, `userfaultfd`, keyrings and other access to processes as well.
"""

from __future__ import annotations

from functools import lru_cache

from fumehood.guest.container.filter import ALLOWED, DECIDED, ENOSYS, UNCOUNTED
from fumehood.guest.core import seccomp
from fumehood.guest.core.syscalls import HIGHEST_KNOWN

MORE = (
    "fcntl", "ioctl", "prctl", "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime",
    "timer_settime", "setuid", "setgid", "setreuid", "setregid", "setfsuid", "setfsgid",
)  # fmt: skip
"""System calls that the guest or an operator's program may make, but no program of a call."""

NARROWED = ("clone", "clone3", "personality", "socket", "socketpair")
"""System calls for which the rule of programs is also that of the guest."""


@lru_cache(maxsize=3)
def build_outer_filter(*, may_compare: bool = False, counts_memory: bool = False) -> bytes:
    """Return the filter for this machine's architecture, as bytes for `seccomp.install`.

    `may_compare` says whether the guest may compare the memory of processes (kcmp), with which it
    watches them. `counts_memory` says whether memory that a watch does not find is refused, as it
    is to programs.

    Raises:
        OSError: the architecture is not supported.
    """
    rules = {name: DECIDED[name] for name in NARROWED}
    more = (*MORE, "kcmp") if may_compare else MORE
    rules |= {name: [seccomp.allow()] for name in (*ALLOWED, *more)}
    rules |= UNCOUNTED if counts_memory else {}
    newer = seccomp.refuse_greater(HIGHEST_KNOWN, ENOSYS)
    return seccomp.build(None, rules, *newer, seccomp.refuse())
