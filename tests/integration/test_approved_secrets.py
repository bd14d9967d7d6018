"""A person who is asked about a call learns which of its secrets has no usable value yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood import Config, Engine
from fumehood.registry.secrets import SecretSettings
from fumehood.testing import FakeWall
from support.answers import error_of
from support.asking import add_approvers
from support.definitions import rest_document

pytestmark = [pytest.mark.anyio, pytest.mark.row("A1", "T5")]


async def test_approver_is_told_of_a_secret_without_a_usable_value(home: Path) -> None:
    key = home / "key"
    bound = SecretSettings(file=key, tools=("weather",), hosts=("weather.example",))
    other = SecretSettings(env="UNSET_KEY", tools=("other",), hosts=("other.example",))
    config = Config(home=home, secrets={"key": bound, "other": other})
    document = rest_document(dangerous=True, headers={"authorization": "Bearer ${secret:key}"})
    async with Engine(tools=[document], config=config, interpreter=FakeWall()) as engine:
        await add_approvers(engine, "owner")

        async def reason_of(city: str) -> str | None:
            asked = error_of(await engine.call("weather", {"city": city}))
            return (await engine.approvals.show(asked.approval_id or "")).reason

        assert await reason_of("Basel") == "Secrets without a usable value now: key."
        key.write_text("value-of-the-key", encoding="utf-8")
        key.chmod(0o600)
        assert await reason_of("Bern") is None
