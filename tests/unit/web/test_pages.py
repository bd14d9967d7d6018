"""The pages that watch: what they show of an engine, and that nothing of it runs in a browser."""

from __future__ import annotations

import base64
import html
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fumehood.answers import (
    CallDetails,
    Pagination,
    ProcessOutput,
    SessionFileList,
    SessionProcess,
    ToolDetails,
)
from fumehood.budgets.model import BudgetStanding, UsageRow, UsageTable
from fumehood.client.api_request import address
from fumehood.core.call_log import (
    CallPage,
    CallRecord,
    MatchedCalls,
    ToolFigures,
    ToolFiguresList,
    TriedRule,
    TriedRules,
)
from fumehood.core.identity import Scope
from fumehood.core.session import OwnedSession, SessionStatus, WorkspaceEntry
from fumehood.core.status import (
    CircuitState,
    CircuitStatus,
    EngineSummary,
    NodeRecord,
    NodeState,
    Readiness,
    StateReadiness,
)
from fumehood.identity.model import Agent, Binding, Change
from fumehood.policy.model import Explanation, PolicyStatus, RuleStatus, Verdict
from fumehood.protocol.messages import decode_envelope
from fumehood.web.guard import CONTENT_POLICY, SANDBOX
from fumehood.web.pages import PAGES, health
from support.answers import envelope_bytes
from support.approvals import NOW, approval
from support.definitions import function_definition
from support.web import ALICE, PORT, Browser, FakeCaller, FakeControl, FakeEngine, Site, refusal

