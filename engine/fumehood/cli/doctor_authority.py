"""What `fumehood doctor` says of authority: approvers, policy, webhook and audit key.

It reads the state directory and the files of the configuration itself, beside a running engine or
without one, and writes nothing. Only the engine's own user is told more than that it cannot be
looked at: what counts is what that user may read, and nobody else should.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.cli.finding import Finding
from fumehood.config import Config, ConfigError

if TYPE_CHECKING:
    from fumehood.core.tool import ToolDefinition

CHECKS = ("approvers", "policy", "webhook", "audit key")


def authority_findings(config: Config) -> Iterator[Finding]:
    """One of each, of the policy one a fault."""
    whose = _whose(config.state_directory)
    if whose is not None:
        found = f"cannot be looked at by this user: {config.state_directory} is {whose}'s"
        cure = f"Ask as that user: sudo -u {whose} fumehood doctor"
        yield from (Finding(check, "warning", found, cure) for check in CHECKS)
        return
    yield _approvers(config)
    yield from _policy(config)
    yield _webhook(config)
    yield _audit_key(config.state_directory)


def _whose(state: Path) -> str | None:
    """The user whose state directory it is, where that is not this one."""
    try:
        owner = state.stat().st_uid
    except FileNotFoundError:
        return None
    except OSError:
        return "another user"
    if owner == os.geteuid():
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"#{owner}"


def _approvers(config: Config) -> Finding:
    from fumehood.core.identity import Scope
    from fumehood.identity import store as identities
    from fumehood.identity.approvers import cure_of_none
    from fumehood.storage.errors import StoreError
    from fumehood.storage.offline import reading

    decides = config.webhook is not None and config.webhook.may_decide
    if not _has_database(config.state_directory):
        found = "none: dangerous calls will be refused, as there is nobody to ask"
        if decides:
            return Finding("approvers", "ok", "none; the webhook may decide")
        return Finding("approvers", "warning", found, f"Make one: {cure_of_none(any_there=False)}.")
    try:
        with reading(config.state_directory) as connection:
            rows = identities.all_approvers(connection)
            tokens = identities.all_tokens(connection)
    except StoreError as error:
        return Finding("approvers", "warning", str(error), "Mend the state directory.")
    there = {row["name"]: row["scopes"] for row in rows if row["removed_at"] is None}
    approving = [name for name, scopes in there.items() if Scope.APPROVE in scopes]
    others = sum(_approves(token) for token in tokens)
    told = [*approving, *([f"{others} tokens"] if others else []), *(["the webhook"] * decides)]
    if told:
        return Finding("approvers", "ok", ", ".join(told))
    found = "none: dangerous calls are refused, as there is nobody to ask"
    return Finding(
        "approvers", "warning", found, f"Make one: {cure_of_none(any_there=bool(there))}."
    )


def _approves(token: dict[str, object]) -> bool:
    """Whether a row is a token that may say yes now."""
    from fumehood.core.identity import Scope

    scopes, expires = token["scopes"], token["expires_at"]
    return (
        isinstance(scopes, list)
        and Scope.APPROVE in scopes
        and token["revoked_at"] is None
        and (expires is None or datetime.now(UTC) < datetime.fromisoformat(str(expires)))
    )


def _policy(config: Config) -> Iterator[Finding]:
    from fumehood.cli.policy_offline import Offline
    from fumehood.policy.loader import load_policy
    from fumehood.policy.model import PolicyError

    path = config.policy_file
    if path is None:
        found = "none is configured: dangerous tools ask, others are allowed"
        yield Finding("policy", "ok", found)
        return
    # What is left out of the tools is said of the tools.
    offline = Offline(config, config.tools_directory, warn=lambda _: None)
    tools = [*offline.definitions(), *_registered(config.state_directory)]
    try:
        policy = load_policy(path, tools)
    except PolicyError as refused:
        cure = "Mend it, and look again: fumehood policy check. No engine starts with it."
        yield from (Finding("policy", "missing", fault, cure) for fault in refused.shown)
        return
    yield Finding("policy", "ok", f"{path}: {len(policy.rules)} rules, version {policy.version}")


def _registered(state: Path) -> Iterator[ToolDefinition]:
    """Those of the control socket, as far as they can be read."""
    from fumehood.core.errors import EngineError
    from fumehood.registry.definitions import parse_definition
    from fumehood.registry.store import all_definitions
    from fumehood.storage.errors import StoreError
    from fumehood.storage.offline import reading

    if not _has_database(state):
        return
    documents = []
    with suppress(StoreError), reading(state) as connection:
        documents = all_definitions(connection)
    for document in documents:
        with suppress(EngineError, ValueError):
            yield parse_definition(document)


def _webhook(config: Config) -> Finding:
    chosen = config.webhook
    if chosen is None:
        return Finding("webhook", "ok", "none is configured")
    from fumehood.engine_webhook import read_secret

    try:
        read_secret(chosen.secret_file)
    except ConfigError as error:
        cure = "Mend the secret's file; no engine starts with it."
        return Finding("webhook", "missing", str(error), cure)
    may = "may" if chosen.may_decide else "may not"
    return Finding("webhook", "ok", f"its secret can be read; a signed callback {may} decide")


def _audit_key(state: Path) -> Finding:
    from fumehood.audit.chain import head_of, key_id_after
    from fumehood.audit.keys import CURRENT, all_keys
    from fumehood.storage.errors import StoreError
    from fumehood.storage.offline import reading

    if not _has_database(state):
        return Finding("audit key", "ok", "will be made by `fumehood serve`")
    try:
        known = all_keys(state)
        with reading(state) as connection:
            head = head_of(connection)
    except StoreError as error:
        return Finding("audit key", "missing", str(error), "Mend it; no engine starts without it.")
    wanted = key_id_after(head) if head is not None else None
    if wanted is None and not known:
        return Finding("audit key", "ok", "will be made by `fumehood serve`")
    if wanted is not None and wanted not in known:
        found = f"the chain goes on under the key {wanted[:40]}, which is not in {state}"
        return Finding("audit key", "missing", found, "Restore it from a copy.")
    return Finding("audit key", "ok", f"{state / CURRENT}, private; a backup needs it, too")


def _has_database(state: Path) -> bool:
    from fumehood.storage.database import FILE_NAME

    return (state / FILE_NAME).exists()


__all__ = ["authority_findings"]
