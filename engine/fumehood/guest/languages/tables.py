"""Tables: values of pandas and NumPy as plain ones, where they are small enough for an answer.

Guest side, in the child; pure, and nothing is done where those packages were not loaded. A table
becomes a list of records, its index a column where it says something.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_CELLS = 5000
"""More than fit the answer; a larger table is not even looked at."""

MAX_RECORDS_BYTES = 10 * 1024
"""As JSON: what stands in an answer itself. A larger table is there as text only."""


class NoTable:
    """It is nothing that this file knows, or too large."""


def plain_table(value: Any) -> Any:
    """Records of a DataFrame or Series, numbers of an array; else `NoTable`."""
    pandas, numpy = sys.modules.get("pandas"), sys.modules.get("numpy")
    try:
        if pandas is not None and isinstance(value, pandas.Series):
            value = value.to_frame(value.name if value.name is not None else "value")
        if pandas is not None and isinstance(value, pandas.DataFrame):
            return _records(value, pandas) if value.size <= MAX_CELLS else NoTable
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        if numpy is not None and isinstance(value, numpy.ndarray) and value.size <= MAX_CELLS:
            return value.tolist()
    except Exception:  # the program's own classes may be among its cells
        return NoTable
    return NoTable


def _records(table: Any, pandas: Any) -> Any:
    is_numbered = isinstance(table.index, pandas.RangeIndex) and table.index.name is None
    if not is_numbered:
        table = table.reset_index()
    text = table.to_json(orient="records", date_format="iso", default_handler=str)
    return json.loads(text) if len(text) <= MAX_RECORDS_BYTES else NoTable
