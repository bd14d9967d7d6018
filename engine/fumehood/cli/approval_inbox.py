"""The approvals that wait, on one screen, and the keys that decide them.

Invariants: no single key decides anything; a decision carries the version that was on the screen
when it was confirmed; the selection never moves by itself to another call that waits, except after
an own decision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fumehood.approvals.model import MAX_REASON_CHARACTERS, Approval, ApprovalState, RememberWish
from fumehood.cli.approval_view import (
    Kind,
    Line,
    action_lines,
    ago,
    fact_lines,
    one_line,
    preview_in_words,
    rule_lines,
)
from fumehood.cli.escaping import visible
from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.client.sync.approvals import ControlledApprovals

LONG_KEYS = "j/k select  space/b scroll  a approve  e edit  d deny  r remember  q quit"
SHORT_KEYS = "j k space b  a e d r  q"
PERIODS = {"h": ("1 hour", timedelta(hours=1)), "d": ("1 day", timedelta(days=1))}
MOST_BOTTOM_LINES = 4
MOST_ROW = 200

_EDITORS_OBEY = re.compile(r"(?<!\S)(?:vim?|ex)(?=[<>=\d]*:)|-\*-|local variables:", re.IGNORECASE)
"""*Source*: Vim's help on modelines, and Emacs' manual on file variables: settings in a file."""

Act = Callable[[], Approval]
Lines = Callable[[int], Sequence[Line]]


@dataclass(frozen=True, slots=True)
class Look:
    """The pending approvals, oldest first, and those of before with a new state."""

    pending: Sequence[Approval] = ()
    decided: Sequence[Approval] = ()
    has_more: bool = False
    fault: str = ""
    """Why the engine could not be asked; then the rest says nothing."""


@dataclass(slots=True)
class _Prompt:
    """A question about one approval: answered by one key, or with a text."""

    about: Approval
    question: str
    answers: Mapping[str, Callable[[], None]]
    finish: Callable[[str], None] | None = None
    text: str = ""
    proposal: Lines | None = None
    """What would be decided, if it is not the call as it is."""


class Inbox:
    """What the screen shows, and what each key does. Knows nothing of terminals."""

    def __init__(
        self,
        approvals: ControlledApprovals,
        edit: Callable[[str], str] | None,
    ) -> None:
        """`edit` lets the person change a text, or raises ValueError; without it, a line is."""
        self.is_left = False
        self.has_news = False
        """There is a new approval since this was last set back."""
        self._approvals = approvals
        self._edit_text = edit
        self._shown: dict[str, Approval] = {}
        self._decided: set[str] = set()
        self._drafts: dict[str, str] = {}
        self._chosen = ""
        self._prompt: _Prompt | None = None
        self._said = "Connecting …"
        self._look: Look | None = None
        self._fault = ""
        self._top = self._page = self._below = 0
        self._laid_out: tuple[Any, list[Line]] = (None, [])

    def take(self, look: Look) -> None:
        """Take in what the engine says now."""
        self._fault = look.fault
        if look.fault:
            return
        for one in look.decided:
            self._said = how_it_ended(one)
        pending = {one.id: one for one in look.pending if one.id not in self._decided}
        self.has_news |= self._look is not None and not pending.keys() <= self._shown.keys()
        if self._look is None:
            self._said = ""
        chosen = self._shown.get(self._chosen)
        if chosen is not None and chosen.id not in pending:
            # It stays until the person moves on: a key must not meet another call than was read.
            pending |= {one.id: one for one in (chosen, *look.decided) if one.id == chosen.id}
        self._look = look
        self._show(pending)
        if self._prompt is not None and self._prompt.about.version != self._now.version:
            self._prompt = None
            self._said = self._said or "It has changed meanwhile. Nothing was decided."

    def press(self, keys: Sequence[str]) -> None:
        """Act on keys. Those typed ahead of a question are no answer to it."""
        for key in keys:
            before = self._prompt
            self._press(key)
            if self._prompt is not before and self._prompt is not None and self._prompt.answers:
                return

    def lines(self, columns: int, rows: int, now: datetime) -> list[Line]:
        """Lay out the screen."""
        bottom = self._bottom(columns)[-max(rows - 3, 1) :]
        listed = min(len(self._shown), max(1, (rows - len(bottom) - 2) // 3))
        self._page = max(0, rows - len(bottom) - listed - 2)
        lines = [Line(self._title(), "head"), *self._list(listed, now)]
        if self._shown:
            details = self._details(columns, now)
            self._top = max(0, min(self._top, len(details) - self._page))
            seen = details[self._top : self._top + self._page]
            self._below = len(details) - self._top - len(seen)
            lines += [self._rule(columns), *seen]
        filler = [Line("")] * (rows - len(lines) - len(bottom))
        return [*lines, *filler, *bottom]

    # What is shown.

    @property
    def _now(self) -> Approval:
        """The chosen approval."""
        return self._shown[self._chosen]

    def _show(self, approvals: Mapping[str, Approval]) -> None:
        self._shown = dict(
            sorted(approvals.items(), key=lambda item: (item[1].created_at, item[0]))
        )
        if self._chosen not in self._shown:
            self._choose(next(iter(self._shown), ""))

    def _choose(self, approval_id: str) -> None:
        self._chosen, self._top = approval_id, 0

    def _title(self) -> str:
        count = sum(one.state is ApprovalState.PENDING for one in self._shown.values())
        more = " (the newest; there are more)" if self._look and self._look.has_more else ""
        words = "1 call waits" if count == 1 else f"{count} calls wait"
        after = f", {len(self._shown) - count} no longer" if count < len(self._shown) else ""
        return f"{words} for approval{more}{after}" if self._look else "Approvals"

    def _list(self, rows: int, now: datetime) -> list[Line]:
        if not self._shown:
            return [Line("")]
        ids = list(self._shown)
        first = max(0, min(ids.index(self._chosen) - rows // 2, len(ids) - rows))
        seen = ids[first : first + rows]
        return [_row(self._shown[one], now, is_chosen=one == self._chosen) for one in seen]

    def _details(self, columns: int, now: datetime) -> list[Line]:
        one = self._now
        proposal = self._prompt.proposal if self._prompt is not None else None
        key = (one, columns, proposal)
        if self._laid_out[0] != key:  # arguments may be megabytes
            self._laid_out = (
                key,
                _rows(proposal(columns) if proposal else action_lines(one, columns)),
            )
        facts = [] if proposal else [Line(""), *fact_lines(one, now, columns)]
        return self._laid_out[1] + _rows(facts)

    def _rule(self, columns: int) -> Line:
        """Say what is below, and how much of it is out of sight: in colour when it is decided."""
        more = f" {self._below} more lines: space" if self._below else ""
        kind: Kind = "warning" if more and self._prompt is not None else "plain"
        return Line(f"──{more} {self._chosen} ".ljust(columns, "─"), kind)

    def _bottom(self, columns: int) -> list[Line]:
        prompt = self._prompt
        away = f"No answer from the engine; trying again. {self._fault}" if self._fault else ""
        lines = [Line(text, "warning") for text in wrap(visible(away), columns)]
        lines += [Line(text, "head") for text in wrap(visible(self._said), columns)]
        lines = lines[:MOST_BOTTOM_LINES]
        if prompt is None:
            return [*lines, Line(LONG_KEYS if columns >= len(LONG_KEYS) else SHORT_KEYS, "quiet")]
        typed = f" {visible(prompt.text)}▏" if prompt.finish else ""
        asked = wrap(prompt.question + typed, columns)[-MOST_BOTTOM_LINES:]
        return [*lines, *(Line(text, "warning") for text in asked)]

    # What keys do.

    def _press(self, key: str) -> None:
        if self._prompt is not None:
            self._answer(self._prompt, key)
            return
        before, self._said = self._said, ""
        decide = {"a": self._approve, "e": self._edit, "d": self._deny, "r": self._remember}
        match key:
            case "q":
                self.is_left = True
            case "j" | "down" | "k" | "up":
                self._move(1 if key in ("j", "down") else -1)
            case " " | "page down" | "b" | "page up":
                self._scroll(key)
            case "a" | "e" | "d" | "r" if self._shown:
                if self._now.state is ApprovalState.PENDING:
                    decide[key](self._now)
                else:
                    self._said = how_it_ended(self._now)
            case _:
                self._said = before

    def _scroll(self, key: str) -> None:
        step = max(1, self._page - 1)
        self._top = max(0, self._top + (step if key in (" ", "page down") else -step))

    def _move(self, step: int) -> None:
        """Choose another one; one that has ended is left behind for good."""
        ids = list(self._shown)
        at = ids.index(self._chosen) if ids else 0
        if ids and self._now.state is not ApprovalState.PENDING:
            del self._shown[ids.pop(at)]
            at -= step > 0  # the next one has moved up
        to = max(0, min(at + step, len(ids) - 1))
        if ids[to : to + 1] != [self._chosen]:
            self._choose(ids[to] if ids else "")

    def _answer(self, prompt: _Prompt, key: str) -> None:
        if key in prompt.answers:
            self._prompt = None
            prompt.answers[key]()
        elif key in ("page down", "page up") or (key in " b" and prompt.finish is None):
            self._scroll(key)
        elif prompt.finish is None or key == "escape":
            self._prompt, self._said = None, "Nothing was decided."
        elif key == "enter":
            self._prompt = None
            prompt.finish(prompt.text)
        elif key == "backspace":
            prompt.text = prompt.text[:-1]
        elif key == "erase":
            prompt.text = ""
        elif len(key) == 1 and key.isprintable():
            prompt.text += key

    def _confirm(
        self, one: Approval, what: str, act: Act, *, proposal: Lines | None = None
    ) -> None:
        question = f"{what} {visible(one.tool)} {one.id}? y/n"
        answers = {"y": lambda: self._send(act)}
        self._prompt = _Prompt(one, question, answers, proposal=proposal)
        self._top = 0 if proposal else self._top

    def _approve(self, one: Approval) -> None:
        self._confirm(one, "Approve", lambda: self._approvals.approve(one.id, version=one.version))

    def _deny(self, one: Approval) -> None:
        def finish(reason: str) -> None:
            given = reason.strip()[:MAX_REASON_CHARACTERS] or None
            self._send(lambda: self._approvals.deny(one.id, version=one.version, reason=given))

        question = f"Deny {visible(one.tool)} {one.id}. Reason (Enter denies, Esc does not):"
        self._prompt = _Prompt(one, question, {}, finish)

    def _edit(self, one: Approval) -> None:
        draft = self._drafts.get(one.id)
        if self._edit_text is None:
            question = f"Arguments of {visible(one.tool)} as JSON:"
            text = draft or json.dumps(one.arguments)
            self._prompt = _Prompt(one, question, {}, lambda text: self._propose(one, text), text)
            return
        try:
            self._propose(one, self._edit_text(draft or editable(one.arguments)))
        except ValueError as error:
            self._said = f"Nothing was decided. {error}"

    def _propose(self, one: Approval, text: str) -> None:
        """Show the call as edited, and ask."""
        self._drafts[one.id] = text
        try:
            arguments = strict_json.loads(text.encode())
            if not isinstance(arguments, dict):
                raise ValueError("they must be a JSON object")  # noqa: TRY004 - the person's
        except ValueError as error:
            why = str(error).removeprefix("not JSON: ")
            self._said = f"These arguments cannot be read: {why}. To go on editing: e"
            return
        if json.dumps(arguments) == json.dumps(one.arguments):
            self._said = "The arguments are as they were. To approve them: a"
        else:
            edited = self._try(lambda: self._approvals.preview_edit(one.id, arguments))
            if edited is not None:
                self._confirm(
                    one, "Approve AS EDITED",
                    lambda: self._approvals.approve(
                        one.id, version=one.version, arguments=arguments,
                        action_digest=edited.action_digest,
                    ),
                    proposal=lambda columns: [
                        Line("AS EDITED", "warning"), *action_lines(edited, columns), Line(""),
                        *fact_lines(edited, datetime.now(UTC), columns),
                    ],
                )  # fmt: skip

    def _remember(self, one: Approval) -> None:
        """Ask for how long, show the rule, and ask again."""

        def propose(wish: RememberWish) -> None:
            rule = self._try(lambda: self._approvals.preview_remember(one.id, wish))
            if rule is not None:
                self._confirm(
                    one, "Approve, and remember this rule:",
                    lambda: self._approvals.approve(one.id, version=one.version, remember=wish),
                    proposal=lambda columns: [
                        Line("this rule is remembered", "head"), *rule_lines(rule, columns)
                    ],
                )  # fmt: skip

        def until(length: timedelta) -> Callable[[], None]:
            return lambda: propose(RememberWish(scope="until", until=datetime.now(UTC) + length))

        answers = {key: until(length) for key, (_, length) in PERIODS.items()}
        words = [f"{key} {name}" for key, (name, _) in PERIODS.items()]
        if one.session_id is not None:
            answers["s"] = lambda: propose(RememberWish())
            words.insert(0, "s its session")
        self._prompt = _Prompt(one, f"Also allow equal calls for: {', '.join(words)}", answers)

    def _send(self, act: Act) -> None:
        decided = self._try(act)
        if decided is None:
            return
        if decided.state is ApprovalState.PENDING:
            self._said = f"Counted: {len(decided.counted)} of {decided.quorum} approvals."
            self._show(self._shown | {decided.id: decided})
            return
        self._said = how_it_ended(decided)
        self._decided.add(decided.id)
        self._drafts.pop(decided.id, None)
        if decided.id in self._shown:
            self._shown[decided.id] = decided
            self._move(1)

    def _try(self, ask: Callable[[], Any]) -> Any:
        """Ask the engine; None if it refuses or is away, which is said."""
        try:
            return ask()
        except Refused as refused:
            error = refused.envelope.error
            self._said = f"{refused.code}: {error.message if error else ''}"
        except (DaemonUnavailable, ValueError) as error:
            self._said = str(error)
        return None


def how_it_ended(one: Approval) -> str:
    """Say in one sentence what became of an approval, and by whom."""
    what = f"{visible(one.tool)} {one.id}"
    denials = [given for given in one.decisions if given.decision == "deny"]
    if one.state is ApprovalState.DENIED and denials:
        why = f": {one_line(denials[-1].reason, 80)}" if denials[-1].reason else ""
        return f"{what} was denied by {denials[-1].approver}{why}"
    if one.has_lost_session:
        return f"{what}: its session ended, so it can no longer run"
    if not one.yes_votes:
        return f"{what}: {one.state}"
    after = "" if one.state is ApprovalState.APPROVED else f" ({one.state})"
    return f"{what} was approved by {', '.join(sorted(one.yes_votes))}{after}"


def editable(arguments: JsonObject) -> str:
    """Format arguments for an editor: ASCII, and without text that editors obey."""
    document = json.dumps(arguments, indent=2) + "\n"
    return _EDITORS_OBEY.sub(lambda found: f"\\u{ord(found[0][0]):04x}{found[0][1:]}", document)


def _rows(lines: Sequence[Line]) -> list[Line]:
    return [Line(text, line.kind) for line in lines for text in line.text.split("\n")]


def _row(one: Approval, now: datetime, *, is_chosen: bool) -> Line:
    is_pending = one.state is ApprovalState.PENDING
    when = ago(one.expires_at, now).removeprefix("in ") if is_pending else one.state.value
    votes = f"{len(one.counted)}/{one.quorum}  " if one.quorum > 1 else ""
    who = visible(one.agent_id or one.principal_id)
    # Only the beginning is made: arguments may be megabytes, and this is drawn each time.
    pieces = islice(json.JSONEncoder(ensure_ascii=False).iterencode(one.arguments), MOST_ROW)
    does = preview_in_words(one.preview) if one.preview else "".join(pieces)[:MOST_ROW]
    text = f"{when:>6}  {votes}{visible(one.tool)}  {who}  {visible(does)}"
    return Line(f"> {text}", "chosen") if is_chosen else Line(f"  {text}")
