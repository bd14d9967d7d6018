"""Rows of remembered rules: what an approver's yes allows from then on, without asking.

Host side, beside `approvals`. A use of a rule that has only so many is counted before the call
starts, so that a crash can only lose uses.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.engine import RowMapping

from fumehood.approvals.model import RememberedRule
from fumehood.storage.changes import stamp
from fumehood.storage.schema import REMEMBERED

_TIMES = ("created_at", "expires_at", "removed_at")


def add(connection: Connection, rule: RememberedRule) -> None:
    """Keep a new one."""
    row: dict[str, Any] = rule.model_dump(exclude=set(_TIMES))
    for name in _TIMES:
        moment = getattr(rule, name)
        row[name] = None if moment is None else stamp(moment)
    connection.execute(insert(REMEMBERED), row)


def all_rules(connection: Connection) -> list[RememberedRule]:
    """Every one, oldest first, those that were taken back included."""
    rows = connection.execute(select(REMEMBERED).order_by(REMEMBERED.c.created_at)).mappings()
    return [_rule(row) for row in rows]


def use(connection: Connection, rule_id: str) -> bool:
    """Count one use; False where none is left or the rule was taken back."""
    used = (
        update(REMEMBERED)
        .where(
            REMEMBERED.c.id == rule_id,
            REMEMBERED.c.removed_at.is_(None),
            (REMEMBERED.c.uses_left.is_(None)) | (REMEMBERED.c.uses_left > 0),
        )
        .values(uses_left=REMEMBERED.c.uses_left - 1, used=REMEMBERED.c.used + 1)
    )
    return connection.execute(used).rowcount == 1


def remove(connection: Connection, rule_id: str, at: datetime) -> None:
    """Take one back."""
    gone = update(REMEMBERED).where(REMEMBERED.c.id == rule_id)
    connection.execute(gone.values(removed_at=stamp(at)))


def _rule(row: RowMapping) -> RememberedRule:
    fields: dict[str, Any] = dict(row)
    for name in _TIMES:
        text = fields[name]
        fields[name] = None if text is None else datetime.fromisoformat(text)
    return RememberedRule(**fields)
