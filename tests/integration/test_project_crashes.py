"""SIGKILL of the engine while it writes a project: the next one says what is known of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import StartDaemon, make_first_approver
from fumehood.approvals.model import ApprovalState
from fumehood.client import Client, ControlClient
from support.wait import wait_until

pytestmark = [
    pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image"),
    pytest.mark.row("B1", "S11"),
]  # fmt: skip

SETTINGS = {"sessions__image": "python", "container__images__python": "python"}
FILES = 600


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of a client
def test_apply_that_was_put_back_says_so_and_can_be_made_again(
    home: Path, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for number in range(FILES):
        (project / f"{number}").write_text("old\n")

    def contents() -> set[str]:
        return {path.read_text() for path in project.iterdir()}

    credential = make_first_approver(home)
    daemon = start_daemon(**SETTINGS)
    with Client(daemon.socket) as client:
        session = client.create_session_from(project).id
        change = {"command": "for n in *; do echo new > $n; done"}
        assert client.call("run_shell", change, session_id=session).success
        asked = client.call("apply_workspace", {}, session_id=session)
        assert asked.error is not None
        assert asked.error.code == "REQUIRES_HUMAN_APPROVAL"
    with ControlClient(daemon.control, credential=credential) as control:
        (approval,) = control.approvals.list(state="pending").items
        control.approvals.approve(approval.id, version=approval.version)
    wait_until(lambda: any(project.glob(".fumehood-apply-*/new-9")))
    daemon.process.kill()
    daemon.process.wait()

    again = start_daemon(**SETTINGS)
    assert contents() == {"old\n"}
    with ControlClient(again.control, credential=credential) as control:
        after = control.approvals.show(approval.id)
        assert (after.state, after.code) == (ApprovalState.FAILED, "STATE_UNAVAILABLE")
        with Client(again.socket) as client:
            told = client.call("apply_workspace", {}, session_id=session)
            assert told.error is not None
            assert "everything was put back: nothing was written" in told.error.message
            asked = client.call("apply_workspace", {}, session_id=session)
            assert asked.error is not None
            assert asked.error.code == "REQUIRES_HUMAN_APPROVAL", asked.error
            (new,) = control.approvals.list(state="pending").items
            control.approvals.approve(new.id, version=new.version)
            wait_until(lambda: control.approvals.show(new.id).state is ApprovalState.DONE)
            assert contents() == {"new\n"}
            client.end_session(session)
