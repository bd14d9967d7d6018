"""Tests of the adapters, with the frameworks themselves and scripted models.

They run in an environment of their own (`make frameworks`), whose pins would not fit the
developers' one, against the daemon that `tests/integration/test_frameworks.py` has started.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fumehood import Client, ControlClient

collect_ignore_glob = [] if find_spec("deepagents") else ["test_*.py"]

PAGES = Path(__file__).parents[2] / "docs" / "howto"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def page() -> Callable[[str], dict[str, Any]]:
    """The names that the one snippet of a page defines."""

    def run(name: str) -> dict[str, Any]:
        (snippet,) = FENCE.findall((PAGES / f"{name}.md").read_text(encoding="utf-8"))
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(snippet, name, "exec"), names)
        return names

    return run


@pytest.fixture
def client() -> Iterator[Client]:
    with Client() as client:
        yield client


@pytest.fixture
def approver() -> Iterator[ControlClient]:
    socket, credential = os.environ["TEST_CONTROL_SOCKET"], os.environ["TEST_CREDENTIAL"]
    with ControlClient(socket, credential=credential) as control:
        yield control


@pytest.fixture
def decide(approver: ControlClient) -> Callable[[str], Any]:
    """Decide about the next call that waits, and so on: `with decide("approve", "deny"): …`."""

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
    """The sessions that are active now. Afterwards there are none that were not there before."""

    def active() -> set[str]:
        return {one.id for one in client.sessions() if one.state == "active"}

    before = active()
    yield active
    assert active() == before
