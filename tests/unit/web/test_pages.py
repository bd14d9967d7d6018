"""The pages that watch: what they show of an engine, and that nothing of it runs in a browser."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote, unquote

import anyio
import pytest

from fumehood.answers import (
    CallDetails,
    Pagination,
    ProcessOutput,
    ProjectDiff,
    ProjectFile,
    SessionFileList,
    SessionProcess,
    ToolDetails,
)
from fumehood.client.api_request import address
from fumehood.core.call_log import (
    CallPage,
    CallRecord,
    CallSeries,
    CallStep,
    MatchedCalls,
    RunningCall,
    ToolFigures,
    ToolFiguresList,
    TriedRule,
    TriedRules,
)
from fumehood.core.envelope import Envelope
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
from fumehood.core.usage_table import BudgetStanding, UsageRow, UsageTable
from fumehood.executors.kinds import EXECUTORS
from fumehood.identity.model import Agent, Binding, Change
from fumehood.policy.model import Explanation, PolicyStatus, PolicyText, RuleStatus, Verdict
from fumehood.protocol.messages import decode_envelope
from fumehood.web import ports
from fumehood.web.figures import place_of
from fumehood.web.guard import CONTENT_POLICY, SANDBOX
from fumehood.web.logins import Login
from fumehood.web.pages import PAGES, health
from support.answers import envelope_bytes
from support.approvals import NOW, approval
from support.definitions import function_definition
from support.web import ALICE, PORT, Browser, FakeCaller, FakeControl, FakeEngine, Site, refusal

pytestmark = pytest.mark.row("D5")

SCRIPT = "<img src=x onerror=alert(1)></textarea><script>alert(2)</script>"
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


def under_way(number: int = 1, **fields: Any) -> CallRecord:
    """A call that runs."""
    values = {"is_waiting": False, "stdout": EVIL, "stderr": "", **fields}
    return call(number, tool_name=EVIL, code="RUNNING", running=RunningCall(**values))


def details(**fields: Any) -> CallDetails:
    values = {
        "call": call(), "stages_ms": {"validate": 1.0, "execute": 3.0}, "audit_seq": 7,
        "approval": None, "arguments": None, "envelope": None, "answer": "not_kept",
        "children": (),
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
        self.calls = SimpleNamespace(
            list=self._calls, show=self._call, blob=self._blob, cancel=self._note("cancel")
        )
        self.sessions = SimpleNamespace(
            list=self._sessions, show=self._session, files=self._files,
            download_file=self._download, processes=self._processes,
            process_output=self._output, stop_process=self._stop, diff=self._diff,
        )  # fmt: skip
        self.agents = SimpleNamespace(
            list=self._agents, show=self._agent, create=self._note("create"),
            update=self._note("update"), bind=self._note("bind"), unbind=self._note("unbind"),
        )  # fmt: skip
        self.nodes = SimpleNamespace(
            list=self._nodes, drain=self._note("drain"), resume=self._note("resume")
        )
        self.policy = SimpleNamespace(
            show=self._policy, explain=self._explain, try_rules=self._try, text=self._file,
            replace=self._replace,
        )  # fmt: skip

    async def whoami(self) -> Any:
        found = await super().whoami()
        return found.model_copy(update={"scopes": self.told.scopes})

    async def _calls(self, **query: Any) -> CallPage:
        self._check()
        if query.get("state") == "running":
            return CallPage(
                items=self.told.running, has_more=False, next_cursor=None, total_count=None
            )
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
        return (session(principal_id=EVIL, **self.told.session),)

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
        self.told.asked.append(("files", session_id))
        has_more = bool(query.get("recursive")) and len(self.told.files) > query["limit"]
        page = Pagination(has_more=has_more, next_cursor=None, total_count=None)
        found = [one for one in self.told.files if query.get("recursive") or "/" not in one.path]
        return SessionFileList(items=tuple(found), pagination=page)

    async def _diff(self, session_id: str) -> ProjectDiff:
        return ProjectDiff(
            diff=f"+{EVIL}\n", truncated=False, unseen=(EVIL,),
            files=(ProjectFile(path=EVIL, change="added", bytes=3, conflict=EVIL),),
        )  # fmt: skip

    async def _download(self, session_id: str, path: str, write: Any) -> None:
        self.told.asked.append(path)
        for start in range(0, len(self.told.content), 100_000):
            write(self.told.content[start : start + 100_000])

    async def _agents(self) -> Any:
        return (Agent(id="a", description=EVIL),)

    async def _agent(self, agent_id: str) -> Any:
        bound = Binding(tool="calculator", fixed={"x": EVIL})
        return SimpleNamespace(agent=Agent(id="a", description=EVIL), tools=(bound,))

    def _note(self, what: str) -> Any:
        async def note(*given: Any, **named: Any) -> None:
            self.told.asked.append((what, *given, named))

        return note

    async def _file(self) -> PolicyText:
        return PolicyText(text=self.told.policy, version="v1")

    async def _replace(self, text: str, version: str) -> None:
        if version != "v1":
            raise refusal("IDEMPOTENCY_CONFLICT", "The policy file has changed.")
        self.told.asked.append(("replace", text))

    async def _nodes(self) -> tuple[NodeRecord, ...]:
        return self.told.nodes

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
            id="r",
            decision="ask",
            calls=3,
            at_least=self.told.certain,
            groups=(group,),
            unknown=("argument /a",),
        )
        return TriedRules(items=(tried,), calls=10, skipped=1, is_partial=False)

    async def remembered(self) -> Any:
        return ()

    async def series(self, hours: int, **query: Any) -> CallSeries:
        self.told.asked.append({"hours": hours, **query})
        return CallSeries(items=self.told.steps, is_partial=False)

    async def figures(self, hours: int) -> ToolFiguresList:
        one = ToolFigures(
            tool="send", **self.told.figures, mean_ms=5, p50_ms=4, p95_ms=2500,
            last_at="2026-01-02T03:04:05.000Z",
        )  # fmt: skip
        return ToolFiguresList(items=(one,), is_partial=False)

    async def usage(self, by: list[str], **query: Any) -> UsageTable:
        def row(**group: str | None) -> UsageRow:
            return UsageRow(
                group=group, calls=4, errors=3, failed=1, input_tokens=10, output_tokens=5, tokens_used=0,  # type: ignore[arg-type]
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

    async def session(self, reference: str) -> Any:
        assert reference == "monday"
        return SimpleNamespace(id=SESSION)

    async def call(self, tool: str, arguments: Any, **options: Any) -> Envelope:
        self.made.append((tool, arguments, options))
        if arguments.get("to") == "refused":
            raise refusal("INVALID_PARAMS", "This is not an address.")
        return decode_envelope(envelope_bytes({"stdout": EVIL}))

    def __init__(self) -> None:
        self.made: list[Any] = []


@pytest.fixture
def told() -> SimpleNamespace:
    """What the engine has to tell."""
    return SimpleNamespace(
        calls=(call(),), running=(), cursor=None, certain=0, policy=f"# {EVIL}", details=details(), blob=b"", asked=[], content=b"",
        files=(WorkspaceEntry(path=EVIL, kind="file", size=5, modified_at="2026"),),
        scopes=(Scope.APPROVE, Scope.ADMIN), is_busy=False, session={},
        processes=(process("web"), process(EVIL, state="ended", exit_code=3)),
        output=ProcessOutput(text=f"line\n{EVIL}", offset=9, skipped=0, ended=False),
        figures={"calls": 200, "succeeded": 190, "failed": 10},
        steps=(CallStep(at="2026", calls=4, failed=1, p50_ms=1, p95_ms=3, cost=0.5),),
        nodes=(NodeRecord(name=EVIL, state=NodeState.UNREADY, why=EVIL),),
    )  # fmt: skip


@pytest.fixture
def browser(told: SimpleNamespace) -> Browser:
    from fumehood.web.app import Console

    engine = FakeEngine()
    engine.put(approval())

    def connect(credential: str) -> Any:
        return _Named(Watched(engine, credential, told))

    told.tools = Tools()
    console = Console(connect, told.tools, PORT, PAGES, callers=Path("/run/engine.sock"))
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
    "/calls", "/calls/list", "/calls/now", f"/calls/{call().call_id}", "/search", "/tools", "/tools/send", "/agents",
    "/tools/send/try", "/sessions", f"/sessions/{SESSION}", f"/sessions/{SESSION}/processes",
    f"/sessions/{SESSION}/output?process=web", f"/sessions/{SESSION}/diff", "/nodes", "/usage", "/usage?days=30&by=agent",
    "/charts", f"/charts?tool={quote(EVIL)}&hours=720", "/policy", "/health", "/health/live",
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
    told.details = answered(
        {
            "stdout": EVIL, "value": [{EVIL: EVIL, "n": 1}], "x": {EVIL: EVIL},
            "exception": {"traceback": EVIL}, "files": [{"filename": EVIL, "size": 3}],
        }
    ).model_copy(
        update={
            "call": call(tool_name="run_python", session_id=SESSION),
            "arguments": {"code": EVIL, EVIL: EVIL, "x": [EVIL]},
            "children": (call(7, tool_name=EVIL, parent_id=call().call_id),),
        }
    )  # fmt: skip
    told.session = {"name": EVIL}
    told.running = (under_way(message=EVIL, progress=3.5),)
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
        "Inbox", "Calls", "Charts", "Tools", "Agents", "Sessions", "Nodes", "Usage", "Policy", "Health",
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
    assert "Run again" not in text


def test_page_of_a_call_shows_stages_audit_row_children_and_tables(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.details = answered({"value": [{"city": "Graz", "n": 3}]}).model_copy(
        update={
            "children": (call(9, parent_id=call().call_id), call(10, parent_id=call(9).call_id))
        }
    )
    text = browser.get(f"/calls/{call().call_id}").text
    assert re.search(r'<rect class="stage-2" x="25.0" width="75.0"', text)
    assert "row 7" in text
    below = text[text.index(f"/calls/{call(9).call_id}") :]
    assert below.index("<ul") < below.index(f"/calls/{call(10).call_id}") < below.index("</ul>")
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


def test_files_of_an_answer_are_text_downloads(browser: Browser, told: SimpleNamespace) -> None:
    told.details = answered({"files": [shown(b"<script>alert(1)</script>"), {"url": "/v1/x"}]})
    told.blob = SVG
    path = f"/calls/{call().call_id}/files"
    for number, content in enumerate((b"<script>alert(1)</script>", SVG)):
        found = browser.get(f"{path}/{number}")
        require_download(found)
        assert found.content == content
    assert browser.get(f"{path}/2").status_code == 404


def test_program_is_shown_in_colours_and_its_traceback_once(
    browser: Browser, told: SimpleNamespace
) -> None:
    trace = "Traceback: no\nsuch luck"
    told.details = answered(
        {"stderr": trace, "exception": {"traceback": trace}, "stdout": "out\n"}
    ).model_copy(
        update={
            "call": call(tool_name="run_python"), "answer": "shown",
            "arguments": {"code": "import os  # '<b>'\n", "stdin": "import os"},
        }
    )  # fmt: skip
    text = browser.get(f"/calls/{call().call_id}").text
    assert '<span class="word">import</span> os' in text
    assert '<span class="comment"># &#39;&lt;b&gt;&#39;</span>' in text
    assert text.count('<span class="word">import</span>') == 1
    page = text[: text.index("The whole envelope")]
    assert page.count("such luck") == 1
    assert page.index("Arguments</h2>") < page.index("such luck") < page.index("stdout</h3>")


def test_page_of_a_running_call_changes_only_with_its_progress(
    browser: Browser, told: SimpleNamespace
) -> None:
    path = f"/calls/{call().call_id}"
    told.details = details(call=under_way(progress=40, message="half-way"))
    page = browser.get(path).text
    require_inert(page)
    assert "40 % half-way" in page
    assert "Cancel this call" in page
    assert "Stages</h2>" not in page
    (mark,) = re.findall(r"/running\?mark=([0-9a-f]{16})", page)
    told.asked.clear()
    assert browser.part(f"{path}/running?mark={mark}").status_code == 204
    assert len(told.asked) == 1  # it does not wait for news
    told.details = details(call=under_way(progress=80))
    part = browser.part(f"{path}/running?mark={mark}")
    assert "80 %" in part.text
    assert mark not in part.text
    told.details = details()
    over = browser.part(f"{path}/running?mark={mark}")
    assert (over.status_code, over.headers["hx-refresh"]) == (204, "true")


def test_running_calls_are_cancelled_from_the_list_by_administrators_only(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.running = (under_way(3), under_way(4, is_waiting=True))
    page = browser.get("/calls").text
    path = f"/calls/{call(3).call_id}/cancel"
    assert page.count(path) == 1
    assert "waits for a human" in page
    assert browser.post(path).status_code == 303
    assert ("cancel", call(3).call_id, {}) in told.asked
    (mark,) = re.findall(r'name="mark" value="([0-9a-f]+)"', page)
    assert browser.get(f"/calls/now?mark={mark}").status_code == 204


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (call().call_id, f"/calls/{call().call_id}"),
        (SESSION, f"/sessions/{SESSION}"),
        ("Usage", "/usage"),
        ("mon", "/sessions/" + SESSION),
        ("alert(1)", "/sessions/" + SESSION),
        ("division", "/calls?text=division"),
        ("sess_../calls", "/calls?text=sess_..%2Fcalls"),
    ],
)
def test_palette_goes_to_what_has_the_name(
    browser: Browser, told: SimpleNamespace, words: str, address: str
) -> None:
    told.session = {"name": f"monday {EVIL}"}
    found = browser.get(f"/search?q={quote(words)}")
    assert (found.status_code, found.headers["location"]) == (303, address)
    part = browser.part(f"/search?q={quote(words)}")
    require_inert(part.text)
    assert f'href="{address}"' in part.text.replace("&amp;", "&")


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
    assert ("output", "b") in told.asked
    browser.get(f"/sessions/{SESSION}?process=d")
    assert ("output", "d") in told.asked


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


def test_lost_session_says_when_and_why_it_was_lost(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.session = {
        "state": SessionStatus.LOST, "name": "build", "why": "Its container is gone.",
        "expires_at": datetime.now(UTC) - timedelta(hours=3),
    }  # fmt: skip
    page = browser.get(f"/sessions/{SESSION}").text
    assert "<h1>build " in page
    assert "Its container is gone." in page
    assert re.search(r"<dt>Lost</dt><dd>.*3 h ago", page)


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
    assert re.findall(r'aria-label="(\w+) over time', text) == ["Calls", "Tokens", "Money"]
    assert '<rect class="over" width="90.0"' in text


def test_failed_means_the_same_on_usage_as_on_charts(browser: Browser) -> None:
    usage, charts = browser.get("/usage").text, browser.get("/charts").text
    assert "<dt>Failed</dt><dd>1</dd>" in usage  # 3 ended with an error, 2 of them were refused
    words = "Calls that were denied, refused or had wrong arguments did not fail."
    assert words in usage
    assert words in charts


@pytest.mark.parametrize("executor", sorted(set(EXECUTORS) - {"decision"}))
@pytest.mark.parametrize("sandboxed", [True, False])
def test_tool_is_said_to_run_where_its_executor_places_it(executor: str, sandboxed: bool) -> None:
    tool = function_definition(sandboxed=sandboxed).model_copy(update={"executor": executor})
    kind = EXECUTORS[executor].placement(tool, in_session=True).kind
    elsewhere = {"http": "remote service", "http:fetch": "remote service", "mcp": "MCP server"}
    assert place_of(tool)[0] == elsewhere.get(executor, kind)


def test_policy_shows_what_shadow_rules_would_have_done(browser: Browser) -> None:
    text = browser.get("/policy").text
    assert "41" in text
    assert "The newest file is refused" in text
    assert "arguments that are kept" in text


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
    assert "would have decided at most 3 calls" in tried.text
    told.certain = 2
    assert (
        "would have decided 2 to 3 calls"
        in browser.post("/policy/try", {"rules": "[[rules]]"}).text
    )
    told.certain = 3
    assert "would have decided 3 calls" in browser.post("/policy/try", {"rules": "[[rules]]"}).text
    require_inert(browser.post("/policy/try", {"rules": "id = 7"}).text)


def test_administrator_drains_and_resumes_nodes(browser: Browser, told: SimpleNamespace) -> None:
    told.nodes = (
        NodeRecord(name="worker-1", state=NodeState.JOINED, slots=4, used=3, memory_mb=2048),
        NodeRecord(name="worker-2", state=NodeState.DRAINED, slots=4),
        NodeRecord(name="worker-3", state=NodeState.GONE, why="The node is lost."),
    )
    text = browser.get("/nodes").text
    assert "3 of 4" in text
    assert "The node is lost." in text
    actions = re.findall(r'action="/nodes/([^"]+)"', text)
    assert actions == ["worker-1/drain", "worker-2/resume"]
    for action in actions:
        assert browser.get(f"/nodes/{action}").status_code == 405
        assert browser.post(f"/nodes/{action}", csrf=False).status_code == 403
        assert told.asked == []
    for action in actions:
        assert browser.post(f"/nodes/{action}").headers["location"] == "/nodes"
    assert told.asked == [("drain", "worker-1", {}), ("resume", "worker-2", {})]
    told.scopes = (Scope.APPROVE,)
    browser.log_in(ALICE)
    assert 'action="/nodes' not in browser.get("/nodes").text


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


def entry(path: str, kind: str = "file") -> WorkspaceEntry:
    return WorkspaceEntry(path=path, kind=kind, size=5, modified_at="2026")


def test_workspace_is_a_tree_or_one_directory_if_it_is_large(
    browser: Browser, told: SimpleNamespace
) -> None:
    path = f"/sessions/{SESSION}"
    told.files = (entry("a", "directory"), entry("a/b.txt"), entry("c", "directory"), entry("d"))
    text = browser.get(path).text
    assert re.search(r"<summary><code>a/</code></summary>\s*<ul><li><a [^>]*file=a/b\.txt", text)
    assert f'href="{path}?folder=c"' in text
    told.files = (entry("a", "directory"), *(entry(f"a/{n}") for n in range(200)))
    text = browser.get(path).text
    assert f'href="{path}?folder=a"' in text
    assert "a/7" not in text


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_session_that_sleeps_is_woken_only_when_asked(
    browser: Browser, told: SimpleNamespace, state: str
) -> None:
    told.session = {"state": SessionStatus(state), "project": "/home/ann/shop"}
    page = browser.get(f"/sessions/{SESSION}").text
    assert "Wake it" in page
    assert "/diff" not in page
    assert ("files", SESSION) not in told.asked
    assert "Wake it" not in browser.get(f"/sessions/{SESSION}?wake=1").text
    assert ("files", SESSION) in told.asked


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", ""])
def test_port_that_is_none_is_refused(browser: Browser, port: str) -> None:
    assert browser.post(f"/sessions/{SESSION}/ports", {"port": port}).status_code == 400


def test_tool_is_called_by_its_form_and_the_answer_shown(
    browser: Browser, told: SimpleNamespace
) -> None:
    fields = {"given:to": "1", "text:to": "it's me", "agent": "clerk", "token": ""}
    page = browser.post("/tools/send/try", fields)
    require_inert(page.text)
    ((tool, arguments, options),) = told.tools.made
    assert (tool, arguments, options["agent_id"]) == ("send", {"to": "it's me"}, "clerk")
    assert options["trace_id"].startswith("console:approver:alice:")  # who did it
    text = html.unescape(page.text)
    command = """fumehood call send '{"to": "it'"'"'s me"}' --agent clerk"""
    assert command in text
    assert "curl --unix-socket /run/engine.sock" in text
    assert """client.call('send', {'to': "it's me"}, agent_id='clerk')""" in text
    assert '"method": "tools/call", "params": {"name": "send"' in text
    browser.post("/tools/send/try", {**fields, "dry_run": "1"})
    assert told.tools.made[-1][2]["dry_run"] is True


class SlowForwarding:
    def __init__(self, *_: object) -> None: ...

    async def serve(self, _port: int, _seconds: float, ready: Callable[[str], None]) -> None:
        await anyio.sleep(0.01)
        ready("http://a.localhost/")
        await anyio.sleep_forever()


class NoPortForwarding(SlowForwarding):
    async def serve(self, *_: object) -> None:
        raise OSError(98, "in use")


def login_of(name: str) -> Login:
    return Login(name, "approver:" + name, frozenset(), Mock(close=AsyncMock()), "", 0.0, 0.0)


@pytest.mark.anyio
async def test_port_closes_with_the_login_that_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "Forwarding", SlowForwarding)
    opened = ports.Ports(Path("/run/engine.sock"))
    alice, bob = login_of("alice"), login_of("bob")
    async with anyio.create_task_group() as group:
        opened.group = group
        for login in (alice, alice, bob):
            await opened.open(login, SESSION, 8000)
        assert len(opened.of(alice, SESSION)) == len(opened.of(bob, SESSION)) == 1
        alice.ended.set()
        await anyio.wait_all_tasks_blocked()
        assert not opened.of(alice, SESSION)
        assert opened.of(bob, SESSION)
        with pytest.raises(RuntimeError):  # a late click, which leads to the login
            await opened.open(alice, SESSION, 8000)
        assert not opened.of(alice, SESSION)
        group.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "found", [refusal("UNAUTHORIZED", "Unknown."), (Scope.APPROVE,), (Scope.ADMIN,)]
)
async def test_port_closes_when_its_opener_may_not_administer_any_more(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.setattr(ports, "Forwarding", SlowForwarding)
    monkeypatch.setattr(ports, "LOOK_S", 0.02)
    opened = ports.Ports(Path("/run/engine.sock"))
    alice = login_of("alice")
    is_refused = isinstance(found, Exception)
    told = AsyncMock(side_effect=found) if is_refused else AsyncMock()
    told.return_value.scopes = found
    alice.control.whoami = told  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        opened.group = group
        await opened.open(alice, SESSION, 8000)
        if found == (Scope.ADMIN,):
            await anyio.sleep(0.2)
            assert opened.of(alice, SESSION)
        else:
            with anyio.fail_after(120):
                while opened.of(alice, SESSION):
                    await anyio.sleep(0.01)
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_port_that_this_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "Forwarding", NoPortForwarding)
    opened = ports.Ports(Path("/run/engine.sock"))
    async with anyio.create_task_group() as group:
        opened.group = group
        with pytest.raises(OSError, match="no port"):
            await opened.open(login_of("alice"), SESSION, 8000)


@pytest.mark.anyio
async def test_ports_opened_at_the_same_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "Forwarding", SlowForwarding)
    opened = ports.Ports(Path("/run/engine.sock"))
    alice = login_of("alice")
    refused: list[int] = []

    async def open_one(port: int) -> None:
        try:
            await opened.open(alice, SESSION, port)
        except ports.TooManyPorts:
            refused.append(port)

    async with anyio.create_task_group() as group:
        opened.group = group
        async with anyio.create_task_group() as asking:
            for port in range(1, ports.MAX_OPEN + 6):
                asking.start_soon(open_one, port)
        assert len(opened.of(alice, SESSION)) == ports.MAX_OPEN
        assert len(refused) == 5
        group.cancel_scope.cancel()


def test_answer_goes_to_no_one_who_may_not_administer_any_more(
    browser: Browser, told: SimpleNamespace
) -> None:
    class Revoking(Tools):
        async def call(self, tool: str, arguments: Any, **options: Any) -> Envelope:
            told.scopes = (Scope.APPROVE,)
            return await super().call(tool, arguments, **options)

    browser.console.caller = Revoking()
    page = browser.post("/tools/send/try", {"given:to": "1", "text:to": "x"})
    assert page.status_code == 403
    assert "stdout" not in page.text


def test_call_is_made_in_the_session_that_has_the_name(
    browser: Browser, told: SimpleNamespace
) -> None:
    page = browser.post("/tools/send/try", {"given:to": "1", "text:to": "x", "session": "monday"})
    assert told.tools.made[-1][2]["session_id"] == "monday"
    assert "--session monday" in html.unescape(page.text)


def test_revoked_administrator_calls_no_tool_and_opens_no_port(
    browser: Browser, told: SimpleNamespace
) -> None:
    told.scopes = (Scope.APPROVE,)  # the login is from before
    assert browser.post("/tools/send/try", {"given:to": "1", "text:to": "x"}).status_code == 403
    assert browser.post(f"/sessions/{SESSION}/ports", {"port": "8000"}).status_code == 403
    assert told.tools.made == []


@pytest.mark.parametrize("token", ["a\nb", "ü"])
def test_text_that_is_no_token_is_refused(browser: Browser, token: str) -> None:
    assert browser.post("/tools/send/try", {"token": token}).status_code == 400


def test_faults_of_arguments_are_shown_by_argument(browser: Browser, told: SimpleNamespace) -> None:
    page = browser.post("/tools/send/try", {"given:n": "1", "number:n": "many"})
    assert "This is not a number" in page.text
    assert told.tools.made == []
    page = browser.post("/tools/send/try", {"given:to": "1", "text:to": "refused"})
    assert "This is not an address" in page.text


def test_credential_of_an_approver_calls_nothing(
    browser: Browser, told: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.scopes = (Scope.APPROVE,)
    browser.log_in(ALICE)
    assert browser.post("/tools/send/try", {}).status_code == 403
    assert browser.post("/tools/send/try", {}, csrf=False).status_code == 403
    assert told.tools.made == []
    made: list[Any] = []

    class WithToken(Tools):
        def __init__(self, socket: Path, *, credential: str) -> None:
            super().__init__()
            made.append((socket, credential))

    monkeypatch.setattr("fumehood.web.pages.tools.AsyncClient", WithToken)
    page = browser.post("/tools/send/try", {"token": " fht_secret "})
    assert page.status_code == 200
    assert made == [(Path("/run/engine.sock"), "fht_secret")]
    assert "fht_secret" not in page.text


@pytest.mark.parametrize(("hours", "by", "steps"), [("24", "hour", 24), ("720", "day", 30)])
def test_each_step_of_a_chart_leads_to_its_calls(
    browser: Browser, told: SimpleNamespace, hours: str, by: str, steps: int
) -> None:
    now = datetime.now(UTC)
    at = now.strftime("%Y-%m-%dT%H" if by == "hour" else "%Y-%m-%d")
    told.steps = (CallStep(at=at, calls=8, failed=2, p50_ms=1.0, p95_ms=4.0, cost=0.0),)
    text = html.unescape(browser.get(f"/charts?hours={hours}&tool=send&agent=").text)
    assert told.asked[-1] == {"hours": int(hours), "by": by, "tool": "send"}
    links = re.findall(r'<a href="(/calls\?[^"]+)" aria-label="([^"]+)"', text)
    assert len(links) == 2 * steps
    address, words = links[steps - 1]
    assert words.endswith("8 calls, 2 of them failed")
    assert "tool=send" in address
    since, until = (
        datetime.fromisoformat(unquote(one))
        for one in re.findall(r"(?:since|until)=([^&]+)", address)
    )
    assert since <= now < until
    assert (until - since) == timedelta(hours=1 if by == "hour" else 24)
    assert 'height="25.0"' in text
    browser.get(address)
    assert told.asked[-1]["since"] == since.isoformat()
    assert "Cost</h2>" not in text


def test_rules_are_tried_before_they_are_saved(browser: Browser, told: SimpleNamespace) -> None:
    assert "has invisible characters" in browser.get("/policy").text
    told.policy = f"# {SCRIPT}\tx"
    page = browser.get("/policy").text
    require_inert(page)
    (version,) = re.findall(r'name="version" value="([^"]+)"', page)
    odd = {"text": f"# {EVIL}", "version": version}
    assert browser.post("/policy/check", odd).status_code == 400
    rules = f"[[rules]]\r\nid = 'a'\r\n# {SCRIPT}"
    checked = browser.post("/policy/check", {"text": rules, "version": version})
    require_inert(checked.text)
    assert "would have decided" in checked.text
    assert not [one for one in told.asked if one[0] == "replace"]
    saved = browser.post("/policy/save", {"text": rules, "version": version})
    assert saved.headers["location"] == "/policy"
    assert told.asked[-1] == ("replace", rules.replace("\r\n", "\n"))
    again = browser.post("/policy/save", {"text": rules, "version": "v0"})
    assert "has changed" in again.text
    assert "Save these rules" not in browser.post("/policy/check", {"text": "id = 7"}).text


def test_agents_are_made_and_changed_in_the_console(
    browser: Browser, told: SimpleNamespace
) -> None:
    made = {"id": "clerk", "description": "d", "principals": "uid:1, token:ci"}
    assert browser.post("/agents", made).status_code == 303
    assert told.asked[-1] == ("create", "clerk", "d", {"principals": ["uid:1", "token:ci"]})
    browser.post("/agents/clerk/bind", {"tool": "send", "fixed": '{"to": "x"}'})
    assert told.asked[-1] == ("bind", "clerk", "send", {"fixed": {"to": "x"}})
    assert browser.post("/agents/clerk/bind", {"tool": "send", "fixed": "["}).status_code == 400
    browser.post("/agents/clerk/unbind", {"tool": "send"})
    assert told.asked[-1] == ("unbind", "clerk", "send", {})
    browser.post("/agents/clerk", {"is_enabled": "false"})
    assert told.asked[-1] == ("update", "clerk", {"is_enabled": False})
    assert browser.post("/agents/clerk", {"is_enabled": "true"}, csrf=False).status_code == 403
