"""The figures that the parts of an engine have, read when somebody asks for the metrics.

Beside `compose`, between it and `engine`: the only code of metrics that knows all parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from fumehood.approvals.model import ApprovalState
from fumehood.compose import Composition
from fumehood.core.status import engine_version
from fumehood.observe.metrics import Figure


async def figures_of(made: Composition) -> list[Figure]:
    """All figures. Raises ReadFailed."""
    pending = await made.approvals.requests.table.in_state(ApprovalState.PENDING)
    shown = Figure("approvals_pending", "Calls that wait for a human's approval.", len(pending))
    return [shown, *_of_calls(made), *_of_containers(made), *_of_state(made), *_of_sight(made)]


def _of_calls(made: Composition) -> Iterator[Figure]:
    yield Figure("calls_running", "Calls that run or wait now.", len(made.calls.running))
    yield Figure("sessions_open", "Sessions that exist now.", made.sessions.counts["active"])
    yield Figure("circuits_open", "Services that calls are not let through to.",
                 made.circuits.broken())  # fmt: skip
    cache = made.state.cache.status()
    yield Figure("cache_hits", "Calls answered by the result cache.", cache.hits, kind="counter")
    yield Figure("cache_misses", "Calls that it did not answer.", cache.misses, kind="counter")
    yield Figure("cache_bytes", "Size of the results in the cache.", cache.size_bytes)
    used: dict[str, float] = {}
    for one in made.state.budgets.standings():
        limit, taken = Decimal(one.limit), Decimal(one.spent) + Decimal(one.held)
        ratio = float(taken / limit) if limit else 1.0
        used[one.budget] = max(ratio, used.get(one.budget, 0.0))
    yield Figure("budget_used_ratio", "The part of a budget that is used, of its owner who has "
                 "used most.", used, "budget")  # fmt: skip


def _of_containers(made: Composition) -> Iterator[Figure]:
    counts: dict[str, float] = {**made.walls.containers()}
    waiting, dirty = counts.pop("waiting", 0), counts.pop("dirty", 0)
    yield Figure("containers", "Containers by state; `held` ones belong to sessions.", counts,
                 "state")  # fmt: skip
    yield Figure("container_calls_waiting", "Calls that wait for a container.", waiting)
    yield Figure("containers_dirty", "Containers that could not be cleaned, and were removed.",
                 dirty, kind="counter")  # fmt: skip


def _of_state(made: Composition) -> Iterator[Figure]:
    database = made.database
    yield Figure("state_rows_lost", "Rows of the call log that were not stored.",
                 database.lost_posts, kind="counter")  # fmt: skip
    yield Figure("state_failing", "1 while the state cannot be written.", database.is_failing)
    yield Figure("state_writes_waiting", "Changes that wait to be written.", database.waiting)


def _of_sight(made: Composition) -> Iterator[Figure]:
    observer = made.basis.observer
    alerts = observer.alerts.look().alerts
    yield Figure("alert_firing", "1 while an alert of the engine fires.",
                 {a.name: float(a.firing) for a in alerts if a.tool is None}, "alert")  # fmt: skip
    if observer.spans is not None:
        yield Figure("traces_left_out", "Calls without spans, because there were too many.",
                     observer.spans.left_out, kind="counter")  # fmt: skip
    yield Figure("build_info", "The version of the engine.", {engine_version(): 1.0}, "version")
