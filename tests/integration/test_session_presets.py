"""Presets and environment variables of sessions on a real Docker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import select

from fumehood import Config, Engine
from fumehood.core.errors import PermissionDenied
from fumehood.core.session import SessionRecord
from fumehood.sandbox.container.supply import GUEST_CPUS
from fumehood.sandbox.images.catalog import Image
from fumehood.storage.database import open_database
from fumehood.storage.directory import owner_id
from fumehood.storage.schema import SESSIONS
from support.containers import containers_of
from support.identities import bind, make_agent

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

SLOW_S = 60.0
SECRET = "value-of-the-preset"


def config(home: Path, **presets: Any) -> Config:
    small = {"memory_mb": 128, "cpus": 0.5, "env": {"A": SECRET, "B": "2"}}
    return Config.model_validate(
        {
            "home": home,
            "container": {"images": {"python": "python", "shell": "python"}, "pool_min": 0},
            "sessions": {"image": "python"},
            "presets": {"small": small, "disk": {**small, "disk_mb": 16}, **presets},
        }
    )


async def variables(engine: Engine, session: SessionRecord, **own: str) -> list[str]:
    """What a Python program and a command of the session see."""
    env = [{"name": name, "value": value} for name, value in own.items()]
    seen = []
    for tool, argument, text in (
        ("run_python", "code", "import os; print(os.environ['A'], os.environ['B'])"),
        ("run_shell", "command", "echo $A $B"),
    ):
        with anyio.fail_after(SLOW_S):
            answer = await engine.call(
                tool, {argument: text, "env": env}, session_id=session.id,
                agent_id=session.agent_id,
            )  # fmt: skip
        assert answer.success, answer.error
        seen.append(answer.data["stdout"])
    return seen


async def test_bound_agents_session_has_its_preset_and_is_refused_the_rest(
    home: Path, python_image: Image
) -> None:
    database = open_database(home / "state.db")
    async with Engine(config=config(home), database=database) as engine:
        await make_agent(engine.agents, "clerk", engine.owner.id, presets=("small",))
        await bind(engine.agents, "clerk", ["run_python", "run_shell"])
        with anyio.fail_after(SLOW_S):
            session = await engine.sessions.create(engine.owner, agent_id="clerk")
        assert (session.preset, session.memory_mb, session.cpus) == ("small", 128, 0.5)
        assert session.env == ("A", "B")
        assert SECRET not in session.model_dump_json()
        assert await variables(engine, session) == [f"{SECRET} 2\n"] * 2
        assert await variables(engine, session, B="of the call") == [f"{SECRET} of the call\n"] * 2
        assert await variables(engine, session) == [f"{SECRET} 2\n"] * 2
        (container,) = containers_of(f"fumehood.owner={owner_id(home)}")
        assert container["HostConfig"]["NanoCpus"] == (0.5 + GUEST_CPUS) * 10**9
        assert SECRET not in str(container)
        for more in ({"memory_mb": 256}, {"preset": "disk"}, {"packages": ["humanize"]}):
            with pytest.raises(
                PermissionDenied, match="The agent clerk is bound to presets: small"
            ):
                await engine.sessions.create(engine.owner, agent_id="clerk", **more)
        assert len(engine.sessions.list(engine.owner)) == 1
        await engine.sessions.end(engine.owner, session.id)
    database.close()


@pytest.mark.needs("disks")
async def test_variables_of_a_session_survive_the_engine_and_a_fork(
    home: Path, python_image: Image
) -> None:
    database = open_database(home / "state.db")
    async with Engine(config=config(home), database=database) as engine:
        with anyio.fail_after(SLOW_S):
            session = await engine.sessions.create(engine.owner, preset="disk", env={"B": "own"})
    # The next engine has another preset of this name: the session keeps its own.
    async with Engine(
        config=config(home, disk={"env": {"A": "changed"}}), database=database
    ) as engine:
        again = engine.sessions.find(engine.owner, session.id)
        assert (again.preset, again.env) == ("disk", ("A", "B"))
        assert await variables(engine, again) == [f"{SECRET} own\n"] * 2
        (fork,) = await engine.snapshots.fork(engine.owner, session.id)
        assert (fork.preset, fork.env) == ("disk", ("A", "B"))
        assert await variables(engine, fork) == [f"{SECRET} own\n"] * 2
        for one in (session, fork):
            await engine.sessions.end(engine.owner, one.id)
    assert not containers_of(f"fumehood.owner={owner_id(home)}")
    rows = database.read_now(lambda connection: list(connection.execute(select(SESSIONS))))
    assert len(rows) == 2
    assert SECRET not in str(rows)
    database.close()
