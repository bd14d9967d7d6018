"""Files between a session and here: what is read and written on this side.

The names and bytes in a session are a stranger's. A file is written as those of a program are
(`saving`): one name in an open directory, over nothing that was there. What is sent is a plain
file, and a link is none, so that nobody sends more than was named.
"""

from __future__ import annotations

import codecs
import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.answers import WrittenFile
from fumehood.cli.escaping import printable
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.saving import SaveFailed, Saving
from fumehood.client.files import plain_file

if TYPE_CHECKING:
    from fumehood.client import Client


def save_file(
    client: Client, session_id: str, path: str, target: str | None, *, force: bool
) -> None:
    """Write a file of the session here: to `target`, into it, or under its own name."""
    directory, name = _place(path, target)
    try:
        with Saving(directory, force=force) as saving:
            saving.save(
                {"filename": name, "url": path},
                lambda url, write: client.download_file(session_id, url, write),
            )
    except SaveFailed as reason:
        fail(f"{printable(name)} was not saved: {reason}", ExitCode.TOOL_FAILED)


def show_file(client: Client, session_id: str, path: str) -> None:
    """A file of the session to standard output; on a terminal so that it can do nothing there."""
    stream = sys.stdout
    if not stream.isatty():
        stream.flush()
        client.download_file(session_id, path, stream.buffer.write)
        stream.buffer.flush()
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    client.download_file(
        session_id, path, lambda data: stream.write(printable(decoder.decode(data)))
    )
    stream.write(printable(decoder.decode(b"", final=True)))
    stream.flush()


def send_file(client: Client, session_id: str, source: str, path: str, *, mode: str) -> WrittenFile:
    """Send a plain file of this machine, or standard input."""
    if source == "-":
        return client.put_file(session_id, path, sys.stdin.buffer, mode=mode)
    try:
        with plain_file(Path(source), follow=False) as file:
            return client.put_file(session_id, path, file, mode=mode)
    except OSError as error:
        shown = printable(source)
        if error.errno == errno.ELOOP:
            fail(f"{shown} is a symbolic link. Name the file that it leads to.", ExitCode.USAGE)
        fail(f"{shown} cannot be read: {error.strerror}.", ExitCode.USAGE)


def _place(path: str, target: str | None) -> tuple[Path, str]:
    """The directory, and the one name in it."""
    own_name = path.rpartition("/")[2]
    if target is None:
        return Path(), own_name
    where = Path(target)
    if target.endswith("/") or where.is_dir():
        return where, own_name
    return where.parent, where.name
