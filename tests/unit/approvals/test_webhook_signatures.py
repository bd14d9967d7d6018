"""What is signed, and what is believed: once, of these bytes, made just now."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest

from fumehood.approvals.channels import webhook
from fumehood.approvals.channels.webhook import Callbacks, sign
from fumehood.core.errors import RateLimited, Unauthorized

pytestmark = pytest.mark.row("A6")

SECRET = b"k" * 32
BODY = b'{"a": 1}'
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW_S = 300


def callbacks() -> Callbacks:
    return Callbacks(SECRET, window_s=WINDOW_S)


def test_signature_is_what_any_other_program_computes() -> None:
    expected = hmac.new(SECRET, b"1767225600." + BODY, hashlib.sha256).hexdigest()
    assert sign(SECRET, BODY, NOW) == f"t=1767225600,v1={expected}"


def test_good_signature_is_believed_once() -> None:
    judge = callbacks()
    judge.check([sign(SECRET, BODY, NOW)], BODY, NOW)
    with pytest.raises(Unauthorized, match="used before"):
        judge.check([sign(SECRET, BODY, NOW)], BODY, NOW)
    judge.check([sign(SECRET, BODY, NOW + timedelta(seconds=1))], BODY, NOW)


@pytest.mark.parametrize("seconds", [-WINDOW_S, 0, WINDOW_S])
def test_edge_of_the_window_is_inside(seconds: int) -> None:
    callbacks().check([sign(SECRET, BODY, NOW + timedelta(seconds=seconds))], BODY, NOW)


@pytest.mark.parametrize("seconds", [-WINDOW_S - 1, WINDOW_S + 1, -(10**8)])
def test_outside_of_the_window_is_refused(seconds: int) -> None:
    with pytest.raises(Unauthorized, match="Sign anew"):
        callbacks().check([sign(SECRET, BODY, NOW + timedelta(seconds=seconds))], BODY, NOW)


def test_wrong_signature_learns_nothing_of_the_clock() -> None:
    old = sign(b"x" * 32, BODY, NOW - timedelta(days=1))
    with pytest.raises(Unauthorized, match="is wrong"):
        callbacks().check([old], BODY, NOW)


def test_every_changed_bit_of_the_body_is_found() -> None:
    signature = sign(SECRET, BODY, NOW)
    for position in range(len(BODY) * 8):
        changed = bytearray(BODY)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(Unauthorized, match="is wrong"):
            callbacks().check([signature], bytes(changed), NOW)


def test_time_and_body_cannot_be_cut_elsewhere() -> None:
    """`1.` and `2.x` must not be `1.2` and `.x`."""
    moment = datetime.fromtimestamp(17, UTC)
    mac = sign(SECRET, b"67225600." + BODY, moment).partition("v1=")[2]
    with pytest.raises(Unauthorized, match="is wrong"):
        callbacks().check([f"t=1767225600,v1={mac}"], BODY, NOW)


def test_clock_that_is_set_back_makes_nothing_good_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_SEEN", 1)
    judge = callbacks()
    first = sign(SECRET, BODY, NOW)
    judge.check([first], BODY, NOW)
    later = NOW + timedelta(seconds=2 * WINDOW_S)
    judge.check([sign(SECRET, BODY, later)], BODY, later)  # which forgets the first
    with pytest.raises(Unauthorized, match="Sign anew"):
        judge.check([first], BODY, NOW)


def test_what_is_remembered_is_bounded_and_nothing_in_the_window_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "MAX_SEEN", 3)
    judge = callbacks()
    for second in range(3):
        judge.check([sign(SECRET, BODY, NOW + timedelta(seconds=second))], BODY, NOW)
    with pytest.raises(RateLimited):
        judge.check([sign(SECRET, BODY, NOW + timedelta(seconds=9))], BODY, NOW)
    with pytest.raises(Unauthorized, match="used before"):
        judge.check([sign(SECRET, BODY, NOW)], BODY, NOW)
    later = NOW + timedelta(seconds=WINDOW_S + 10)
    judge.check([sign(SECRET, BODY, later)], BODY, later)


def test_forged_ones_take_no_memory() -> None:
    judge = callbacks()
    for second in range(50):
        with pytest.raises(Unauthorized):
            judge.check([sign(b"x" * 32, BODY, NOW + timedelta(seconds=second))], BODY, NOW)
    assert judge._seen == {}
