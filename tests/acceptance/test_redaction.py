"""E8: secrets are redacted in results, streams, errors and stored answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Daemon, StartDaemon, running_daemon
from fumehood import Client
from fumehood.sandbox.images.catalog import Image
from fumehood.streams.events import OutputEvent, ResultEvent
from support.answers import error_of
from support.clients import LEAVES_SOCKETS

pytestmark = [pytest.mark.row("E8"), *LEAVES_SOCKETS]

KEY = "AKIA" + "IOSFODNN7EXAMPLE"
"""An example key, written in two parts so that no secret scanner reports it."""
SAID = f"'AKIA' + '{KEY[4:]}'"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    patterns = json.dumps([r"customer [0-9]{6}"])
    with running_daemon(redaction__patterns=patterns) as daemon, Client(daemon.socket) as client:
        yield client


def test_key_in_result_is_redacted_and_counted(client: Client) -> None:
    program = f"print('the key', {SAID})\n{{'key': {SAID}, 'who': 'customer 123456'}}"
    envelope = client.call("run_restricted_python", {"code": program})
    assert envelope.data["stdout"] == "the key [redacted]\n"
    assert envelope.data["value"] == {"key": "[redacted]", "who": "[redacted]"}
    assert KEY not in envelope.model_dump_json()
    assert envelope.metadata.redacted == 5  # `value_repr` has two of them, too


def test_harmless_twin_text_is_not_redacted(client: Client) -> None:
    envelope = client.call("run_restricted_python", {"code": "'customer 12345, AKIA'"})
    assert envelope.data["value"] == "customer 12345, AKIA"
    assert "redacted" not in envelope.model_dump(mode="json")["metadata"]


def test_key_in_error_is_redacted(client: Client) -> None:
    envelope = client.call("run_restricted_python", {"code": f"raise ValueError({SAID})"})
    assert "[redacted]" in error_of(envelope).message
    assert KEY not in envelope.model_dump_json()
    assert envelope.metadata.redacted >= 2


def test_replayed_stored_answer_is_redacted(client: Client) -> None:
    options: dict[str, Any] = {"idempotency_key": "once"}
    for _ in range(2):
        envelope = client.call("run_restricted_python", {"code": SAID}, **options)
    assert envelope.metadata.idempotent_replay
    assert envelope.data["value"] == "[redacted]"


def test_control_key_is_returned_if_redaction_is_disabled(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(redaction__common_keys="false")
    with Client(daemon.socket) as client:
        envelope = client.call("run_restricted_python", {"code": SAID})
    assert envelope.data["value"] == KEY


@pytest.mark.needs("docker")
def test_key_printed_in_pieces_is_redacted_in_the_stream(
    shared_daemon: Daemon, python_image: Image
) -> None:
    code = (
        "import sys\nfor piece in ('my key: AK', 'IA', 'IOSFODNN7', 'EXAMPLE', '\\n', 'bye\\n'):\n"
        "    print(piece, end='', flush=True)\n    print(piece, end='', file=sys.stderr, flush=True)"
    )
    with Client(shared_daemon.socket) as client:
        events = list(client.stream("run_python", {"code": code}))
    last = events[-1]
    assert isinstance(last, ResultEvent)
    assert last.envelope.data["stdout"] == "my key: [redacted]\nbye\n"
    assert last.envelope.metadata.redacted == 2
    for stream in ("stdout", "stderr"):
        texts = [e.text for e in events if isinstance(e, OutputEvent) and e.stream == stream]
        assert "".join(texts) == "my key: [redacted]\nbye\n"
        assert texts[0].startswith("my key: ")  # it was not held back until the end
