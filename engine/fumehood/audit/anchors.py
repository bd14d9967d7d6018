"""Anchors of the audit chain in a file beside the database, one line each.

Host side, append only. It is one place among others: whoever can write the state directory can also
write this file, so anchors that must hold against such a person are kept elsewhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fumehood.audit.verify import Anchor, read_anchors
from fumehood.storage.directory import PRIVATE_FILE

FILE_NAME = "audit-anchors.jsonl"
TAIL_BYTES = 4096
"""About twenty lines."""


def add_anchor(state: Path, anchor: Anchor) -> None:
    """Append one line, durable when this returns. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(state / FILE_NAME, flags, PRIVATE_FILE)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        # A crash may have torn the last line; the new one must start a line of its own.
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
    """The anchors beside the database; empty if the file does not exist. Raises OSError."""
    try:
        return load_anchors(state / FILE_NAME)
    except FileNotFoundError:
        return []


def last_own_anchor(state: Path) -> Anchor | None:
    """The newest anchor beside the database. Raises OSError."""
    try:
        with (state / FILE_NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    anchors = read_anchors(tail.splitlines())
    return anchors[-1] if anchors else None


def shown(anchor: Anchor) -> dict[str, int | str]:
    """An anchor as JSON."""
    return {
        "seq": anchor.seq,
        "key_id": anchor.key_id,
        "mac": anchor.mac.hex(),
        "at": anchor.at,
    }
