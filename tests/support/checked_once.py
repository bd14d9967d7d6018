"""Faster engine starts: results that are equal for every start are cached.

Tests start thousands of engines. Half of each start was spent on checking the schemas of built-in
tools and searching for installed packages, with the same result each time in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.pipeline import check_result
from fumehood.registry import definitions, discover


def check_once(put: Callable[[Any, str, Any], None]) -> None:
    """Check each schema, and look for packages, once in this process. `put` sets an attribute."""
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
