"""Verify an audit chain: check that every row follows from the row before it.

This module and `storage/audit_rows.py` deliberately use only Python's standard library. So they can
be combined into one file that checks an export without an engine
(`audit export --with-verifier`):

    python3 audit_verify.py audit.jsonl --key audit.key --anchors audit-anchors.jsonl

`audit_rows` says how a row follows from the row before it. An anchor is a copy of a row's mac that
is kept outside the chain.

Verification finds where a chain breaks. Rows whose key is missing cannot be checked. Only an anchor
shows that the end was cut off, or that somebody who has the key forged the whole chain.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.storage.audit_rows import (
    GENESIS,
    ROTATED_BODY,
    AuditRow,
    Unreadable,
    commitment_to,
    mac_of,
    next_key_of,
    read_key,
)

MAX_FINDINGS = 100
"""Maximum number of findings that are listed; all are counted."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A copy of a row's mac, recorded outside the chain at the time `at`."""

    seq: int
    key_id: str
    mac: bytes
    at: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One place at which the chain is broken. `problem` is one of these:

    * `removed`: rows are missing before this row.
    * `cut`: rows are missing at the end.
    * `order`: the row's number is not higher than that of the previous row.
    * `altered`: the row does not follow from the previous row.
    * `anchor`: the row differs from its anchor.
    * `no_key`: the row's key is missing.
    * `key_changed`: the row's key is not the key that an earlier row announced, or the announcement
      is invalid.
    """

    seq: int
    problem: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification. `anchored_to` is the number of the newest row that equals its
    anchor (a copy of the row's mac outside the chain), or None if there is no such row.
    """

    rows: int
    first_seq: int | None
    last_seq: int | None
    head: str | None
    key_ids: tuple[str, ...]
    anchors: int
    anchored_to: int | None
    problems: int
    findings: tuple[Finding, ...]

    @property
    def is_intact(self) -> bool:
        """Whether there are no findings."""
        return self.problems == 0


def verify(
    rows: Iterable[AuditRow],
    keys: Mapping[str, bytes],
    anchors: Iterable[Anchor] = (),
    *,
    whole: bool = True,
) -> Verdict:
    """Verify the rows of a chain, and return the result.

    `keys` maps the id of each key to its secret. `whole` says that `rows` must be the whole chain:
    from row 1 at least to the last row that has an anchor. If it is False, `rows` may be a part of
    a chain.
    """
    walk = _Walk(keys, anchors, whole=whole)
    for row in rows:
        walk.take(row)
    return walk.end()


class _Walk:
    """A verification in progress, with the state that is needed to check the next row."""

    def __init__(
        self, keys: Mapping[str, bytes], anchors: Iterable[Anchor], *, whole: bool
    ) -> None:
        self._keys = keys
        self._whole = whole
        self._anchors: dict[int, list[Anchor]] = {}
        for anchor in anchors:
            self._anchors.setdefault(anchor.seq, []).append(anchor)
        self._checked = 0
        self._anchored_to: int | None = None
        self._rows = 0
        self._first: int | None = None
        self._last = 0
        self._before: bytes | None = GENESIS
        self._key_id: str | None = None
        self._key_ids: dict[str, None] = {}
        self._problems = 0
        self._findings: list[Finding] = []
        self._lacking: set[str] = set()

    def take(self, row: AuditRow) -> None:
        """Check the next row."""
        self._rows += 1
        if row.seq != self._last + 1 and not self._step_over(row):
            return
        if self._first is None:
            self._first = row.seq
        self._last = row.seq
        if row.key_id != self._key_id:
            self._change_key(row)
        self._check(row)
        self._before = row.mac
        if row.seq in self._anchors:
            self._compare(row, self._anchors[row.seq])

    def end(self) -> Verdict:
        """Finish the verification: report rows that are missing at the end, and return the
        result.
        """
        beyond = max((seq for seq in self._anchors if seq > self._last), default=None)
        if self._whole and beyond is not None:
            at = self._anchors[beyond][0].at
            message = (
                f"rows {self._last + 1} to {beyond} are missing at the end: there was an anchor "
                f"at row {beyond} ({at[:40]})"
            )
            self._find(self._last + 1, "cut", message)
        return Verdict(
            rows=self._rows,
            first_seq=self._first,
            last_seq=self._last if self._first is not None else None,
            head=self._before.hex() if self._before and self._first is not None else None,
            key_ids=tuple(self._key_ids),
            anchors=self._checked,
            anchored_to=self._anchored_to,
            problems=self._problems,
            findings=tuple(self._findings),
        )

    def _step_over(self, row: AuditRow) -> bool:
        """Check a row whose number does not directly follow the last row's number. Report the gap,
        or a number that is too low. In a part of a chain, the first row may have any number.

        Return True if verification can continue with this row. Return False if the row must be
        skipped.
        """
        if row.seq <= self._last or row.seq < 1:
            self._find(row.seq, "order", f"row {row.seq} comes after row {self._last}")
            return False
        if self._first is not None or self._whole:
            missing = f"rows {self._last + 1} to {row.seq - 1} are missing"
            self._find(row.seq, "removed", f"{missing} before row {row.seq}")
        self._before = row.before
        return True

    def _change_key(self, row: AuditRow) -> None:
        if self._key_id is not None:
            message = f"row {row.seq} is under the key {row.key_id[:40]}, which was not announced"
            self._find(row.seq, "key_changed", message)
        self._key_id = row.key_id
        self._key_ids[row.key_id] = None

    def _check(self, row: AuditRow) -> None:
        secret = self._keys.get(row.key_id)
        if secret is None:
            self._lack_key(row)
            return
        if self._before is None:
            return  # the previous row is missing, which was reported, or is in another part
        expected = mac_of(secret, self._before, row.seq, row.body)
        if expected != row.mac or (row.before is not None and row.before != self._before):
            message = f"row {row.seq} does not follow from row {row.seq - 1}"
            self._find(row.seq, "altered", message)
        elif row.body.startswith(ROTATED_BODY):
            self._rotate(row, next_key_of(row.body))

    def _lack_key(self, row: AuditRow) -> None:
        """Report that the key of a row is missing, unless this was already reported for an earlier
        row with the same key.
        """
        if row.key_id not in self._lacking:
            self._lacking.add(row.key_id)
            message = f"rows under the key {row.key_id[:40]}, which is missing, cannot be checked"
            self._find(row.seq, "no_key", f"{message} (the first is row {row.seq})")

    def _rotate(self, row: AuditRow, announced: tuple[str, str] | None) -> None:
        if announced is None:
            self._find(row.seq, "key_changed", f"row {row.seq} announces an invalid key")
            return
        self._key_id, commitment = announced
        self._key_ids[self._key_id] = None
        secret = self._keys.get(self._key_id)
        if secret is not None and commitment_to(secret) != commitment:
            message = f"the key {self._key_id} is not the one that row {row.seq} announced"
            self._find(row.seq, "key_changed", message)

    def _compare(self, row: AuditRow, anchors: list[Anchor]) -> None:
        for anchor in anchors:
            self._checked += 1
            if anchor.mac == row.mac:
                self._anchored_to = row.seq
            else:
                message = f"row {row.seq} differs from its anchor of {anchor.at[:40]}"
                self._find(row.seq, "anchor", message)

    def _find(self, seq: int, problem: str, message: str) -> None:
        self._problems += 1
        if len(self._findings) < MAX_FINDINGS:
            self._findings.append(Finding(seq, problem, message))


