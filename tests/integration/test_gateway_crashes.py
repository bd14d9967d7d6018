"""A program's request that waits for a human: what its caller reads meanwhile, and SIGKILL of the
engine then and while it is sent.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from contextlib import suppress

import pytest

from conftest import FUMEHOOD, StartDaemon, make_first_approver
from fumehood.approvals.model import Approval, ApprovalState
from fumehood.client import Client, ControlClient
from fumehood.client.api_request import Refused
from fumehood.core.errors import FumehoodError
from support.wait import DEADLINE_S, wait_until
from upstream import Reply, Upstream

pytestmark = [
    pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image"),
    pytest.mark.row("B1", "A2"),
]  # fmt: skip

SETTINGS = {
    "gateway__hosts": '["localhost"]',
    "gateway__allowed_hosts": '["localhost"]',
    "container__images__python": "python",
}
CODE = "import urllib.request\nurllib.request.urlopen({url!r}, b'once').read()"


@pytest.mark.parametrize("is_sent", [False, True], ids=["held", "sent"])
def test_held_request_of_a_killed_engine_is_sent_at_most_once(
    home, start_daemon: StartDaemon, upstream: Upstream, is_sent: bool
) -> None:
    upstream.script("/order", Reply(held=True))
    credential = make_first_approver(home)
    daemon = start_daemon(**SETTINGS)
    url = f"http://localhost:{upstream.port}/order"
    arguments = {
        "code": CODE.format(url=url),
        "env": [{"name": name, "value": ""} for name in ("NO_PROXY", "no_proxy")],
    }

    def call() -> None:
        with Client(daemon.socket) as client, suppress(FumehoodError):
            client.call("run_python", arguments, network=["localhost"])

    caller = threading.Thread(target=call)
    caller.start()
    with ControlClient(daemon.control, credential=credential) as control:
        wait_until(lambda: control.approvals.list(state="pending").items)
        (approval,) = control.approvals.list(state="pending").items
        assert approval.tool == "net"
        if is_sent:
            control.approvals.approve(approval.id, version=1)
            upstream.wait_for(lambda: upstream.count("/order") == 1)
    daemon.process.kill()
    daemon.process.wait()
    caller.join()
    upstream.release()
    again = start_daemon(**SETTINGS)
    with ControlClient(again.control, credential=credential) as control:
        found = control.approvals.show(approval.id)
        if is_sent:
            assert found.state is ApprovalState.INTERRUPTED
        else:
            require_lost(control, found, "program")
    assert upstream.count("/order") == is_sent


@pytest.mark.parametrize("mode", [[], ["--stream"]], ids=["quiet", "streamed"])
def test_command_whose_program_waits_says_in_one_line_what_for(
    home, start_daemon: StartDaemon, upstream: Upstream, mode: list[str]
) -> None:
    upstream.script("/order", Reply(body=b"{}"))
    credential = make_first_approver(home)
    daemon = start_daemon(**SETTINGS)
    url = f"http://localhost:{upstream.port}/order"
    arguments = json.dumps({
        "code": CODE.format(url=url),
        "env": [{"name": name, "value": ""} for name in ("NO_PROXY", "no_proxy")],
    })  # fmt: skip
    command = [FUMEHOOD, "call", "run_python", arguments, "--network", "localhost", *mode]
    with subprocess.Popen(
        command, env=daemon.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        found = re.fullmatch(rf"Waits for approval: (apr_\w+) \(POST {url}\)\n", line)
        assert found, line
        with ControlClient(daemon.control, credential=credential) as control:
            control.approvals.approve(found[1], version=1)
        _, rest = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, rest) == (0, "")
    assert upstream.count("/order") == 1


def require_lost(control: ControlClient, found: Approval, what: str) -> None:
    """What cannot happen any more has expired at the start, and a yes is refused."""
    assert (found.state, found.code) == (ApprovalState.EXPIRED, "APPROVAL_EXPIRED")
    assert found.changed == (what,)
    assert not control.approvals.list(state="pending").items
    with pytest.raises(Refused) as refused:
        control.approvals.approve(found.id, version=found.version)
    assert refused.value.code == "APPROVAL_EXPIRED"


def test_waiting_trial_of_a_killed_engine_expires_and_other_calls_still_wait(
    home, start_daemon: StartDaemon
) -> None:
    credential = make_first_approver(home)
    daemon = start_daemon(container__images__python="python")
    with Client(daemon.socket) as client:
        session = client.create_session(durable=True).id
        client.call("write_file", {"path": "a", "content": "kept"}, session_id=session)
        twin = client.call("delete_files", {"paths": ["a"]}, session_id=session)
        assert twin.error is not None

    def call() -> None:
        with Client(daemon.socket) as client, suppress(FumehoodError):
            code = {"code": "open('b', 'w').write('tried')"}
            client.call("run_python", code, session_id=session, preview=True)

    caller = threading.Thread(target=call)
    caller.start()
    with ControlClient(daemon.control, credential=credential) as control:
        wait_until(lambda: len(control.approvals.list(state="pending").items) == 2)
        (trial,) = control.approvals.list(state="pending", tool="run_python").items
    daemon.process.kill()
    daemon.process.wait()
    caller.join()
    again = start_daemon(container__images__python="python")
    with ControlClient(again.control, credential=credential) as control:
        (pending,) = control.approvals.list(state="pending").items
        assert pending.id == twin.error.approval_id
        control.approvals.deny(pending.id, version=pending.version)
        require_lost(control, control.approvals.show(trial.id), "trial")
