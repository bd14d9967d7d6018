"""Which failed request may be sent again, and what an endpoint refuses."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fumehood.client.api_request import ApiRequest, call_read_by, object_of
from fumehood.client.exchange import Endpoint, Progress, may_send_again, unavailable

DROPPED = [httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError]
OTHERS = [
    httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ReadTimeout, httpx2.WriteTimeout,
    httpx2.PoolTimeout, httpx2.LocalProtocolError, httpx2.DecodingError,
]  # fmt: skip

HEALTH = ApiRequest("GET", "/v1/health", object_of)


def request(method: str) -> ApiRequest[Any]:
    return ApiRequest(method, "/v1/x", lambda raw: raw)


def progress(*events: str) -> Progress:
    made = Progress()
    for event in events:
        made.note(event, {})
    return made


HEAD = "http11.send_request_headers"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("error", DROPPED)
def test_change_is_sent_again_only_where_its_head_failed(
    method: str, error: type[httpx2.HTTPError]
) -> None:
    failure = error("dropped")
    assert may_send_again(request(method), failure, progress(f"{HEAD}.started", f"{HEAD}.failed"))
    for events in (
        [],
        [f"{HEAD}.started"],
        [f"{HEAD}.started", f"{HEAD}.complete"],
        [f"{HEAD}.started", f"{HEAD}.complete", "http11.send_request_body.failed"],
        ["some.other.library.failed"],
    ):
        assert not may_send_again(request(method), failure, progress(*events)), events


@pytest.mark.parametrize("error", DROPPED)
def test_question_is_sent_again_however_far_it_came(error: type[httpx2.HTTPError]) -> None:
    assert may_send_again(request("GET"), error("dropped"), progress(f"{HEAD}.complete"))


@pytest.mark.parametrize("error", OTHERS)
def test_nothing_is_sent_again_but_for_a_dropped_connection(error: type[httpx2.HTTPError]) -> None:
    for method in ("GET", "POST"):
        assert not may_send_again(request(method), error("other"), progress(f"{HEAD}.failed"))


def endpoint(**fields: Any) -> Endpoint:
    settled = {"credential": None, "connect_timeout_s": 5.0, "grace_s": 30.0, **fields}
    return Endpoint(Path("/x"), **settled)


def test_answer_is_waited_for_while_the_engine_may_work_and_a_grace_on_top() -> None:
    timeout = endpoint(grace_s=3.0).timeout(
        call_read_by(object_of, "t", {}, {"timeout_seconds": 2})
    )
    assert (timeout.read, timeout.connect) == (5.0, 5.0)
    assert endpoint().timeout(HEALTH).read == 30.0


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["connect_timeout_s", "grace_s"])
def test_waiting_without_end_or_beginning_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=name):
        endpoint(**{name: seconds})


@pytest.mark.parametrize("credential", ["a\nb", "a\rx: y", "ä", "a\0"])
def test_credential_cannot_add_a_header(credential: str) -> None:
    with pytest.raises(ValueError, match="not a credential"):
        endpoint(credential=credential)


def test_credential_is_in_the_header_and_in_no_representation() -> None:
    made = endpoint(credential="fht_secret")
    assert made.headers(HEALTH) == {"authorization": "Bearer fht_secret"}
    assert "secret" not in repr(made)
    assert endpoint().headers(HEALTH) == {}


@pytest.mark.parametrize(
    ("cause", "says", "says_not"),
    [
        (PermissionError(errno.EACCES, "denied"), "Permission denied: /s", "fumehood serve"),
        (FileNotFoundError(errno.ENOENT, "missing"), "fumehood serve", "group"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "fumehood serve", "group"),
    ],
)
def test_socket_that_may_not_be_opened_is_no_missing_engine(
    cause: OSError, says: str, says_not: str
) -> None:
    failure = httpx2.ConnectError("no")
    failure.__cause__ = RuntimeError("the library's own")
    failure.__cause__.__context__ = cause
    endpoint = Endpoint(Path("/s"), None, 1, 1)
    for method in ("GET", "POST"):
        said = unavailable(request(method), endpoint, failure, progress())
        assert says in str(said)
        assert says_not not in str(said)
        assert said.may_have_acted is False
