"""Containers that a build works in: without network, capabilities or another user's files.

Host side. Invariant: each has a name with a deadline in it, so that one which a killed build left
behind is known to the next, and removed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import docker

from fumehood.sandbox.container.trouble import trouble_in

NAME = "fumehood-builder-"
"""How their names begin; then come a deadline and a random part."""

LIFETIME_S = 600
MEMORY = "1g"
PROCESSES = 64


@contextmanager
def builder(
    client: docker.APIClient, image: str, command: Sequence[str], *, run_s: float
) -> Iterator[str]:
    """One that is not started yet, for a command that takes `run_s` at most."""
    host = client.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=MEMORY,
        pids_limit=PROCESSES,
    )
    made = client.create_container(
        image,
        command=list(command),
        host_config=host,
        name=f"{NAME}{int(time.time() + LIFETIME_S + run_s)}-{secrets.token_hex(4)}",
    )
    try:
        yield made["Id"]
    finally:
        client.remove_container(made["Id"], force=True)


def run(client: docker.APIClient, container: str, *, run_s: float, failed: str) -> None:
    """Run its command to the end.

    Raises:
        ImageTrouble: it failed; `failed` and what it said last.
    """
    client.start(container)
    status = client.wait(container, timeout=run_s)["StatusCode"]
    if status != 0:
        said = client.logs(container, tail=5).decode("utf-8", "replace")
        raise trouble_in(failed, said.splitlines())


def sweep_builders(client: docker.APIClient) -> None:
    """Containers that a killed build left behind."""
    for row in client.containers(all=True, filters={"name": NAME}):
        deadline = re.fullmatch(rf"/{NAME}(\d+)-[0-9a-f]+", row["Names"][0])
        if deadline is not None and int(deadline[1]) < time.time():
            client.remove_container(row["Id"], force=True)
