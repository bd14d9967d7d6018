"""What Docker itself says of an engine's containers. The engine's word is no evidence."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from fumehood.sandbox.container.reach import open_docker


def containers_of(label: str) -> list[dict[str, Any]]:
    """All containers with a label (`name=value`), running or not, as Docker inspects them."""
    with closing(open_docker(timeout_s=30)) as client:
        found = client.containers(all=True, filters={"label": [label]})
        return [client.inspect_container(one["Id"]) for one in found]


def kill_container(container_id: str) -> None:
    with closing(open_docker(timeout_s=30)) as client:
        client.kill(container_id, "SIGKILL")
