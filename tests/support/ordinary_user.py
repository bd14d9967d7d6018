"""An ordinary user of this host who has an engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.users import Installation, User, accounts, readable_installation
from support.wait import wait_until


@dataclass(frozen=True)
class Host:
    """An ordinary user who has an engine, and the user's home."""

    user: User
    installation: Installation
    home: Path
    engine: str

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **self.installation.environment, "HOME": str(self.home), **variables,
            "FUMEHOOD_CONTAINER__ENGINE": self.engine, "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        return subprocess.run(
            command, **self.user.identity, env=environment, cwd="/", capture_output=True,
            text=True, timeout=900, check=False,
        )  # fmt: skip

    def findings(self, **variables: str) -> dict[str, dict[str, Any]]:
        """What `fumehood doctor` finds, by check."""
        done = self.run(*self.installation.command, "doctor", "--json", **variables)
        return {one["check"]: one for one in json.loads(done.stdout)}

    def attacked(self, **variables: str) -> dict[str, Any]:
        """The scorecard of this engine's containers, after all attacks."""
        attack = ("doctor", "--attack", "--runtime", self.engine, "--json", "--wall", "container")
        done = self.run(*self.installation.command, *attack, **variables)
        (card,) = json.loads(done.stdout)["walls"]
        return dict(card)


def assert_all_held(card: dict[str, Any]) -> None:
    """All attacks were tried and held, with the grade `watched`."""
    through = [line for line in card["attacks"] if line["verdict"] != "held"]
    assert (through, card["why"], card["grade"]) == ([], "", "watched")
    assert len(card["attacks"]) >= 72


def assert_doctor_names_the_grade(host: Host) -> None:
    refused = host.findings()[host.engine]
    assert refused["verdict"] == "warning"
    assert 'set container.least_grade to "watched"' in refused["cure"]
    accepted = host.findings(FUMEHOOD_CONTAINER__LEAST_GRADE="watched")[host.engine]
    assert accepted["verdict"] == "ok"
    assert "the grade is watched" in accepted["found"]


@contextmanager
def ordinary_user(engine: str, *, has_sub_ids: bool) -> Iterator[Host]:
    """A user with or without subordinate ids. Afterwards, no process of the user is left."""
    place = Path(tempfile.mkdtemp(prefix="fh-user-", dir="/tmp"))
    place.chmod(0o755)
    try:
        with accounts(f"fh{engine[0]}{has_sub_ids:d}{os.getpid()}", [], {"own": []}) as (_, users):
            user = users["own"]
            first = 200_000_000 + os.getpid() % 10_000 * 65_536
            ids = f"{first}-{first + 65_535}"
            if has_sub_ids:
                subprocess.run(
                    ["usermod", "--add-subuids", ids, "--add-subgids", ids, user.name],
                    check=True, timeout=600,
                )  # fmt: skip
            home = place / "home"
            home.mkdir(mode=0o700)
            os.chown(home, user.uid, user.gid)
            installation = readable_installation(place / "engine")
            yield Host(user, installation, home, engine)
            installation.close()
            for pid, owner in owners().items():  # its launchers, which end only later
                if owner == user.uid:
                    os.kill(pid, signal.SIGKILL)
            of_user = range(first, first + 65_536)
            wait_until(lambda: not [pid for pid, owner in owners().items() if owner in of_user])
            wait_until(lambda: user.uid not in owners().values())
    finally:
        shutil.rmtree(place)


def owners() -> dict[int, int]:
    """Process id → user id of all processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found[int(path.name)] = path.stat().st_uid
        except OSError:
            continue
    return found
