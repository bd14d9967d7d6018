"""SIGKILL of the engine in a trial, while its effect waits for a human, and while it is put in."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import StartDaemon, make_first_approver
from fumehood.approvals.model import ApprovalState
from fumehood.client import Client, ControlClient
from fumehood.core.errors import FumehoodError
from support.wait import wait_until

pytestmark = [
    pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image"),
    pytest.mark.row("B1", "A2"),
]  # fmt: skip

SETTINGS = {"sessions__image": "python", "container__images__python": "python"}
MAKE = "for n in range(40): open(f'f{{n}}', 'w').write('{what}' * 1000)"


def files(client: Client, session: str) -> set[str]:
    """The different contents of all files."""
    command = {"command": "cat f* | fold -w 1 | sort -u"}
    answer = client.call("run_shell", command, session_id=session)
    assert answer.success, answer.error
    return set(answer.data["stdout"].split())


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of a client
@pytest.mark.parametrize("moment", ["trial", "undone", "waiting", "yes"])
def test_effect_of_a_killed_engine_is_dropped_or_interrupted(
    home: Path, start_daemon: StartDaemon, moment: str
) -> None:
    """Never seen by the next call, unless a human said yes. `undone` is any moment from the start
    of the program to the question."""
    credential = make_first_approver(home)
    daemon = start_daemon(**SETTINGS)
    with Client(daemon.socket) as client:
        session = client.create_session(durable=True, memory_mb=128).id
        client.call("run_python", {"code": f"x = 1\n{MAKE.format(what='a')}"}, session_id=session)
    code = MAKE.format(what="b") + ("\nwhile True: pass" if moment == "trial" else "")

    def call() -> None:
        with Client(daemon.socket) as client, suppress(FumehoodError):
            client.call("run_python", {"code": code}, session_id=session, preview=True)

    caller = threading.Thread(target=call)
    caller.start()
    approval = None
    with ControlClient(daemon.control, credential=credential) as control:
        if moment in ("trial", "undone"):
            time.sleep(1 if moment == "trial" else random.Random().uniform(0, 0.3))
        else:
            wait_until(lambda: control.approvals.list(state="pending").items)
            (approval,) = control.approvals.list(state="pending").items
        if moment == "yes":
            control.approvals.approve(approval.id, version=1)
    daemon.process.kill()
    daemon.process.wait()
    caller.join()
    again = start_daemon(**SETTINGS)
    with ControlClient(again.control, credential=credential) as control:
        if moment == "waiting":
            with pytest.raises(FumehoodError, match="the effect of this trial is not kept"):
                control.approvals.approve(approval.id, version=1)
            assert control.approvals.show(approval.id).state is ApprovalState.EXPIRED
        elif moment == "yes":
            is_over = (ApprovalState.INTERRUPTED, ApprovalState.EXPIRED, ApprovalState.DONE)
            wait_until(lambda: control.approvals.show(approval.id).state in is_over)
    with Client(again.socket) as client:
        found = files(client, session)
        assert found in ([{"a"}, {"b"}] if moment == "yes" else [{"a"}])
        answer = client.call("run_python", {"code": "x"}, session_id=session)
        if moment == "waiting":
            assert answer.data["value"] == 1
