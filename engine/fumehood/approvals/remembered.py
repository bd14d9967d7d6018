"""Remembered rules: with an approval, an approver can also allow matching later calls.

Host side, used by `stored_calls` if the policy requires approval. Invariants: a remembered rule
satisfies exactly the policy rules that required approval when it was made, for the same caller,
tool, definition and execution options, and only if one approval is enough; an argument that the
approver did not leave open has the approved value, or is absent if it was absent; policy rules that
deny always win; a use of a rule with a limited number of uses is counted in the database before the
call starts, so a crash can only lose uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update

from fumehood.approvals.eligibility import may_decide
from fumehood.approvals.model import (
    DecisionRecord,
    RememberedRule,
    RememberWish,
    StoredApproval,
)
from fumehood.call_options import is_deciding
from fumehood.core.errors import InvalidParams, PermissionDenied, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.pipeline.authorize import PermittedCall
from fumehood.protocol.canonical import digest_of
from fumehood.registry.index import NET
from fumehood.storage.changes import recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.schema import REMEMBERED

REQUEST_ARGUMENTS = {"method", "host", "port", "path"}
"""The arguments of a program's network request that a remembered rule must always compare. The
other arguments differ in almost every request."""


class RememberedRules:
    """All remembered rules of an engine, in memory and in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rules: dict[str, RememberedRule] = {}
        self._load(database.read_now(all_rules))

    async def reload(self) -> None:
        """Read the rules from the database again. Needed after a rule was written."""
        self._load(await self._database.read(all_rules))

    def all(self) -> list[RememberedRule]:
        """Return all rules, oldest first, including removed ones."""
        return list(self._rules.values())

    def rule_for(
        self,
        permitted: PermittedCall,
        definition: str,
        now: datetime,
        still_approves: Callable[[str], bool],
    ) -> str | None:
        """Return the id of the first rule that allows this call, or None.

        `definition` is the result of `definition_digest` for the call. A rule counts only if
        `still_approves` returns True for the id of the approver who created it.
        """
        for rule in self._rules.values():
            if _allows(rule, permitted, definition, now) and still_approves(rule.created_by):
                return rule.id
        return None

    async def use(self, rule_id: str) -> None:
        """Count one use of a rule. The count is durable when this method returns.

        Raises:
            PermissionDenied: the rule has no use left, or was removed meanwhile.
            WriteFailed: it is not certain that the use is stored. The caller must not run the call.
        """
        used = (
            update(REMEMBERED)
            .where(
                REMEMBERED.c.id == rule_id,
                REMEMBERED.c.removed_at.is_(None),
                (REMEMBERED.c.uses_left.is_(None)) | (REMEMBERED.c.uses_left > 0),
            )
            .values(uses_left=REMEMBERED.c.uses_left - 1, used=REMEMBERED.c.used + 1)
        )
        if await self._database.write(lambda connection: connection.execute(used).rowcount) != 1:
            raise PermissionDenied(
                "The remembered rule for such calls is used up. Repeat the call to ask again.",
                retryable=True,
            )
        await self.reload()

    async def forget(self, rule_id: str, by: Principal, now: datetime) -> RememberedRule:
        """Remove a rule, and return it. `by` is the principal that removes the rule. Raises
        ResourceNotFound if the rule does not exist or was already removed.
        """
        rule = self._rules.get(rule_id)
        if rule is None or rule.removed_at is not None:
            raise ResourceNotFound("There is no such remembered rule. Do not retry.")
        removed = update(REMEMBERED).where(REMEMBERED.c.id == rule_id)
        await self._database.write(
            recorded(
                lambda connection: connection.execute(removed.values(removed_at=stamp(now))),
                at=now,
                by=by.id,
                action="remembered.remove",
                subject=rule_id,
            )
        )
        await self.reload()
        return self._rules[rule_id]

    def _load(self, rules: Sequence[RememberedRule]) -> None:
        self._rules = {rule.id: rule for rule in rules}


def wished_rule(
    wish: RememberWish | None,
    stored: StoredApproval,
    record: DecisionRecord,
    new_id: Callable[[], str],
) -> RememberedRule | None:
    """Build the remembered rule that an approver requests with a decision. Return None if `wish` is
    None.

    `stored` is the approval, and `record` is the decision. `new_id` returns a new approval id.

    Raises:
        InvalidParams: the decision cannot create such a rule.
    """
    if wish is None:
        return None
    if stored.approval.quorum > 1 or record.edited:
        raise InvalidParams(
            "An approval by several approvers, or with edited arguments, leaves no rule.",
            fields=["remember"],
        )
    rule_id = new_id().replace("apr_", "rul_")
    return remembered_rule(stored, wish, rule_id, record.approver, record.at)


