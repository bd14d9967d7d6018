"""The cluster of one engine: its wall, its figures, and its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood import Config, Engine
from fumehood.cluster import in_engine
from fumehood.cluster.in_engine import Cluster, node_figures
from fumehood.cluster.wall import ClusterWall
from fumehood.config import ConfigError
from fumehood.core.errors import ResourceNotFound
from fumehood.core.status import NodeRecord, NodeState
from fumehood.testing import FakeWall


def engine_of(home: Path, **walls: FakeWall) -> Engine:
    config = Config.model_validate({"home": home, "cluster": {"address": "127.0.0.1:6379"}})
    return Engine(config=config, **walls)


def test_address_needs_ray(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_engine, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"cluster.address needs Ray: pip install .*\[cluster\]"):
        engine_of(home)
    assert engine_of(home, container=FakeWall()).part(Cluster).wall is None


def test_engine_has_the_containers_of_the_nodes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_engine, "find_spec", lambda _: True)
    engine = engine_of(home)
    wall = engine.part(Cluster).wall
    assert isinstance(wall, ClusterWall)
    assert engine._made.walls.container is wall
    assert engine._made.walls.by_name.get("container") is wall


@pytest.mark.anyio
async def test_engine_without_an_address_has_no_nodes(home: Path) -> None:
    async with Engine(config=Config(home=home), interpreter=FakeWall()) as engine:
        cluster = engine.part(Cluster)
        assert cluster.nodes() == list(cluster.figures()) == []
        with pytest.raises(ResourceNotFound, match="This engine has no nodes"):
            await cluster.drain("a", engine.owner, is_drained=True)


def test_nodes_have_figures_and_gone_ones_count_as_down() -> None:
    nodes = [
        NodeRecord(name="a", state=NodeState.JOINED, slots=8, used=3, sessions=2),
        NodeRecord(name="b", state=NodeState.DRAINED, slots=8),
        NodeRecord(name="c", state=NodeState.UNREADY, slots=8),
        NodeRecord(name="d", state=NodeState.GONE),
    ]
    found = {figure.name: figure.value for figure in node_figures(nodes)}
    assert found == {
        "node_up": {"a": 1, "b": 1, "c": 0, "d": 0},
        "node_slots": {"a": 8, "b": 8, "c": 8, "d": 0},
        "node_used": {"a": 3, "b": 0, "c": 0, "d": 0},
        "node_sessions": {"a": 2, "b": 0, "c": 0, "d": 0},
    }
