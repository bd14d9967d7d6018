"""The check of the interpreter's limits in `fumehood doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.cli.doctor import limit_findings
from fumehood.cli.findings import Finding
from fumehood.config import Config
from fumehood.interpreter.in_engine import configured_limits
from fumehood.interpreter.wall import InterpreterWall


def check(config: Config) -> Iterator[Finding]:
    """Start a guest, which tries to break its own limits, and yield a finding for each limit."""
    yield from limit_findings("interpreter", InterpreterWall(configured_limits(config)), "missing")
