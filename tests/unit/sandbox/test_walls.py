"""The log of walls: how loud their events are."""

from __future__ import annotations

from typing import Any

from fumehood.sandbox.walls import logged


class _Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def warning(self, event: str, **values: Any) -> None:
        self.lines.append(("warning", values.get("why")))

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(("info", values.get("why")))


def test_repeated_failure_is_logged_as_a_warning_once() -> None:
    log = _Log()
    on_event = logged(log)  # type: ignore[arg-type]
    for number, why in enumerate(["disk full", "disk full", "no runtime", "no runtime"]):
        on_event("container.failed", {"name": f"c-{number}", "image": "python", "why": why})
    on_event("container.failed", {"name": "c-4", "image": "shell", "why": "no runtime"})
    on_event("container.started", {"name": "c-5", "image": "python"})
    on_event("container.failed", {"name": "c-6", "image": "python", "why": "no runtime"})
    assert [level for level, _ in log.lines] == [
        "warning", "info", "warning", "info", "warning", "info", "warning",
    ]  # fmt: skip
