"""The user of a container's programs, and how a process of this guest becomes it, for good.

Guest side. Its processes have no group, no capability and no way back.
"""

from __future__ import annotations

import os

from fumehood.guest.core import kernel

USER_ID = 10_001
"""User and group id of programs; the image has an entry for it."""

REQUEST_FAILED = 71
"""A child's exit code if the request could not be set up, such as a file that does not fit."""


def become_user() -> None:
    """Raises OSError if any step fails; the process must end then."""
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    kernel.drop_capabilities()
