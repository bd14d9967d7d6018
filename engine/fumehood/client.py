"""The client: talks to a daemon over its socket, with the engine's own method names.

Client side. It knows the wire and the model, nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx2

from fumehood.model.call_log import CallPage, CallRecord
from fumehood.model.envelope import Envelope
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition
from fumehood.wire import strict_json
from fumehood.wire.messages import decode_envelope

CONNECT_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 30.0
"""How much longer than the longest call this side waits for an answer."""

PAGE = 100
"""Tools of one request while all of them are read: the most that the engine gives."""

LONGEST_CALL_S = 600.0


class DaemonUnavailable(Exception):
    """No daemon answers on the socket. The message says how to start one."""


class Refused(Exception):
    """The engine refused; `envelope` says why."""

    def __init__(self, envelope: Envelope) -> None:
        super().__init__(envelope.error.message if envelope.error is not None else "refused")
        self.envelope = envelope


class Client:
    """A synchronous client. A context manager; leaving it closes the connection.

    Raises:
        DaemonUnavailable: from every method, where nobody answers or not in time.
    """

    def __init__(self, socket_path: Path | str, *, credential: str | None = None) -> None:
        """`credential` is a token, or an approver's credential for the control socket."""
        self._path = Path(socket_path)
        self._headers = {"authorization": f"Bearer {credential}"} if credential else {}
        self._http = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(self._path)),
            base_url="http://fumehood",
            timeout=httpx2.Timeout(LONGEST_CALL_S + ANSWER_GRACE_S, connect=CONNECT_TIMEOUT_S),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def call(self, tool: str, arguments: JsonObject | None = None, **options: Any) -> Envelope:
        """Call a tool; the answer is always an envelope.

        Raises:
            ValueError: the arguments or options are not JSON, so nothing was sent.
        """
        return self._envelope(
            "POST",
            f"/v1/tools/{_quoted(tool)}/call",
            {"arguments": arguments or {}, "options": options},
        )

    def tools(self, **filters: str) -> list[ToolDefinition]:
        """The preferred version of every tool, or of those of a `category`, `tag` or `type`.

        Raises:
            Refused: the engine answers, but not to this caller, or it knows no such filter.
        """
        return [tool for tool, _ in self.tools_and_sources(**filters)]

    def tools_and_sources(self, **filters: str) -> Iterator[tuple[ToolDefinition, str]]:
        """The same one after the other, each with where it comes from.

        Raises:
            Refused: as `tools`.
        """
        page: dict[str, str] = {"limit": str(PAGE)}
        while True:
            envelope = self.tools_page(**filters, **page)
            if envelope.error is not None:
                raise Refused(envelope)
            sources = envelope.data["sources"]
            for item in envelope.data["items"]:
                yield ToolDefinition.model_validate(item), sources[item["name"]]
            cursor = envelope.data["pagination"]["next_cursor"]
            if cursor is None:
                return
            if cursor == page.get("cursor"):
                raise self._stranger()  # a list that never ends is none of the engine's
            page["cursor"] = cursor

    def tools_page(self, **query: str) -> Envelope:
        """One page: `limit`, `cursor`, `category`, `tag`, `type` as in the HTTP reference."""
        return self._envelope("GET", f"/v1/tools?{urlencode(query)}")

    def tool(self, reference: str) -> Envelope:
        """One tool's definition, in an envelope that may hold TOOL_NOT_FOUND."""
        return self._envelope("GET", f"/v1/tools/{_quoted(reference)}")

    def calls(self, **query: Any) -> CallPage:
        """A page of this caller's own calls, newest first.

        `query` is that of `CallQuery`: since, until, agent, tool, code, limit, cursor.

        Raises:
            Refused: the query is wrong, or its cursor is too old.
        """
        chosen = {name: _text(value) for name, value in query.items() if value is not None}
        envelope = self._envelope("GET", "/v1/calls" + (f"?{urlencode(chosen)}" if chosen else ""))
        if envelope.error is not None:
            raise Refused(envelope)
        data = envelope.data
        return CallPage.model_validate({"items": data["items"], **data["pagination"]})

    def call_record(self, call_id: str) -> CallRecord:
        """One call of this caller's own.

        Raises:
            Refused: no such call, somebody else's, or no longer kept.
        """
        envelope = self._envelope("GET", f"/v1/calls/{_quoted(call_id)}")
        if envelope.error is not None:
            raise Refused(envelope)
        return CallRecord.model_validate(envelope.data["call"])

    def ready(self) -> JsonObject:
        """Whether calls are served, and what each wall enforces."""
        answer = self._request("GET", "/v1/ready")
        try:
            status = strict_json.loads(answer.content)
        except strict_json.StrictJsonError:
            raise self._stranger() from None
        if not isinstance(status, dict) or "status" not in status:
            raise self._stranger()
        return status

    def request(self, method: str, path: str, body: JsonObject | None = None) -> Envelope:
        """Any other address that answers with an envelope.

        Raises:
            ValueError: the body is not JSON, so nothing was sent.
        """
        return self._envelope(method, path, body)

    def _envelope(self, method: str, path: str, body: JsonObject | None = None) -> Envelope:
        answer = self._request(method, path, body)
        try:
            return decode_envelope(answer.content)
        except ValueError:
            raise self._stranger() from None

    def _stranger(self) -> DaemonUnavailable:
        return DaemonUnavailable(f"What answers on {self._path} is not a fumehood engine.")

    def _request(self, method: str, path: str, body: JsonObject | None = None) -> httpx2.Response:
        try:
            content = None if body is None else strict_json.dumps(body)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"The call is not JSON: {error}.") from None
        headers = {**self._headers}
        if content is not None:
            headers["content-type"] = "application/json"
        try:
            return self._http.request(method, path, content=content, headers=headers)
        except httpx2.ConnectError:
            raise DaemonUnavailable(
                f"No engine answers on {self._path}. Start one with: fumehood serve"
            ) from None
        except httpx2.HTTPError as error:
            raise DaemonUnavailable(
                f"The connection to {self._path} gave no answer ({type(error).__name__}). "
                "See the engine's log; it may have been stopped, or it is no fumehood engine."
            ) from None


def _quoted(name: str) -> str:
    return quote(name, safe="@")


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
