"""The service that attacks on the gateway talk to."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest

from fumehood.attack import gateway


def test_nothing_is_kept_before_a_program_has_sent_it() -> None:
    with gateway.Service() as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://{service.authority}/kept", timeout=60) as answer:
            body = answer.read()
        service.shutdown()
    assert service.kept == ""
    assert b"Traceback" not in body


@pytest.mark.parametrize(("error", "is_shown"), [(ConnectionResetError, False), (ValueError, True)])
def test_only_faults_of_the_service_itself_are_printed(
    error: type[Exception], is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with gateway.Service() as service, socket.socket() as end:
        try:
            raise error
        except error:
            service.handle_error(end, ("127.0.0.1", 1))
    assert (error.__name__ in capsys.readouterr().err) is is_shown
