"""Tables: values of pandas and NumPy as plain ones, where they are small enough for an answer.

Guest side, in the child; pure, and nothing is done where those packages were not loaded. A table
becomes a list of records, its index a column where it says something. A record holds exactly what
the table does, or the table is there as text only.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

MAX_CELLS = 5000
"""More than fit the answer; a larger table is not even looked at."""

MAX_RECORDS_BYTES = 10 * 1024
"""As JSON: what stands in an answer itself. A larger table is there as text only."""

TOO_LARGE = (
    "value: the table is too large to stand in the answer as records, so it is there as text, "
    "shortened; write it to a file (to_csv), or end with a part of it (head)"
)


class NoTable(Exception):
    """It is nothing that this file knows, or JSON cannot hold it."""


class TooLarge(NoTable):
    """It is one, and does not fit an answer."""


def plain_table(value: Any) -> Any:
    """Records of a DataFrame or Series, numbers of an array or of NumPy.

    Raises:
        NoTable: it is none, or cannot be told exactly.
        TooLarge: it is one, and does not fit.
    """
    pandas, numpy = sys.modules.get("pandas"), sys.modules.get("numpy")
    try:
        if pandas is not None and isinstance(value, pandas.Series):
            value = value.to_frame(value.name if value.name is not None else "value")
        if pandas is not None and isinstance(value, pandas.DataFrame):
            return _records(value, pandas)
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.size > MAX_CELLS:
                raise TooLarge
            return value.tolist()
    except NoTable:
        raise
    except Exception:  # the program's own classes may be among its cells
        raise NoTable from None
    raise NoTable


def _records(table: Any, pandas: Any) -> list[dict[str, Any]]:
    if table.size > MAX_CELLS:
        raise TooLarge
    is_numbered = isinstance(table.index, pandas.RangeIndex) and table.index.name is None
    if not is_numbered:
        table = table.reset_index()
    names = [str(name) for name in table.columns]
    if len(set(names)) != len(names):
        raise NoTable  # one of them would hide the other
    columns = [
        [_cell(cell, pandas) for cell in table.iloc[:, number].tolist()]
        for number in range(len(names))
    ]
    records = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if len(json.dumps(records)) > MAX_RECORDS_BYTES:
        raise TooLarge
    return records


def _cell(cell: Any, pandas: Any) -> Any:
    """A cell as JSON has it: what is missing is null, moments and spans are ISO 8601."""
    if cell is None or cell is pandas.NaT or cell is pandas.NA:
        return None
    kind = type(cell)
    if kind is float:
        if math.isinf(cell):
            raise NoTable
        return None if math.isnan(cell) else cell
    if kind in (str, bool, int):
        return cell
    if isinstance(cell, pandas.Timestamp | pandas.Timedelta) or hasattr(cell, "isoformat"):
        return str(cell.isoformat())
    numpy = sys.modules["numpy"]
    if isinstance(cell, numpy.generic):
        return _cell(cell.item(), pandas)
    raise NoTable