pytestmark = pytest.mark.row("D5")

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202egnp.exe\x1b[31m"
PNG = b"\x89PNG\r\n\x1a\n picture"
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
SESSION = "sess_" + "0" * 32


def call(number: int = 1, **fields: Any) -> CallRecord:
    values = {
        "call_id": f"call_{number:024x}", "timestamp": "2026-01-02T03:04:05.000Z",
        "principal_id": "uid:1000", "agent_id": None, "session_id": None,
        "trace_id": "trace_20260102_000000000000", "tool_name": "calculator",
        "tool_version": "1.0.0", "code": "OK", "ended_by": "ok", "execution_time_ms": 12.5,
        "cpu_ms": 1.5, "cost": "0.250000", "currency": "USD", "input_tokens": 9,
        "output_tokens": 3, "tokens_used": 0,
    }  # fmt: skip
    return CallRecord(**{**values, **fields})


def details(**fields: Any) -> CallDetails:
    values = {
        "call": call(), "stages_ms": {"validate": 1.0, "execute": 3.0}, "audit_seq": 7,
        "approval": None, "envelope": None, "answer": "not_kept", "children": (),
        "can_repeat": False,
    }  # fmt: skip
    return CallDetails(**{**values, **fields})


def answered(data: dict[str, Any]) -> CallDetails:
    return details(envelope=decode_envelope(envelope_bytes(data)), answer="shown")


def session(**fields: Any) -> OwnedSession:
    values = {
        "id": SESSION, "state": SessionStatus.ACTIVE, "why": None, "image": "python",
        "languages": ("python",), "agent_id": None, "memory_mb": 128, "created_at": NOW,
        "last_used_at": NOW, "expires_at": NOW + timedelta(hours=1), "calls": 2, "is_busy": False,
        "principal_id": "uid:1000",
    }  # fmt: skip
    return OwnedSession(**{**values, **fields})


def process(name: str, **fields: Any) -> SessionProcess:
    values = {
        "state": "running", "exit_code": None, "signal": None, "lost": False, "started_at": NOW,
    }  # fmt: skip
    return SessionProcess(name=name, **{**values, **fields})


class Watched(FakeControl):
    """`AsyncControlClient`, as far as these pages use it."""

    def __init__(self, engine: FakeEngine, credential: str, told: SimpleNamespace) -> None:
        super().__init__(engine, credential)
        self.told = told
        self.calls = SimpleNamespace(list=self._calls, show=self._call, blob=self._blob)
        self.sessions = SimpleNamespace(
            list=self._sessions, show=self._session, files=self._files,
            download_file=self._download, processes=self._processes,
            process_output=self._output, stop_process=self._stop,
        )  # fmt: skip
        self.agents = SimpleNamespace(list=self._agents, show=self._agent)
        self.nodes = SimpleNamespace(list=self._nodes, drain=self._drain, resume=self._resume)
        self.policy = SimpleNamespace(show=self._policy, explain=self._explain, try_rules=self._try)

    async def whoami(self) -> Any:
        found = await super().whoami()
        return found.model_copy(update={"scopes": self.told.scopes})

    async def _calls(self, **query: Any) -> CallPage:
        self._check()
        self.told.asked.append(query)
        if query.get("code") == "NONSENSE":
            raise refusal("INVALID_PARAMS", "The query is wrong.")
        return CallPage(
            items=self.told.calls, has_more=self.told.cursor is not None,
            next_cursor=self.told.cursor, total_count=None,
        )  # fmt: skip

    async def _call(self, call_id: str) -> CallDetails:
        self.told.asked.append(call_id)
        return self.told.details

    async def _blob(self, call_id: str, url: str) -> bytes:
        return self.told.blob

    async def _sessions(self) -> Any:
        return (session(principal_id=EVIL),)

    async def _session(self, session_id: str) -> Any:
        return session(id=session_id, is_busy=self.told.is_busy, **self.told.session)

    async def _processes(self, session_id: str) -> tuple[SessionProcess, ...]:
        if isinstance(self.told.processes, Exception):
            raise self.told.processes
        return self.told.processes

    async def _output(self, session_id: str, name: str) -> ProcessOutput:
        self.told.asked.append(("output", name))
        if Scope.ADMIN not in self.told.scopes:
            raise refusal("PERMISSION_DENIED", "This needs admin.")
        address("processes", name)  # as the client does
        return self.told.output

    async def _stop(self, session_id: str, name: str) -> None:
        address("processes", name)
        self.told.asked.append(("stop", session_id, name))

    async def _files(self, session_id: str, path: str = "", **query: Any) -> SessionFileList:
        page = Pagination(has_more=False, next_cursor=None, total_count=None)
        return SessionFileList(items=self.told.files, pagination=page)

    async def _download(self, session_id: str, path: str, write: Any) -> None:
        self.told.asked.append(path)
        for start in range(0, len(self.told.content), 100_000):
            write(self.told.content[start : start + 100_000])

    async def _agents(self) -> Any:
        return (Agent(id="a", description=EVIL),)

    async def _agent(self, agent_id: str) -> Any:
        bound = Binding(tool="calculator", fixed={"x": EVIL})
        return SimpleNamespace(agent=Agent(id="a", description=EVIL), tools=(bound,))

    async def _nodes(self) -> tuple[NodeRecord, ...]:
        return self.told.nodes

    async def _drain(self, node: str) -> None:
        self.told.asked.append(("drain", node))

    async def _resume(self, node: str) -> None:
        self.told.asked.append(("resume", node))

    async def _policy(self) -> PolicyStatus:
        rule = RuleStatus(
            id="r", decision=Verdict.ASK, mode="shadow", line=3, is_of_this_environment=True,
            reason=EVIL, decided=0, would_have_decided=41,
        )  # fmt: skip
        return PolicyStatus(
            version="0", file="p.toml", environment="production", rules=(rule,), refused=(EVIL,)
        )

    async def _explain(self, tool: str, arguments: Any, **more: Any) -> Explanation:
        self.told.asked.append((tool, arguments, more))
        return Explanation(
            tool=tool, environment="production", verdict=Verdict.DENY, rule="r", reason=EVIL,
            approvers=(), quorum=1, policy_version="0", shadow=(), rules=(),
        )  # fmt: skip

    async def _try(self, rules: str, *, days: int) -> TriedRules:
        if "id = 7" in rules:
            raise refusal("INVALID_PARAMS", f"The rules cannot be used: {EVIL}")
        group = MatchedCalls(tool=EVIL, principal_id="uid:1", agent_id=None, calls=3)
        tried = TriedRule(
            id="r", decision="ask", calls=3, groups=(group,), unknown=("argument /a",)
        )
        return TriedRules(items=(tried,), calls=10, skipped=1, is_partial=False)

    async def remembered(self) -> Any:
        return ()

    async def figures(self, hours: int) -> ToolFiguresList:
        one = ToolFigures(
            tool="send", **self.told.figures, mean_ms=5, p50_ms=4, p95_ms=2500,
            last_at="2026-01-02T03:04:05.000Z",
        )  # fmt: skip
        return ToolFiguresList(items=(one,), is_partial=False)

    async def usage(self, by: list[str], **query: Any) -> UsageTable:
        def row(**group: str | None) -> UsageRow:
            return UsageRow(
                group=group, calls=4, errors=1, input_tokens=10, output_tokens=5, tokens_used=0,  # type: ignore[arg-type]
                cost={"USD": "0.500000"},
            )  # fmt: skip

        rows = (row(**{name: query["since"].strftime("%Y-%m-%d") if name == "day" else EVIL
                       for name in by}),)  # fmt: skip
        budget = BudgetStanding(
            budget="b", subject={"agent": EVIL}, period="day", unit="calls", limit=10, spent=9,
            held=1, left=0, resets_at=NOW,
        )  # fmt: skip
        return UsageTable(by=tuple(by), items=rows, total=row(), has_more=False, budgets=(budget,))  # type: ignore[arg-type]

    async def engine_summary(self) -> EngineSummary:
        circuit = CircuitStatus(
            upstream=EVIL, state=CircuitState.OPEN, requests=9, failures=8, retry_after_ms=1500
        )
        state = StateReadiness(failing=True, lost_rows=3)
        return EngineSummary(
            version="1", started_at=NOW, mode="single-user", environment="production",
            is_draining=False, running_calls=2, containers={"idle": 1}, sessions={"active": 1},
            readiness=Readiness(status="ready", walls={}, state=state), circuits=(circuit,),
        )  # fmt: skip


class Tools(FakeCaller):
    """`AsyncClient`, of which the page of tools reads definitions."""

    tool_of_all = function_definition(name="send", description=EVIL, dangerous=True)

    async def tools(self) -> list[Any]:
        return [self.tool_of_all]

    async def tool(self, reference: str) -> Any:
        address("tools", reference)  # as the client does
        return ToolDetails(tool=self.tool_of_all, versions=("1.0.0",), source="entry point")


@pytest.fixture
def told() -> SimpleNamespace:
    """What the engine has to tell."""
    return SimpleNamespace(
        calls=(call(),), cursor=None, details=details(), blob=b"", asked=[], content=b"",
        files=(WorkspaceEntry(path=EVIL, kind="file", size=5, modified_at="2026"),),
        scopes=(Scope.APPROVE, Scope.ADMIN), is_busy=False, session={},
        processes=(process("web"), process(EVIL, state="ended", exit_code=3)),
        output=ProcessOutput(text=f"line\n{EVIL}", offset=9, skipped=0, ended=False),
        figures={"calls": 200, "succeeded": 190, "failed": 10},
        nodes=(NodeRecord(name=EVIL, state=NodeState.UNREADY, why=EVIL),),
    )  # fmt: skip


@pytest.fixture
def browser(told: SimpleNamespace) -> Browser:
    from fumehood.web.app import Console

    engine = FakeEngine()
    engine.put(approval())

    def connect(credential: str) -> Any:
        return _Named(Watched(engine, credential, told))

    console = Console(connect, Tools(), PORT, PAGES)  # type: ignore[arg-type]
    return Site(engine, console, [0.0]).browser()


class _Named:
    """The fake with the client's own names for its state and its changes of authority."""

    def __init__(self, control: Watched) -> None:
        self._control = control
        self.approvals = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    async def alerts(self) -> Any:
        return SimpleNamespace(enabled=False, window_seconds=300, alerts=())

    async def engine(self) -> EngineSummary:
        return await self._control.engine_summary()

    async def changes(self) -> tuple[Change, ...]:
        return (
            Change(
                seq=2,
                at=NOW,
                principal_id=EVIL,
                action="agent.bind",
                subject="cleaner",
                details={"tool": "erase"},
            ),
            Change(seq=1, at=NOW, principal_id=EVIL, action="agent.bind", subject=EVIL, details={}),
        )


ADDRESSES = [
    "/calls", "/calls/list", f"/calls/{call().call_id}", "/tools", "/tools/send", "/agents",
    "/sessions", f"/sessions/{SESSION}", f"/sessions/{SESSION}/processes",
    f"/sessions/{SESSION}/output?process=web", "/nodes", "/usage", "/usage?days=30&by=agent",
    "/policy", "/health", "/health/live",
]  # fmt: skip


def require_inert(text: str) -> None:
    """Nothing of EVIL is markup, and its marks are seen."""
    assert "<img src=x" not in text
    assert "<script>alert" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("path", ADDRESSES)
def test_page_is_made_of_hostile_values_and_inert(
    browser: Browser, told: SimpleNamespace, path: str
) -> None:
    told.calls = (call(tool_name=EVIL, agent_id=EVIL, code="TIMEOUT", parent_id="call_1"),)
    told.details = answered({"stdout": EVIL, "value": [{EVIL: EVIL, "n": 1}], "x": {EVIL: EVIL}})
    page = browser.get(path)
    assert page.status_code == 200, page.text
    assert page.headers["content-security-policy"] == CONTENT_POLICY
    require_inert(page.text)
    tags = " ".join(re.sub(r'"[^"]*"', "", tag) for tag in re.findall(r"<[a-z][^>]*>", page.text))
    assert not re.search(r"\sstyle\b|\son[a-z]+\b|hx-on", tags)
    assert "javascript:" not in page.text


def test_every_page_is_in_the_navigation(browser: Browser) -> None:
    text = browser.get("/calls").text
    titles = re.findall(r'<a href="/[a-z]+"(?: aria-current="page")?>([A-Z][a-z]+)', text)
    assert titles == [
        "Inbox", "Calls", "Tools", "Agents", "Sessions", "Nodes", "Usage", "Policy", "Health",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("q=sess_1", {"session": "sess_1"}), ("q=trace_1", {"trace": "trace_1"}),
        ("trace=4bf92f3577b34da6a3ce929d0e0e4736", {"trace": "4bf92f3577b34da6a3ce929d0e0e4736"}),
        ("q=uid%3A7", {"principal": "uid:7"}), ("q=TIMEOUT", {"code": "TIMEOUT"}),
        ("q=run_python", {"tool": "run_python"}), ("code=timeout", {"code": "TIMEOUT"}),
        ("q=external:Bash", {"tool": "external:Bash"}),
        ("agent=a&tool=t&cursor=call_9", {"agent": "a", "tool": "t", "cursor": "call_9"}),
        ("", {}),
    ],
)  # fmt: skip
def test_search_filter_follows_from_the_form_of_the_text(
    browser: Browser, told: SimpleNamespace, query: str, asked: dict[str, str]
) -> None:
    browser.get(f"/calls?{query}")
    assert told.asked == [{"limit": 50, **asked}]