def remembered_rule(
    stored: StoredApproval, wish: RememberWish, rule_id: str, by: str, now: datetime
) -> RememberedRule:
    """Build the remembered rule that an approver requests with the approval of a call.

    `rule_id` is the id of the new rule, and `by` is the id of the approver's principal.

    Raises:
        InvalidParams: the rule's scope is a session but the call has none, or the rule's end has
        passed. Also raised if the wish names arguments that the call does not have, or would allow
        other arguments of a dangerous tool.
    """
    approval = stored.approval
    if wish.scope == "session" and approval.session_id is None:
        raise InvalidParams(
            "The call has no session that this could last for; give a time instead.",
            fields=["remember.scope"],
        )
    if wish.until is not None and wish.until <= now:
        raise InvalidParams("This time has already passed.", fields=["remember.until"])
    names = tuple(approval.arguments) if wish.arguments is None else wish.arguments
    unknown = [name for name in names if name not in approval.arguments]
    if unknown:
        raise InvalidParams(
            f"The call has no argument {unknown[0][:80]!r}.", fields=["remember.arguments"]
        )
    arguments: JsonObject = {name: approval.arguments[name] for name in names}
    any_others = len(arguments) < len(approval.arguments)
    of_request = REQUEST_ARGUMENTS if approval.tool == NET.definition.name else None
    if any_others and approval.dangerous and not (of_request and of_request <= arguments.keys()):
        least = f", or at least {', '.join(sorted(of_request))}" if of_request else ""
        raise InvalidParams(
            f"{approval.tool} is dangerous: a remembered rule allows it only with exactly the "
            f"approved arguments. Choose all of them{least}.",
            fields=["remember.arguments"],
        )
    definition = (approval.binding or {}).get("definition", "")
    definition = _with_options(approval.tool, definition, stored.request.options)
    return RememberedRule(
        id=rule_id,
        tool=approval.tool,
        principal_id=approval.principal_id,
        agent_id=approval.agent_id,
        session_id=approval.session_id if wish.scope == "session" else None,
        arguments=arguments,
        any_others=any_others,
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


def _allows(rule: RememberedRule, permitted: PermittedCall, definition: str, now: datetime) -> bool:
    options = permitted.request.options
    return (
        rule.removed_at is None
        and (rule.expires_at is None or rule.expires_at > now)
        and (rule.uses_left is None or rule.uses_left > 0)
        and rule.tool == permitted.tool.definition.name
        and rule.definition == _with_options(rule.tool, definition, options.model_dump(mode="json"))
        and rule.rule == _asking(permitted.decision.rule, permitted.decision.asked_by)
        and permitted.decision.quorum == 1
        and may_decide(permitted.decision.approvers, rule.created_by)
        and rule.principal_id == permitted.principal.id
        and rule.agent_id == options.agent_id
        and (
            rule.session_id == options.session_id
            # A session's variables also change what a program does, but are not arguments.
            or (rule.session_id is None and not permitted.session_env)
        )
        and (rule.any_others or rule.arguments.keys() == permitted.arguments.keys())
        and all(_same(permitted.arguments, n, v) for n, v in rule.arguments.items())
    )


def _with_options(tool: str, definition: str, options: JsonObject) -> str:
    """Return a hash of a tool's definition and of the options that affect how a call runs. If there
    are no such options, return `definition` unchanged.

    `definition` is the hash of the tool's definition. For a program's network request, an empty
    text is used instead.
    """
    # The definition's hash covers the context of a call. For a program's request, the context is
    # the call that runs the program, so the hash would never match that of another program's
    # request.
    definition = definition if tool != NET.definition.name else ""
    given = {name: value for name, value in options.items() if is_deciding(name, value)}
    return digest_of({"definition": definition, "options": given}) if given else definition


def _asking(rule: str, asked_by: Sequence[str]) -> str:
    """Return the ids of the policy rules that require approval, separated by `, `.

    `asked_by` are these ids. If there are none, return `rule`, the id of the deciding rule.
    """
    return ", ".join(asked_by) or rule


def _same(arguments: JsonObject, name: str, value: object) -> bool:
    """Return whether an argument exists and has this value and type. For example, true and 1.0
    differ from 1.
    """
    return name in arguments and _written(arguments[name]) == _written(value)


_written = json.JSONEncoder(sort_keys=True).encode


# -- rows ----------------------------------------------------------------------------------


def add_rule(connection: Connection, rule: RememberedRule) -> None:
    """Store a new remembered rule in the database."""
    row: dict[str, Any] = rule.model_dump()
    for name in ("created_at", "expires_at", "removed_at"):
        row[name] = stamp(row[name]) if row[name] is not None else None
    connection.execute(insert(REMEMBERED), row)


def all_rules(connection: Connection) -> list[RememberedRule]:
    """Return all remembered rules in the database, oldest first, including removed ones."""
    rows = connection.execute(select(REMEMBERED).order_by(REMEMBERED.c.created_at)).mappings()
    return [RememberedRule(**row) for row in rows]
