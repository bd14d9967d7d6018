"""Sessions and their files, as methods of `Client`."""

from __future__ import annotations

from pathlib import Path

from fumehood.answers import SessionFileList, WrittenFile
from fumehood.client.files import Source, chunks_of, new_file, opened, size_of
from fumehood.client.requests import sessions
from fumehood.client.transport import BlockingTransport, Write
from fumehood.core.session import SessionRecord


class SessionMethods:
    """A part of `Client`. Every method raises Refused where the engine says no."""

    _transport: BlockingTransport

    def sessions(self) -> tuple[SessionRecord, ...]:
        """This caller's own sessions, newest first, also those that ended in the last day."""
        return self._transport.send(sessions.sessions())

    def session(self, session_id: str) -> SessionRecord:
        """One of this caller's own."""
        return self._transport.send(sessions.session(session_id))

    def create_session(
        self,
        *,
        image: str | None = None,
        agent_id: str | None = None,
        memory_mb: int | None = None,
        idle_seconds: float | None = None,
        lifetime_seconds: float | None = None,
    ) -> SessionRecord:
        """Make a session; what is absent is as the engine was configured.

        Its `id` is the option `session_id` of calls.
        """
        request = sessions.create_session(
            image=image,
            agent_id=agent_id,
            memory_mb=memory_mb,
            idle_seconds=idle_seconds,
            lifetime_seconds=lifetime_seconds,
        )
        return self._transport.send(request)

    def end_session(self, session_id: str) -> SessionRecord:
        """End a session with whatever runs in it; its files are gone."""
        return self._transport.send(sessions.end_session(session_id))

    def session_files(
        self,
        session_id: str,
        path: str = "",
        *,
        recursive: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> SessionFileList:
        """A page of what is in a session's workspace, or in one directory of it, by path."""
        request = sessions.session_files(
            session_id, path, recursive=recursive, limit=limit, cursor=cursor
        )
        return self._transport.send(request)

    def put_file(
        self, session_id: str, path: str, source: Source, *, mode: str = "replace"
    ) -> WrittenFile:
        """Write a file of a session: bytes, a file of this machine, or one that is open.

        It appears whole or not at all; with mode `create`, only where there is none.

        Raises:
            ValueError: no plain file, or a path that could not be addressed.
        """
        request = sessions.put_file(session_id, path, mode=mode)
        with opened(source) as content:
            size = size_of(content)
            return self._transport.upload(request, chunks_of(content, size), size)

    def get_file(self, session_id: str, path: str) -> bytes:
        """The whole of a file of a session, held in memory.

        Raises:
            DaemonUnavailable: also where the file was changed meanwhile.
        """
        content = bytearray()
        self._transport.download(sessions.get_file(session_id, path), content.extend)
        return bytes(content)

    def download_file(self, session_id: str, path: str, target: Path | str | Write) -> None:
        """A file of a session into a new file, or to a function, piece by piece.

        Raises:
            FileExistsError: there is such a file already.
            DaemonUnavailable: also where the file was changed meanwhile; no new file is left.
        """
        request = sessions.get_file(session_id, path)
        if not isinstance(target, Path | str):
            self._transport.download(request, target)
            return
        with new_file(Path(target)) as write:
            self._transport.download(request, write)

    def delete_file(self, session_id: str, path: str, *, recursive: bool = False) -> None:
        """Delete a file of a session, a link itself, or a directory."""
        self._transport.send(sessions.delete_file(session_id, path, recursive=recursive))
