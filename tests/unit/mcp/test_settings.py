"""The setting `mcp_servers`, and the names of tools that its servers may list later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.parts import coming
from fumehood.policy.loader import PolicyError
from fumehood.testing import FakeWall

SERVERS: dict[str, Any] = {"files": {"command": ["server"]}, "a-b": {"url": "https://a.example/"}}


def test_tools_of_configured_servers_may_come_later() -> None:
    assert coming(Config(mcp_servers=SERVERS)) == ["files__", "a-b__"]
    assert coming(Config()) == []


def test_policy_may_name_a_tool_that_a_server_has_not_listed_yet(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[[rules]]\nid = "a"\ndecision = "deny"\ntools = ["files__read"]\n')
    file.chmod(0o600)
    settings: dict[str, Any] = {"home": tmp_path / "home", "policy_file": file}
    Engine(config=Config(mcp_servers=SERVERS, **settings), interpreter=FakeWall())
    with pytest.raises(PolicyError, match="files__read"):
        Engine(config=Config(**settings), interpreter=FakeWall())
