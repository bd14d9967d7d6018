"""Places of sessions: how many may run, how much memory they are promised, how many have disks.

Host side, pure; used by `sessions`. Each is counted in total and for each principal. Invariants:
running sessions are never promised more than three quarters of the host's memory together, and one
principal three quarters of that; what is taken is given back once.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from fumehood.core.errors import QuotaExceeded
from fumehood.core.fair_share import FairShare, Lack
from fumehood.sandbox.settings import SessionSettings
from fumehood.sandbox.wall import HostSize

PROMISED = 0.75
"""Part of the host's memory that sessions are promised together, and the part of that for one
principal.
"""


class Missing(NamedTuple):
    """What a session would need to run, and whose limit is reached."""

    share: FairShare
    unit: str
    lack: Lack


class SessionPlaces:
    """What sessions take, including those that are being created."""

    def __init__(self, settings: SessionSettings) -> None:
        self.running = FairShare(settings.max, settings.max_of_one)
        """Sessions that are not stopped."""
        self.disks = FairShare(settings.max_disks, (settings.max_disks + 1) // 2)
        """Sessions with a disk."""
        self.saved = FairShare(settings.max_saved_mb, settings.max_saved_mb // 2)
        """MB of the workspaces of durable sessions."""
        self._memory = FairShare(sys.maxsize, sys.maxsize)
        """MB of those that are not stopped."""

    def take(self, principal_id: str, memory_mb: int, host: HostSize) -> Missing | None:
        """Count one more session that runs, and its memory. Return what prevents that, or None."""
        if host.memory_mb:
            self._memory.most = round(host.memory_mb * PROMISED)
            self._memory.most_of_one = round(self._memory.most * PROMISED)
        for share, unit, amount in ((self.running, "sessions", 1), (self._memory, "MB", memory_mb)):
            lack = share.lacks(principal_id, amount)
            if lack is not None:
                return Missing(share, unit, lack)
        self.add(principal_id, memory_mb)
        return None

    def add(self, principal_id: str, memory_mb: int) -> None:
        """Count a session that runs already."""
        self.running.add(principal_id)
        self._memory.add(principal_id, memory_mb)

    def give_back(self, principal_id: str, memory_mb: int) -> None:
        """Count one session less that runs."""
        self.running.give_back(principal_id)
        self._memory.give_back(principal_id, memory_mb)

    def refusal(self, missing: Missing, principal_id: str, memory_mb: int) -> QuotaExceeded:
        """Return the error for a session that must not run for lack of something."""
        share, unit, _ = missing
        return QuotaExceeded(
            f"The engine has no room for another session of {memory_mb} MB: {share.total} of "
            f"{share.most} {unit} are promised, {share.of(principal_id)} of {share.most_of_one} to "
            "you. End a session, or stop one that has a disk: fumehood sessions end ID, fumehood "
            "sessions stop ID.",
            retryable=True,
        )

    def take_disks(self, principal_id: str, number: int) -> None:
        """Count more sessions with a disk. Raises QuotaExceeded."""
        if self.disks.take(principal_id, number) is not None:
            raise QuotaExceeded(
                f"You have {self.disks.of(principal_id)} sessions with a disk, and this engine "
                f"{self.disks.total}; it may have {self.disks.most}, and one caller "
                f"{self.disks.most_of_one}. End one of them first: fumehood sessions end ID."
            )

    def take_saved(self, principal_id: str, mb: int) -> None:
        """Count the workspace of one more durable session. Raises QuotaExceeded."""
        if self.saved.take(principal_id, mb) is not None:
            raise QuotaExceeded(
                f"Workspaces of {self.saved.total} MB are saved, {self.saved.of(principal_id)} MB "
                f"of them yours; {self.saved.most} MB may be, and {self.saved.most_of_one} MB of "
                f"one caller. This one has {mb} MB. End a durable session first, or make a smaller "
                "one."
            )