def read_export(lines: Iterable[str]) -> Iterator[AuditRow]:
    """Yield the rows of an export. Raises Unreadable if a line is invalid."""
    for number, line in enumerate(lines, start=1):
        try:
            yield _row_of(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise Unreadable(
                f"line {number} of the export is not a row of an audit chain"
            ) from None


def read_anchors(lines: Iterable[str]) -> list[Anchor]:
    """Return the anchors in the lines of an anchor file or of a log."""
    found = []
    for line in lines:
        try:
            said = json.loads(line)
            if said.get("event", "audit.anchor") == "audit.anchor":
                mac = bytes.fromhex(said["mac"])
                found.append(Anchor(_seq(said["seq"]), str(said["key_id"]), mac, str(said["at"])))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue  # another line of a log, or a line that a crash cut off
    return found


def export_line(row: AuditRow) -> str:
    return json.dumps(
        {
            "seq": row.seq,
            "key_id": row.key_id,
            "before": row.before.hex() if row.before is not None else None,
            "mac": row.mac.hex(),
            "body": row.body.decode("utf-8", "replace"),
        }
    )


def report(verdict: Verdict) -> list[str]:
    """Return the result as text, one line for each fact."""
    if verdict.first_seq is None:
        lines = ["The chain has no rows."]
    else:
        which = f"from {verdict.first_seq} to {verdict.last_seq}"
        lines = [f"{verdict.rows} rows, {which}, under {len(verdict.key_ids)} key(s)."]
    if verdict.anchored_to is None:
        lines.append("No anchor confirms them: rows cut off at the end would go unnoticed.")
    else:
        after = (verdict.last_seq or 0) - verdict.anchored_to
        lines.append(f"Anchored up to row {verdict.anchored_to}; {after} rows came after it.")
    lines += [f"{finding.problem.upper()}: {finding.message}" for finding in verdict.findings]
    if verdict.problems > len(verdict.findings):
        lines.append(f"… and {verdict.problems - len(verdict.findings)} more.")
    lines.append("intact" if verdict.is_intact else f"NOT INTACT: {verdict.problems} findings")
    return lines


def _row_of(said: dict[str, Any]) -> AuditRow:
    before = said["before"]
    if set(said) != {"seq", "key_id", "before", "mac", "body"} or not isinstance(
        said["key_id"], str
    ):
        raise ValueError
    return AuditRow(
        seq=_seq(said["seq"]),
        key_id=said["key_id"],
        body=said["body"].encode(),
        mac=bytes.fromhex(said["mac"]),
        before=bytes.fromhex(before) if before is not None else None,
    )


def _seq(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    value.to_bytes(8, "big")  # as in a mac; raises OverflowError
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Check an export. Return 0 if it is intact, 1 if it is not, 2 if a file cannot be read."""
    import argparse  # not at the top, because the engine never needs it

    parser = argparse.ArgumentParser(description="Verify an export of an audit chain.")
    parser.add_argument("export", type=Path, help="JSON Lines of `fumehood audit export`")
    several: dict[str, Any] = {"type": Path, "action": "extend", "nargs": "+"}
    parser.add_argument("--key", **several, required=True, help="key files")
    parser.add_argument("--anchors", **several, default=[], help="anchors, or a JSON log")
    parser.add_argument("--part", action="store_true", help="the export is part of a chain")
    given = parser.parse_args(arguments)
    try:
        keys = [read_key(path.read_text("ascii")) for path in given.key]
        anchors = [
            anchor
            for path in given.anchors
            for anchor in read_anchors(path.read_text("utf-8", "replace").splitlines())
        ]
        with given.export.open(encoding="utf-8") as lines:
            by_id = {key.id: key.secret for key in keys}
            verdict = verify(read_export(lines), by_id, anchors, whole=not given.part)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(report(verdict)))
    return 0 if verdict.is_intact else 1


if __name__ == "__main__":
    sys.exit(main())
