"""The requests of sessions and their files, each as a function that makes one."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fumehood.answers import Deleted, SessionAnswer, SessionFileList, SessionList, WrittenFile
from fumehood.client.api_request import ApiRequest, address, data_of, encode
from fumehood.client.errors import Refused
from fumehood.core.session import SessionRecord
from fumehood.protocol.messages import decode_envelope

MAKING_S = 120.0
"""How long the making of a session may take: it waits for a container."""

TURN_S = 60.0
"""How long a request may wait for its turn in a busy session, and for its end."""

UPLOAD_S = 900.0
"""How long an upload may take: as the engine allows."""


def sessions() -> ApiRequest[tuple[SessionRecord, ...]]:
    """The caller's own sessions."""
    read = data_of(SessionList)
    return ApiRequest("GET", address("sessions"), lambda raw: read(raw).items)


def create_session(**wishes: Any) -> ApiRequest[SessionRecord]:
    """A new one. Wishes that are None are left out."""
    body = {name: value for name, value in wishes.items() if value is not None}
    return ApiRequest("POST", address("sessions"), _session, encode(body), MAKING_S)


def session(session_id: str) -> ApiRequest[SessionRecord]:
    """One of the caller's own."""
    return ApiRequest("GET", address("sessions", session_id), _session)


def end_session(session_id: str) -> ApiRequest[SessionRecord]:
    """End it."""
    return ApiRequest("DELETE", address("sessions", session_id), _session, work_s=TURN_S)


def session_files(
    session_id: str,
    path: str = "",
    *,
    recursive: bool = False,
    limit: int | None = None,
    cursor: str | None = None,
) -> ApiRequest[SessionFileList]:
    """A page of what is in a session's workspace."""
    query = {
        "path": path or None,
        "recursive": "true" if recursive else None,
        "limit": limit,
        "cursor": cursor,
    }
    where = address("sessions", session_id, "files") + _query(query)
    return ApiRequest("GET", where, data_of(SessionFileList), work_s=TURN_S)


def put_file(session_id: str, path: str, *, mode: str = "replace") -> ApiRequest[WrittenFile]:
    """A file into a session; its bytes go beside the request."""
    where = _file(session_id, path) + _query({"mode": None if mode == "replace" else mode})
    return ApiRequest("PUT", where, data_of(WrittenFile), work_s=UPLOAD_S)


def get_file(session_id: str, path: str) -> ApiRequest[None]:
    """A file of a session; `read` is for a refusal in its place."""

    def refused(raw: bytes) -> None:
        raise Refused(decode_envelope(raw))

    return ApiRequest("GET", _file(session_id, path), refused, work_s=TURN_S)


def delete_file(session_id: str, path: str, *, recursive: bool = False) -> ApiRequest[None]:
    """A file or directory of a session, gone."""
    read = data_of(Deleted)

    def nothing(raw: bytes) -> None:
        read(raw)

    where = _file(session_id, path) + _query({"recursive": "true" if recursive else None})
    return ApiRequest("DELETE", where, nothing, work_s=TURN_S)


def _session(raw: bytes) -> SessionRecord:
    return data_of(SessionAnswer)(raw).session


def _file(session_id: str, path: str) -> str:
    """Raises ValueError where a part of the path would address something else."""
    return address("sessions", session_id, "files", *path.split("/"))


def _query(given: dict[str, Any]) -> str:
    chosen = {name: str(value) for name, value in given.items() if value is not None}
    return f"?{urlencode(chosen)}" if chosen else ""
