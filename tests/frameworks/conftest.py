"""Adapter tests with the real frameworks and scripted models.

They run in separate environments (`make frameworks`), because their pins conflict with the
development environment, against the daemon started by `tests/integration/test_frameworks.py`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fumehood import Client, ControlClient, Refused

collect_ignore_glob = [] if find_spec("deepagents") else ["test_*.py"]
if not find_spec("langchain_mcp_adapters"):
    collect_ignore_glob.append("mcp1/test_*.py")

PAGES = Path(__file__).parents[2] / "docs" / "howto"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def names_of(name: str) -> dict[str, Any]:
    """The names that the snippets of a page define."""
    snippets = FENCE.findall((PAGES / f"{name}.md").read_text(encoding="utf-8"))
    assert snippets
    names: dict[str, Any] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, name, "exec"), names)
    return names


@pytest.fixture
def page() -> Callable[[str], dict[str, Any]]:
    return names_of


@pytest.fixture
def client() -> Iterator[Client]:
    with Client() as client:
        yield client


@pytest.fixture
def approver(client: Client) -> Iterator[ControlClient]:
    """An approver with no pending approvals; those of earlier tests are cancelled."""
    for left in client.approvals.list(state="pending").items:
        try:
            client.approvals.cancel(left.id)
        except Refused:  # its call has just ended
            assert client.approvals.show(left.id).state != "pending"
    socket, credential = os.environ["TEST_CONTROL_SOCKET"], os.environ["TEST_CREDENTIAL"]
    with ControlClient(socket, credential=credential) as control:
        yield control


@pytest.fixture
def decide(approver: ControlClient) -> Callable[[str], Any]:
    """Decide the next pending approvals in turn: `with decide("approve", "deny"): …`."""

    @contextmanager
    def deciding(*decisions: str) -> Iterator[None]:
        def run() -> None:
            for decision in decisions:
                while not (waiting := approver.approvals.list(state="pending").items):
                    if over.wait(0.05):
                        return
                getattr(approver.approvals, decision)(waiting[0].id, version=waiting[0].version)

        over = threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    return deciding


@pytest.fixture
def sessions(client: Client) -> Iterator[Callable[[], set[str]]]:
    """Return the active sessions; fails if the test leaves a new one behind."""

    def active() -> set[str]:
        return {one.id for one in client.sessions() if one.state == "active"}

    before = active()
    yield active
    assert active() == before


@pytest.fixture
def session_id(client: Client) -> Iterator[str]:
    session = client.create_session(image="python-data")
    yield session.id
    client.end_session(session.id)


@pytest.fixture
def options(session_id: str) -> tuple[str, ...]:
    """Options of `fumehood mcp`, because MCP clients pass on few environment variables."""
    return ("--socket", os.environ["FUMEHOOD_SOCKET"], "--session", session_id)


@pytest.fixture(scope="session")
def disk_mb() -> int:
    """The size of a session's disk. Skips if the engine cannot make any, but fails in CI."""
    if not os.environ["TEST_DISKS"]:
        assert os.environ["TEST_CI"] != "true", "CI=true, and the engine has no disks"
        pytest.skip("The engine has no disks for sessions.")
    return 256  # Inspect writes 50 MB, through a copy


@pytest.fixture(scope="session")
def any_disk_mb(request: pytest.FixtureRequest) -> Any:
    """`disk_mb`, or None on a host whose engine has no disks."""
    has_disks = os.environ["TEST_DISKS"] or os.environ["TEST_CI"] == "true"
    return request.getfixturevalue("disk_mb") if has_disks else None


class Script:
    """The calls of an agent that needs one approval, and their expected results.

    A scripted model makes the calls in turn and finishes after the last.
    """

    ASKS: ClassVar[dict[str, str]] = {"command": "echo ask-me >> log; sleep 2; echo done"}
    """Whether the approved call has ended before the agent repeats it."""
    FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint(6 * 7)"

    def __init__(self, approver: ControlClient) -> None:
        self._approver = approver
        self._calls = self._make()
        self._turn = threading.Lock()
        self.is_over = False
        """Whether an approved call is over before it is repeated."""

    def _make(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "calculator", {"expression": "5! + 2**10"}
        yield "run_python", {"code": self.FIGURE}
        yield "run_shell", self.ASKS
        self.approve(is_over=self.is_over)
        yield "run_shell", self.ASKS
        yield "run_shell", {"command": "wc -l < log"}

    def __call__(self) -> tuple[str, dict[str, Any]] | None:
        with self._turn:
            return next(self._calls, None)

    def approve(self, *, is_over: bool = True) -> None:
        """Approve the pending call and, if `is_over`, wait for its end."""
        approvals = self._approver.approvals
        (waiting,) = approvals.list(state="pending").items
        approvals.approve(waiting.id, version=waiting.version)
        end = time.monotonic() + 60
        while is_over and approvals.show(waiting.id).state in ("approved", "started"):
            assert time.monotonic() < end
            time.sleep(0.01)

    def check(self, results: list[str]) -> None:
        """Check that approval was requested once and the action ran once."""
        sums, figure, asked, done, lines = results
        assert "1144" in sums
        assert "42" in figure
        assert "REQUIRES_HUMAN_APPROVAL" in asked
        assert "done" in done
        assert "REQUIRES_HUMAN_APPROVAL" not in done
        assert re.search(r'"stdout": ?"1\\+n"', lines)
        assert not self._approver.approvals.list(state="pending").items
        assert next(self._calls, None) is None


@pytest.fixture
def script(approver: ControlClient) -> Script:
    return Script(approver)
