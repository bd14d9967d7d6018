"""Golden sequences: recorded, checked, and played to an agent's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import Envelope
from fumehood.devtools.golden import check, read_golden, record, write_golden
from fumehood.testing import Cassette, UnexpectedCall
from support.answers import envelope_bytes

pytestmark = pytest.mark.row("T9")


class FakeClient:
    """Answers by a table, and remembers what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any, Any]] = []

    def call(self, tool: str, arguments: Any = None, **options: Any) -> Envelope:
        self.asked.append((tool, arguments, options))
        return Envelope.model_validate_json(envelope_bytes(self.answers[tool]))


def calls(path: Path) -> Any:
    path.write_text('{"calls": [{"tool": "add", "arguments": {"a": 1}}, {"tool": "get"}]}')
    return read_golden(path).calls


def test_golden_sequence_is_replayed_instead_of_a_client(tmp_path: Path) -> None:
    client: Any = FakeClient(add={"sum": 2}, get={"x": 1})
    write_golden(tmp_path / "g.json", record(client, calls(tmp_path / "g.json")))
    with Cassette(tmp_path / "g.json") as tape:
        assert tape.call("add", {"a": 1}).data == {"sum": 2}
        assert tape.call("get").data == {"x": 1}


def test_cassette_with_a_client_records_the_calls_of_an_agent(tmp_path: Path) -> None:
    client: Any = FakeClient(add={"sum": 2})
    with Cassette(tmp_path / "g.json", client) as tape:
        tape.call("add", {"a": 1}, timeout_seconds=3)
    (kept,) = read_golden(tmp_path / "g.json").calls
    assert (kept.tool, kept.arguments, kept.options) == ("add", {"a": 1}, {"timeout_seconds": 3})
    assert client.asked == [("add", {"a": 1}, {"timeout_seconds": 3})]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([("get", {})], "recorded is add"),
        ([("add", {"a": 2})], "recorded is add"),
        ([("add", {"a": 1})], "1 recorded calls were not made"),
        ([("add", {"a": 1}), ("get", {}), ("get", {})], "no more calls are recorded"),
    ],
)
def test_calls_that_differ_from_the_golden_sequence_fail(
    made: list[tuple[str, Any]], said: str, tmp_path: Path
) -> None:
    client: Any = FakeClient(add={"sum": 2}, get={"x": 1})
    write_golden(tmp_path / "g.json", record(client, calls(tmp_path / "g.json")))

    def run_agent() -> None:
        with Cassette(tmp_path / "g.json") as tape:
            for tool, arguments in made:
                tape.call(tool, arguments)

    with pytest.raises(UnexpectedCall, match=said):
        run_agent()


def test_cassette_refuses_a_call_without_a_recorded_answer(tmp_path: Path) -> None:
    calls(tmp_path / "g.json")
    tape = Cassette(tmp_path / "g.json")
    with pytest.raises(UnexpectedCall, match="has no recorded answer"):
        tape.call("add", {"a": 1})


def test_golden_check_without_run_makes_only_dry_runs(tmp_path: Path) -> None:
    client: Any = FakeClient(add={"sum": 2}, get={"x": 1})
    recorded = tuple(record(client, calls(tmp_path / "g.json")))
    client.asked.clear()
    assert list(check(client, recorded, run=False)) == []
    assert [options for _, _, options in client.asked] == [{"dry_run": True}] * 2
    client.answers["add"] = {"sum": 3}
    assert list(check(client, recorded, run=False)) == []
    assert list(check(client, recorded, run=True)) == ["call 1 (add): data differs in sum"]
    client.answers["add"] = {"dry_run": True, "refused_with": "SANDBOX_UNAVAILABLE"}
    (said,) = check(client, recorded, run=False)
    assert said == "call 1 (add): SANDBOX_UNAVAILABLE: it would be refused"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"calls": [{}]}', '{"golden": 2}', '{"more": 1}',
        '{"calls": [{"tool": "add", "options": {"tool": "x"}}]}',
    ],
)  # fmt: skip
def test_malformed_golden_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(ValueError, match=r"g\.json"):
        read_golden(tmp_path / "g.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_golden(tmp_path / "none.json")
