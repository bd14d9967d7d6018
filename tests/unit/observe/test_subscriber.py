"""Subscribers: a fault of one stops neither the others nor the event that has happened."""

from __future__ import annotations

from structlog.testing import CapturingLogger

from fumehood.observe.ended_call import EndedCall
from fumehood.observe.subscriber import Subscriber, Subscribers, no_subscribers

CALL = EndedCall("calculator", "OK", 0.1)


class Noting(Subscriber):
    """Notes what it receives, and fails if it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.got: list[object] = []
        self._fails = fails

    def on_commit(self) -> None:
        self.note("commit")

    def on_call(self, call: EndedCall) -> None:
        self.note(call)

    def note(self, what: object) -> None:
        self.got.append(what)
        if self._fails:
            raise RuntimeError("secret text")


def test_fault_of_a_subscriber_is_logged_and_the_others_get_theirs() -> None:
    log = CapturingLogger()
    broken, well = Noting(fails=True), Noting()
    members = Subscribers([broken, well], log)
    members.committed()
    members.ended(CALL)
    assert broken.got == well.got == ["commit", CALL]
    errors = [one for one in log.calls if one.method_name == "error"]
    assert [(one.args, one.kwargs["subscriber"]) for one in errors] == [
        (("subscriber.internal_error",), "Noting")
    ] * 2
    assert "secret text" not in str(errors)


def test_calls_go_to_those_only_that_want_them() -> None:
    assert not Subscribers([Subscriber()], CapturingLogger()).take_calls
    assert not no_subscribers().take_calls
    assert Subscribers([Subscriber(), Noting()], CapturingLogger()).take_calls
