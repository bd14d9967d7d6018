"""The value of a program as reported in its claim: as JSON if possible, and as text.

Guest side, in the child. A pandas or NumPy table becomes a list of records if it is small enough
for an answer, with a meaningful index as a column. Records hold exactly the table's values;
otherwise the table is reported as text only. Packages that are not loaded are ignored.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from fumehood.protocol import strict_json

MAX_VALUE_BYTES = 64 * 1024
MAX_REPR_CHARACTERS = 10_000

Claim = dict[str, Any]

MAX_RECORDS_BYTES = 10 * 1024
"""Size limit of a table as JSON in an answer. A larger one is text only."""

LEAST_CELL_BYTES = 2
"""Minimum size of a cell in JSON: a digit and a comma."""

TOO_LARGE = (
    "value: the table is too large to stand in the answer as records, so it is there as text, "
    "shortened; write it to a file (to_csv), or end with a part of it (head)"
)


class NoValue:
    """Marks a program that does not end with an expression."""


def success(value: Any) -> Claim:
    """The reported forms of a value; `notes` give the reasons for what is missing."""
    if value is NoValue or value is None:
        return {"result": {"value": None, "has_value": False, "value_repr": None}}
    notes = []
    try:
        plain = _plain(plain_table(value))
    except TooLarge:
        plain, notes = None, [TOO_LARGE]
    except NoTable:
        plain = _plain(value)
    told = {"value": plain, "has_value": True, "value_repr": represent(value)}
    return {"result": told | ({"notes": notes} if notes else {})}


def _plain(value: Any) -> Any:
    """The value if JSON can hold it unchanged, else None."""
    try:
        plain = strict_json.exact(value, MAX_VALUE_BYTES)
    except (strict_json.Inexact, strict_json.TooLong):
        return None
    return plain if len(strict_json.dumps(plain)) <= MAX_VALUE_BYTES else None


def represent(value: Any) -> str:
    try:
        text = repr(value)
        if type(text) is not str:  # a subclass of it is the program's own
            text = str.__str__(text)
    except MemoryError:
        raise
    except BaseException as error:
        return f"<repr() failed: {type(error).__name__}>"
    return shortened(text, MAX_REPR_CHARACTERS)


def shortened(text: str, most: int) -> str:
    """Shorten a text, keeping more of its end than of its middle, and make it valid UTF-8."""
    if len(text) > most:
        kept = most // 2 - 20
        text = f"{text[:kept]}\n… {len(text) - 2 * kept} characters …\n{text[-kept:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class NoTable(Exception):
    """The value is not a known table, or JSON cannot hold it."""


class TooLarge(NoTable):
    """The table does not fit an answer."""


def plain_table(value: Any) -> Any:
    """Records of a DataFrame or Series, numbers of an array or of NumPy.

    Raises:
        NoTable: not a table, or not exactly expressible.
        TooLarge: the table does not fit.
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
            _require_room(value)
            return value.tolist()
    except NoTable:
        raise
    except Exception:  # the program's own classes may be among its cells
        raise NoTable from None
    raise NoTable


def _require_room(table: Any) -> None:
    """Refuse a table before its conversion, which takes long, if it cannot fit an answer."""
    if table.size * LEAST_CELL_BYTES > MAX_RECORDS_BYTES:
        raise TooLarge


def _records(table: Any, pandas: Any) -> list[dict[str, Any]]:
    _require_room(table)
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
    """A cell as JSON: missing values are null, times and durations are ISO 8601."""
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
