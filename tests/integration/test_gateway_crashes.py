"""SIGKILL of the engine while a program's request waits for a human, and while it is sent."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from conftest import StartDaemon, make_first_approver
from fumehood.approvals.model import ApprovalState
from fumehood.client import Client, ControlClient
from fumehood.core.errors import FumehoodError
from support.wait import wait_until
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
        if is_sent:
            found = control.approvals.show(approval.id)
            assert found.state is ApprovalState.INTERRUPTED
        else:
            control.approvals.approve(approval.id, version=1)
            wait_until(lambda: control.approvals.show(approval.id).ended_at is not None)
            assert control.approvals.show(approval.id).state is ApprovalState.EXPIRED
    assert upstream.count("/order") == is_sent
