"""What a node answers is read as values, also if the node was taken over."""

from __future__ import annotations

import builtins
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from fumehood.cluster.model import HeldState, ImageFacts, NodeFacts, NodeReport, Refused
from fumehood.cluster.node import Fenced
from fumehood.cluster.ray_membership import _opened
from fumehood.cluster.wall import NodeGone
from fumehood.core import errors
from fumehood.core.errors import EndedBy, EngineError, InvalidParams
from fumehood.core.limits import Limit
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.wall import HostSize, ImageMissing, RunEnding

REPORT = NodeReport(
    number=1, is_ready=True, is_drained=False, seen=frozenset({Limit.MEMORY}), faults=(),
    host=HostSize(1024, 2.0),
    images={"python": ImageFacts("sha256:1", 1.0, ("python",))}, warm={Kind("python", 512): 1},
    counts={"idle": 1}, others=0, engines=1,
    changed={"sess_1": HeldState("c", ("python",), "", None, False, True)},
)  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        NodeFacts(id="id", name="name", version="1", slots=2, clock=3.0),
        REPORT,
        [("output", "stdout", "text"), ("data", b"x"), ("ending", RunEnding(EndedBy.OK, "call"))],
        ({"image": "python"}, HeldState("c", (), "", "lost", False, False)),
    ],
)
def test_answers_of_nodes_are_read(answer: object) -> None:
    assert _opened(pickle.dumps(answer)) == answer


@pytest.mark.parametrize(
    "kind", [InvalidParams, errors.SandboxUnavailable, errors.QuotaExceeded, ImageMissing]
)
def test_refusals_of_nodes_are_raised(kind: type[EngineError]) -> None:
    with pytest.raises(kind, match="words") as raised:
        _opened(pickle.dumps(Refused(kind("words", fields=["a"], retry_after_ms=5))))
    assert (raised.value.fields, raised.value.retry_after_ms) == (("a",), 5)
    with pytest.raises(Fenced):
        _opened(pickle.dumps(Refused(Fenced())))


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def test_attack_answer_that_calls_a_function_is_not_run(tmp_path: Path) -> None:
    """Control: the same bytes run where they are not read as values only."""
    made = tmp_path / "made"
    for attack in (
        pickle.dumps(Calls(os.mkdir, str(made))),
        pickle.dumps([Refused(Calls(builtins.eval, f"__import__('os').mkdir({str(made)!r})"))]),  # type: ignore[arg-type]
        b"cfumehood.core.errors\nEngineError.__init__.__globals__.__class__\n.",
        b"\x80\x04\x8c\x13fumehood.core.errors\x8c\x08__dict__\x93.",
        b"not a pickle", b"", pickle.dumps(REPORT)[:-5],
    ):  # fmt: skip
        with pytest.raises(NodeGone, match="sent invalid data"):
            _opened(attack)
        assert not made.exists()
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(made))))
    assert made.exists()
