"""Anchors of the audit chain in a file beside the database, one line each.

Host side. Only added to. It is one place among others: whoever can write the state directory
can write this file, too, and anchors that are to hold against him are kept elsewhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fumehood.audit.verify import Anchor, read_anchors
from fumehood.storage.directory import PRIVATE_FILE

FILE_NAME = "audit-anchors.jsonl"
TAIL_BYTES = 4096
"""Some twenty lines."""


def add_anchor(state: Path, anchor: Anchor) -> None:
    """Add one line, on the disk when this returns. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(state / FILE_NAME, flags, PRIVATE_FILE)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        # A crash may have torn the last line; the new one must not be a part of it.
        is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        line = f"{json.dumps(shown(anchor))}\n".encode()
        os.write(descriptor, b"\n" + line if is_torn else line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_anchors(path: Path) -> list[Anchor]:
    """The anchors in a file of this kind, or in a log of JSON lines. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        return read_anchors(lines)


def own_anchors(state: Path) -> list[Anchor]:
    """Those that stand beside the database; none where there is no such file. Raises OSError."""
    try:
        return load_anchors(state / FILE_NAME)
    except FileNotFoundError:
        return []


def last_own_anchor(state: Path) -> Anchor | None:
    """The newest one that stands beside the database. Raises OSError."""
    try:
        with (state / FILE_NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    anchors = read_anchors(tail.splitlines())
    return anchors[-1] if anchors else None


def shown(anchor: Anchor) -> dict[str, int | str]:
    """An anchor as it is written down anywhere."""
    return {
        "seq": anchor.seq,
        "key_id": anchor.key_id,
        "mac": anchor.mac.hex(),
        "at": anchor.at,
    }
