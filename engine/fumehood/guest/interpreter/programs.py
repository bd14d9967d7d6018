"""Loads the interpreter's programs in the zygote, and prepares each child for them.

Guest side, between the zygote and a child.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from fumehood.guest.core import seccomp
from fumehood.guest.interpreter import calculator, restricted
from fumehood.guest.interpreter.filter import build_interpreter_filter
from fumehood.guest.process.zygote import run_child, run_probe


def preload(config: dict[str, Any]) -> Callable[[int], None]:
    """Load the calculator and restricted Python in the zygote. `config` is not used.

    Return a function that each child must call first. Its argument is the supervisor's process id.
    It gives up the child's rights, and then answers requests.
    """
    filter_program = build_interpreter_filter()
    programs = {
        "calculator": calculator.run,
        "restricted_python": restricted.run,
        "probe": run_probe,
    }
    # Programs see the time of day in UTC, not in the host's time zone.
    os.environ["TZ"] = "UTC"
    time.tzset()
    calculator.preload()
    restricted.preload()
    seccomp.warm_up(filter_program)

    def prepare(supervisor_pid: int) -> None:
        run_child(
            supervisor_pid=supervisor_pid,
            programs=programs,
            # Each restricted program has its own child. The expressions of a trust domain share a
            # child, which the first expression warms up. Warming up the calculator in all children
            # would copy pages that most of them never need.
            warm_up=restricted.warm_up,
            filter_program=filter_program,
        )

    return prepare
