"""What can go wrong with the state itself, in words for the operator."""

from __future__ import annotations


class StoreError(Exception):
    """The state cannot be read or written. The message says what to do."""


class NewerState(StoreError):
    """A newer engine wrote this database; an older one would not keep its promises."""


class DamagedState(StoreError):
    """The database is not readable as one. It is left exactly as it was found."""


class WriteFailed(StoreError):
    """Nothing of this write was kept: the disk is full, read-only or failing."""
