"""Changes of authority whose commit got no answer: memory follows what became of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.core.identity import Scope
from fumehood.storage import changes
from fumehood.storage.database import Database
from fumehood.storage.errors import WriteUnavailable
from support.definitions import rest_document
from support.identities import ADMIN, NOW, make_agent, new_token

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite, pytest.mark.row("D4")]

Change = Callable[[], Awaitable[object]]
IsMade = Callable[[], bool]


async def revoke_token(engine: Engine) -> tuple[Change, IsMade]:
    token, _ = await new_token(engine.tokens)

    def is_made() -> bool:
        return engine.tokens.principal_of_id(token.id, NOW) is None

    return lambda: engine.tokens.revoke(token.id, by=ADMIN, now=NOW), is_made


async def remove_approver(engine: Engine) -> tuple[Change, IsMade]:
    for name in ("one", "two"):
        await engine.approvers.add(name, [Scope.ADMIN], by=ADMIN, now=NOW)

    def is_made() -> bool:
        return [one.name for one in engine.approvers.current()] == ["two"]

    return lambda: engine.approvers.remove("one", by=ADMIN, now=NOW), is_made


async def delete_agent(engine: Engine) -> tuple[Change, IsMade]:
    await make_agent(engine.agents, "writer", "token:ci")

    def is_made() -> bool:
        return not engine.agents.spoken_for_by("token:ci")

    return lambda: engine.agents.delete("writer", by=ADMIN, now=NOW), is_made


async def disable_tool(engine: Engine) -> tuple[Change, IsMade]:
    document = rest_document()
    await engine.registrations.register(document, by=ADMIN, now=NOW)
    registry = engine._made.services.registry

    def is_made() -> bool:
        return not registry.get(document["name"]).definition.is_active

    return (
        lambda: engine.registrations.switch(
            document["name"], None, is_active=False, by=ADMIN, now=NOW
        ),
        is_made,
    )


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("prepare", [revoke_token, remove_approver, delete_agent, disable_tool])
async def test_memory_follows_a_change_whose_commit_got_no_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any, is_stored: bool
) -> None:
    monkeypatch.setattr(changes, "RETRY_AFTER_MS", 1)
    write, attempts, done = Database.write, 0, 0

    async def lose_answers(database: Database, job: Any) -> Any:
        nonlocal attempts, done
        attempts += 1
        if attempts == 1 and is_stored:
            await write(database, job)
        if attempts <= 2:  # also of the first attempt to find out
            raise WriteUnavailable("no answer")
        result = await write(database, job)
        done += 1
        return result

    async with Engine(config=Config(home=home)) as engine:
        change, is_made = await prepare(engine)
        with monkeypatch.context() as losing:
            losing.setattr(Database, "write", lose_answers)
            with pytest.raises(WriteUnavailable):
                await change()
            with anyio.fail_after(120):
                while not done or is_made() is not is_stored:
                    await anyio.sleep(0.01)
                await anyio.sleep(0.05)
        assert is_made() is is_stored