def test_search_for_a_call_leads_to_it(browser: Browser) -> None:
    assert browser.get("/calls?q=call_12").headers["location"] == "/calls/call_12"
    assert "location" not in browser.get("/calls?q=call_1/../../logout").headers


@pytest.mark.parametrize(
    "path",
    ["/calls/%2e%2e", "/calls/a%0a", "/sessions/%2e%2e", "/sessions/%20", "/tools/%2e%2e"],
)
def test_id_that_would_lead_to_another_address_is_not_found(
    browser: Browser, told: SimpleNamespace, path: str
) -> None:
    assert browser.get(path).status_code == 404
    assert told.asked == []


def test_wrong_filter_is_reported_and_kept(browser: Browser) -> None:
    page = browser.get("/calls?code=nonsense")
    assert page.status_code == 200
    assert "The query is wrong." in page.text
    assert 'value="nonsense"' in page.text


def test_older_calls_keep_the_filters_and_are_not_live(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.cursor = "call_7"
    assert 'href="/calls?tool=t&amp;cursor=call_7"' in browser.get("/calls?tool=t").text
    assert "live-tick" in browser.get("/calls?tool=t").text
    assert "live-tick" not in browser.get("/calls?tool=t&cursor=call_7").text


@pytest.mark.parametrize(
    ("answer", "words"),
    [("not_kept", "not kept"), ("needs_admin", "for administrators only")],
)
def test_page_of_a_call_says_why_its_answer_is_missing(
    browser: Browser, told: SimpleNamespace, answer: str, words: str
) -> None:
    told.details = details(answer=answer)
    text = browser.get(f"/calls/{call().call_id}").text
    assert words in text
    assert "cannot be repeated" in text


def test_page_of_a_call_shows_stages_audit_row_children_and_tables(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.details = answered({"value": [{"city": "Graz", "n": 3}]}).model_copy(
        update={"children": (call(9),)}
    )
    text = browser.get(f"/calls/{call().call_id}").text
    assert re.search(r'<rect class="stage-2" x="25.0" width="75.0"', text)
    assert "row 7" in text
    assert f"/calls/{call(9).call_id}" in text
    assert re.search(r"<th>city</th>.*<td>Graz</td>", text, re.DOTALL)


def shown(content: bytes) -> dict[str, Any]:
    return {"filename": EVIL, "content_base64": base64.b64encode(content).decode()}


def test_console_determines_the_type_of_a_figure_from_its_bytes(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.details = answered({"images": [shown(PNG), {"filename": "a", "url": "/v1/blobs/x"}]})
    told.blob = b"\xff\xd8\xff jpeg"
    path = f"/calls/{call().call_id}"
    assert browser.get(path).text.count(f'<img src="{path}/figures/') == 2
    first, second = browser.get(f"{path}/figures/0"), browser.get(f"{path}/figures/1")
    assert (first.content, first.headers["content-type"]) == (PNG, "image/png")
    assert second.headers["content-type"] == "image/jpeg"
    for one in (first, second):
        assert one.headers["content-security-policy"] == SANDBOX
        assert one.headers["x-content-type-options"] == "nosniff"
    assert browser.get(f"{path}/figures/2").status_code == 404
    assert browser.get(f"{path}/figures/x").status_code == 404


@pytest.mark.parametrize(
    "content", [SVG, b"<!doctype html><script>alert(1)</script>", b"GIF87", b""]
)
def test_console_sends_an_unknown_figure_as_a_text_download(
    browser: Browser, told: SimpleNamespace, content: bytes
) -> None:
    told.details = answered({"images": [shown(content)]})
    found = browser.get(f"/calls/{call().call_id}/figures/0")
    require_download(found)
    assert found.content == content


def require_download(found: Any) -> None:
    assert found.headers["content-type"] == "text/plain; charset=utf-8"
    assert found.headers["content-disposition"].startswith("attachment; ")
    assert found.headers["content-security-policy"] == SANDBOX
    assert found.headers["content-disposition"].isascii()
    assert "\n" not in found.headers["content-disposition"]


def test_figure_that_is_not_base64_is_not_found(browser: Browser, told: SimpleNamespace) -> None:
    told.details = answered({"images": [{"content_base64": "%%"}, 7]})
    assert browser.get(f"/calls/{call().call_id}/figures/0").status_code == 404


def test_long_text_is_cut_with_a_link_to_all_of_it(browser: Browser, told: SimpleNamespace) -> None:
    long = "x" * 5_000_000
    told.details = answered({"stdout": long})
    path = f"/calls/{call().call_id}"
    text = browser.get(path).text
    assert len(text) < 200_000
    assert f"{path}/raw?part=stdout" in text
    found = browser.get(f"{path}/raw?part=stdout")
    require_download(found)
    assert found.text == long
    require_download(browser.get(f"{path}/raw"))


def test_page_of_a_tool_shows_its_place_and_figures(browser: Browser) -> None:
    row = browser.get("/tools").text
    assert "95 %" in row
    assert 'class="warn" width="95.0"' in row
    text = browser.get("/tools/send").text
    for words in ("dangerous", "2.50 s", "needs approval"):
        assert words in text
    others = browser.get("/tools/external:Bash")
    assert (others.status_code, "a tool of another agent" in others.text) == (404, True)


def part_of(text: str, start: str) -> str:
    """The address that a part of the session's page fetches itself from."""
    (found,) = re.findall(rf'hx-get="(/sessions/{SESSION}/{start}[^"]*)"', text)
    return html.unescape(found)


def test_session_page_shows_how_processes_ended_and_the_newest_ones_output(
    browser: Browser, told: SimpleNamespace
) -> None:
    newer = NOW + timedelta(minutes=1)
    told.processes = (
        process("a"), process("b", started_at=newer), process("c", state="ended", exit_code=0),
        process("d", state="ended", signal=9), process("e", state="ended", lost=True),
    )  # fmt: skip
    told.output = ProcessOutput(text="the end", offset=99_000, skipped=12_345, ended=False)
    page = browser.get(f"/sessions/{SESSION}").text
    words = re.sub(r"\s+", " ", re.sub("<[^>]+>", "", page))
    for expected in ("ended exit 0", "ended signal 9", "ended lost", "Output of b",
                     "12,345 bytes before this are not shown.", "the end"):  # fmt: skip
        assert expected in words, expected
    assert told.asked[-1] == ("output", "b")
    browser.get(f"/sessions/{SESSION}?process=d")
    assert told.asked[-1] == ("output", "d")


def test_list_and_output_of_processes_are_sent_again_only_if_they_changed(
    browser: Browser, told: SimpleNamespace
) -> None:
    page = browser.get(f"/sessions/{SESSION}?process=web").text
    assert page.count("live-tick from:body") == 2
    (mark,) = re.findall(r'name="mark" value="([^"]+)"', page)
    rows = f"{part_of(page, 'processes')}&mark={mark}"
    output = part_of(page, "output")
    assert (browser.part(rows).status_code, browser.part(output).status_code) == (204, 204)
    told.processes = (process("web", state="ended", exit_code=1),)
    told.output = ProcessOutput(text="more", offset=13, skipped=0, ended=True)
    assert "exit 1" in browser.part(rows).text
    assert "more" in browser.part(output).text
    assert browser.part(part_of(browser.part(output).text, "output")).status_code == 204


def test_approver_sees_processes_without_their_output(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.scopes = (Scope.APPROVE,)
    browser.log_in(ALICE)
    page = browser.get(f"/sessions/{SESSION}").text
    assert ">web</a>" in page
    assert "is for administrators" in page
    assert "Stop it" not in page
    assert ("output", "web") not in told.asked
    assert "line" not in browser.part(f"/sessions/{SESSION}/output?process=web").text


def test_administrator_stops_a_process(browser: Browser, told: SimpleNamespace) -> None:
    done = browser.post(f"/sessions/{SESSION}/stop", {"process": "web"})
    assert done.headers["location"] == f"/sessions/{SESSION}?process=web#output"
    assert told.asked[-1] == ("stop", SESSION, "web")
    assert browser.post(f"/sessions/{SESSION}/stop", {"process": ".."}).status_code == 404
    assert (
        browser.post(f"/sessions/{SESSION}/stop", {"process": "web"}, csrf=False).status_code == 403
    )
    assert [one for one in told.asked if one[0] == "stop"] == [("stop", SESSION, "web")]


def test_session_whose_processes_cannot_be_listed_says_why(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.processes = refusal("SANDBOX_UNAVAILABLE", f"The session is paused. {EVIL}")
    page = browser.get(f"/sessions/{SESSION}").text
    assert "The session is paused." in page
    require_inert(page)
    told.session = {"state": SessionStatus.ENDED}
    page = browser.get(f"/sessions/{SESSION}").text
    assert "They ended with it." in page
    assert "live-tick" not in page


def test_session_page_names_project_preset_and_environment(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.session = {"project": EVIL, "preset": "web", "env": ("API_URL", "DEBUG")}
    page = browser.get(f"/sessions/{SESSION}").text
    require_inert(page)
    assert "<dt>Preset</dt><dd>web</dd>" in page
    assert "<dt>Environment</dt><dd><code>API_URL DEBUG</code></dd>" in page
    assert "<dt>Project</dt>" in page
    told.session = {}
    assert not re.search(
        "<dt>(Preset|Project|Environment)", browser.get(f"/sessions/{SESSION}").text
    )


def test_console_sends_a_session_file_as_a_text_download(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.content = SVG
    found = browser.get(f"/sessions/{SESSION}/download?file=d/{'%0d%0aX-Evil: 1'}.svg")
    require_download(found)
    assert found.content == SVG
    assert "x-evil" not in found.headers


def test_preview_of_a_file_is_text_and_bounded(browser: Browser, told: SimpleNamespace) -> None:
    told.content = EVIL.encode()
    page = browser.get(f"/sessions/{SESSION}?file=a.html").text
    require_inert(page)
    assert "&lt;script&gt;" in page
    told.content = b"a\x00b"
    assert "This file is not text" in browser.get(f"/sessions/{SESSION}?file=a").text
    told.content = b"x" * 10_000_000
    page = browser.get(f"/sessions/{SESSION}?file=a").text
    assert len(page) < 300_000
    assert "The beginning of" in page


def test_file_that_is_too_large_for_a_browser_is_refused(
    browser: Browser, told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.web.pages.sessions.MAX_DOWNLOAD_BYTES", 1000)
    told.content = b"x" * 1001
    found = browser.get(f"/sessions/{SESSION}/download?file=a")
    assert found.status_code == 413
    assert "sessions get" in found.text


def test_success_bar_of_a_tool_counts_only_calls_that_ran(
    browser: Browser, told: SimpleNamespace
) -> None:
    assert "95 %" in browser.get("/tools").text
    told.figures = {"calls": 200, "succeeded": 50, "failed": 0}
    assert "100 %" in browser.get("/tools").text
    told.figures = {"calls": 200, "succeeded": 0, "failed": 0}
    assert "none ran" in browser.get("/tools").text


def test_usage_page_has_a_plot_for_each_amount_and_bars_for_budgets(browser: Browser) -> None:
    text = browser.get("/usage").text
    assert re.findall(r'aria-label="(\w+) by day', text) == ["Calls", "Tokens", "Money"]
    assert '<rect class="over" width="90.0"' in text


def test_policy_shows_what_shadow_rules_would_have_done(browser: Browser) -> None:
    text = browser.get("/policy").text
    assert "41" in text
    assert "The newest file is refused" in text
    assert "The log keeps no arguments" in text


def test_call_is_explained_and_rules_are_tried(browser: Browser, told: SimpleNamespace) -> None:
    given = {"tool": "t", "arguments": '{"a": 1}', "agent": "x", "principal": ""}
    found = browser.post("/policy/explain", given, headers={"hx-request": "true"})
    require_inert(found.text)
    assert told.asked == [("t", {"a": 1}, {"principal_id": None, "agent_id": "x"})]
    for wrong in ("[1]", "{", "nonsense"):
        found = browser.post("/policy/explain", {"tool": "t", "arguments": wrong})
        assert "not a JSON object" in found.text
    tried = browser.post("/policy/try", {"rules": "[[rules]]"})
    require_inert(tried.text)
    assert "at most 3 calls" in tried.text
    require_inert(browser.post("/policy/try", {"rules": "id = 7"}).text)


def test_administrator_drains_and_resumes_nodes(browser: Browser, told: SimpleNamespace) -> None:
    told.nodes = (
        NodeRecord(name="worker-1", state=NodeState.JOINED, slots=4, used=3, memory_mb=2048),
        NodeRecord(name="worker-2", state=NodeState.DRAINED, slots=4),
        NodeRecord(name="worker-3", state=NodeState.GONE, why="It is lost."),
    )
    text = browser.get("/nodes").text
    assert "3 of 4" in text
    assert "It is lost." in text
    actions = re.findall(r'action="/nodes/([^"]+)"', text)
    assert actions == ["worker-1/drain", "worker-2/resume"]
    for action in actions:
        assert browser.get(f"/nodes/{action}").status_code == 405
        assert browser.post(f"/nodes/{action}", csrf=False).status_code == 403
        assert told.asked == []
    for action in actions:
        assert browser.post(f"/nodes/{action}").headers["location"] == "/nodes"
    assert told.asked == [("drain", "worker-1"), ("resume", "worker-2")]
    told.scopes = (Scope.APPROVE,)
    browser.log_in(ALICE)
    assert 'action="/nodes' not in browser.get("/nodes").text


def test_engine_without_a_cluster_shows_no_nodes(browser: Browser, told: SimpleNamespace) -> None:
    told.nodes = ()
    assert "on its own machine" in browser.get("/nodes").text


def test_health_page_shows_faults(browser: Browser) -> None:
    text = browser.get("/health").text
    for words in (
        "The state cannot be written", "3 rows", "8 of 9 failed", "open",
        "gave agent cleaner the tool erase",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("enabled", [True, False])
def test_health_shows_the_alerts_unless_they_are_disabled(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    async def alerts(self: Any) -> Any:
        quiet = {"firing": False, "tool": None, "since": None}
        enough = {"calls": 1200, "least_calls": 20}
        rows = (
            {**quiet, **enough, "message": "The mean is 4 ms."},
            {**quiet, "calls": 17, "least_calls": 20, "message": "64.7% of the calls succeeded."},
            {"firing": True, "tool": f"erase {EVIL}", "since": NOW, **enough,
             "message": f"5 % of calls failed {EVIL}"},
        )  # fmt: skip
        told = tuple(SimpleNamespace(**row) for row in rows)
        return SimpleNamespace(enabled=enabled, window_seconds=300, alerts=told)

    monkeypatch.setattr(_Named, "alerts", alerts)
    text = browser.get("/health").text
    require_inert(text)
    for words in ("firing", "5 % of calls failed", "The mean is 4 ms."):
        assert (words in text) is enabled
    in_order = re.search(r"erase .* 5 % of calls failed .* The mean is", re.sub(r"\s+", " ", text))
    assert (in_order is not None) is enabled
    assert ("switched off" in text) is not enabled
    judged = re.findall(r'<span class="badge (\w*)">(firing|well|too few[^<]*)</span>', text)
    few = ("", "too few calls yet (17 of 20)")
    assert judged == ([("bad", "firing"), ("good", "well"), few] if enabled else [])


def test_console_runs_the_doctor_only_on_a_post(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def found() -> Any:
        asked.append(1)
        return [{"check": "docker", "verdict": "missing", "found": EVIL, "cure": EVIL}], ""

    monkeypatch.setattr(health, "_doctor", found)
    assert browser.get("/health/check").status_code == 405
    assert browser.post("/health/check", csrf=False).status_code == 403
    assert asked == []
    text = browser.post("/health/check").text
    assert "missing" in text
    require_inert(text)
