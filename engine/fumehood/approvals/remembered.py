"""Remembering: what an approver's yes lets through from then on, without asking.

Host side, asked by `approve` once the policy wants to ask. Invariants: a rule answers only the
rules that asked when it was made, all of them and no other, for the same caller, tool and
definition, and only where its approver's word alone would do; a deny rule has been asked before;
a limited use is counted in the database before its call starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from fumehood.approvals import remembered_store as rows
from fumehood.approvals.model import Approval, RememberedRule, RememberWish
from fumehood.core.errors import InvalidParams, PermissionDenied, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.pipeline.authorize import PermittedCall
from fumehood.storage.changes import recorded
from fumehood.storage.database import Database


class Remembering:
    """Every remembered rule, in memory and in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rules: dict[str, RememberedRule] = {}
        self.load(database.read_now(rows.all_rules))

    def load(self, rules: Sequence[RememberedRule]) -> None:
        """Take over what the database has."""
        self._rules = {rule.id: rule for rule in rules}

    async def reload(self) -> None:
        """Read again what a decision has added."""
        self.load(await self._database.read(rows.all_rules))

    def all(self) -> list[RememberedRule]:
        """Every one, oldest first."""
        return list(self._rules.values())

    def rule_for(
        self,
        permitted: PermittedCall,
        definition: str,
        now: datetime,
        still_approves: Callable[[str], bool],
    ) -> str | None:
        """The first that lets this call through, of those whose author may still approve."""
        for rule in self._rules.values():
            if _lets_through(rule, permitted, definition, now) and still_approves(rule.created_by):
                return rule.id
        return None

    async def use(self, rule_id: str) -> None:
        """Count one use, durably.

        Raises:
            PermissionDenied: none is left, or it was taken back meanwhile.
            WriteFailed: nothing may run.
        """
        if not await self._database.write(lambda connection: rows.use(connection, rule_id)):
            raise PermissionDenied(
                "What an approver had allowed for such calls is used up. Repeat the call, and "
                "somebody is asked.",
                retryable=True,
            )
        await self.reload()

    async def forget(self, rule_id: str, by: Principal, now: datetime) -> RememberedRule:
        """Take one back. Raises ResourceNotFound."""
        rule = self._rules.get(rule_id)
        if rule is None or rule.removed_at is not None:
            raise ResourceNotFound("There is no such remembered rule. Do not retry.")
        await self._database.write(
            recorded(
                lambda connection: rows.remove(connection, rule_id, now),
                at=now,
                by=by.id,
                action="remembered.remove",
                subject=rule_id,
            )
        )
        await self.reload()
        return self._rules[rule_id]


def remembered_rule(
    approval: Approval, wish: RememberWish, rule_id: str, by: str, now: datetime
) -> RememberedRule:
    """The rule that a wish leads to.

    Raises:
        InvalidParams: it has no session to end with, ends in the past, or names arguments that
            the call does not have.
    """
    if wish.scope == "session" and approval.session_id is None:
        raise InvalidParams(
            "The call has no session that this could last for; give a time instead.",
            fields=["remember.scope"],
        )
    if wish.until is not None and wish.until <= now:
        raise InvalidParams("This time is over already.", fields=["remember.until"])
    names = tuple(approval.arguments) if wish.arguments is None else wish.arguments
    unknown = [name for name in names if name not in approval.arguments]
    if unknown:
        raise InvalidParams(
            f"The call has no argument {unknown[0][:80]!r}.", fields=["remember.arguments"]
        )
    arguments: JsonObject = {name: approval.arguments[name] for name in names}
    definition = (approval.binding or {}).get("definition", "")
    return RememberedRule(
        id=rule_id,
        tool=approval.tool,
        principal_id=approval.principal_id,
        agent_id=approval.agent_id,
        session_id=approval.session_id if wish.scope == "session" else None,
        arguments=arguments,
        rule=_asking(approval.rule, approval.asked_by),
        definition=definition,
        approval_id=approval.id,
        created_by=by,
        created_at=now,
        expires_at=wish.until,
        uses_left=wish.uses,
        used=0,
        removed_at=None,
    )


def _lets_through(
    rule: RememberedRule, permitted: PermittedCall, definition: str, now: datetime
) -> bool:
    options = permitted.request.options
    return (
        rule.removed_at is None
        and (rule.expires_at is None or rule.expires_at > now)
        and (rule.uses_left is None or rule.uses_left > 0)
        and rule.tool == permitted.tool.definition.name
        and rule.definition == definition
        and rule.rule == _asking(permitted.decision.rule, permitted.decision.asked_by)
        and permitted.decision.quorum == 1
        and may_decide(permitted.decision.approvers, rule.created_by)
        and rule.principal_id == permitted.principal.id
        and rule.agent_id == options.agent_id
        and (rule.session_id is None or rule.session_id == options.session_id)
        and all(_same(permitted.arguments, n, v) for n, v in rule.arguments.items())
    )


def may_decide(approvers: Sequence[str], principal_id: str) -> bool:
    """Whether rules that name these approvers, or none, let this one decide."""
    names = (principal_id, principal_id.removeprefix("approver:"))
    return not approvers or any(name in approvers for name in names)


def _asking(rule: str, asked_by: Sequence[str]) -> str:
    """All that ask, as one text."""
    return ", ".join(asked_by) or rule


def _same(arguments: JsonObject, name: str, value: object) -> bool:
    """Equal in type, too: true is not 1 here."""
    given = arguments.get(name, _ABSENT)
    return given == value and _types(given) == _types(value)


_ABSENT = object()


def _types(value: object) -> object:
    if isinstance(value, dict):
        return {name: _types(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_types(item) for item in value]
    return type(value)
