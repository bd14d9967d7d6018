"""Faster engine starts: results that are equal for every start are cached.

Tests start thousands of engines. Half of each start was spent on checking the schemas of built-in
tools and searching for installed packages, with the same result each time in one process. So was
most of the time to open a database in memory, on the steps that make its tables.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from sqlalchemy import Engine, StaticPool

from fumehood.core.json_types import JsonObject
from fumehood.pipeline import check_result
from fumehood.registry import definitions, discover
from fumehood.storage import sqlite


def check_once(put: Callable[[Any, str, Any], None]) -> None:
    """Check each schema, look for packages and make the tables of a database in memory once in this
    process. `put` sets an attribute.
    """
    check, known = definitions.schema_faults, dict[str, list[str]]()

    def remembered(schema: JsonObject, where: str) -> list[str]:
        try:
            json.dumps(schema)
            key = where + repr(schema)  # which tells a key 1 from "1"
        except (TypeError, ValueError, RecursionError):  # of a test that tries what is none
            return check(schema, where)
        if key not in known:
            known[key] = check(schema, where)
        return list(known[key])

    put(definitions, "schema_faults", remembered)
    for module in (check_result, discover):
        put(module, "entry_points", cache(entry_points))
    put(sqlite, "_migrate", _migrated_once(sqlite._migrate))


def _migrated_once(migrate: Callable[[Engine], None]) -> Callable[[Engine], None]:
    """Migrate the first empty database in memory, and copy it to those that come later."""
    empty: list[sqlite3.Connection] = []

    def migrated(engine: Engine) -> None:
        if not isinstance(engine.pool, StaticPool):  # a file, which may be of an earlier version
            migrate(engine)
            return
        if not empty:
            migrate(engine)
        with engine.connect() as connection:
            raw: Any = connection.connection.driver_connection
            if empty:
                empty[0].backup(raw)
            else:
                empty.append(sqlite3.connect(":memory:", check_same_thread=False))
                raw.backup(empty[0])

    return migrated
