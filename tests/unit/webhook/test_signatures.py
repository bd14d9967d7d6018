"""Webhook signatures: signing, and verification of body, time window and single use."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest

from fumehood.core.errors import Unauthorized
from fumehood.webhook.channel import Callbacks, sign

pytestmark = pytest.mark.row("A6")

SECRET = b"k" * 32
BODY = b'{"a": 1}'
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW_S = 300


def callbacks() -> Callbacks:
    return Callbacks(SECRET, window_s=WINDOW_S)


def test_signature_is_hmac_sha256_of_time_and_body() -> None:
    expected = hmac.new(SECRET, b"1767225600." + BODY, hashlib.sha256).hexdigest()
    assert sign(SECRET, BODY, NOW) == f"t=1767225600,v1={expected}"


def test_valid_signature_is_accepted_once() -> None:
    judge = callbacks()
    judge.check([sign(SECRET, BODY, NOW)], BODY, NOW)
    with pytest.raises(Unauthorized, match="used before"):
        judge.check([sign(SECRET, BODY, NOW)], BODY, NOW)
    judge.check([sign(SECRET, BODY, NOW + timedelta(seconds=1))], BODY, NOW)


@pytest.mark.parametrize("seconds", [-WINDOW_S, 0, WINDOW_S])
def test_signature_at_edge_of_time_window_is_accepted(seconds: int) -> None:
    callbacks().check([sign(SECRET, BODY, NOW + timedelta(seconds=seconds))], BODY, NOW)


@pytest.mark.parametrize("seconds", [-WINDOW_S - 1, WINDOW_S + 1, -(10**8)])
def test_signature_outside_time_window_is_refused(seconds: int) -> None:
    with pytest.raises(Unauthorized, match="Sign the body again"):
        callbacks().check([sign(SECRET, BODY, NOW + timedelta(seconds=seconds))], BODY, NOW)


def test_wrong_signature_does_not_reveal_whether_it_is_expired() -> None:
    old = sign(b"x" * 32, BODY, NOW - timedelta(days=1))
    with pytest.raises(Unauthorized, match="is wrong"):
        callbacks().check([old], BODY, NOW)


def test_boundary_between_time_and_body_cannot_be_moved() -> None:
    """Time `1` with body `2.x` must not be signed like time `1.2` with body `.x`."""
    moment = datetime.fromtimestamp(17, UTC)
    mac = sign(SECRET, b"67225600." + BODY, moment).partition("v1=")[2]
    with pytest.raises(Unauthorized, match="is wrong"):
        callbacks().check([f"t=1767225600,v1={mac}"], BODY, NOW)


def test_clock_set_back_does_not_revalidate_a_used_signature() -> None:
    judge = callbacks()
    first = sign(SECRET, BODY, NOW)
    judge.check([first], BODY, NOW)
    later = NOW + timedelta(seconds=2 * WINDOW_S)
    judge.check([sign(SECRET, BODY, later)], BODY, later)  # which forgets the first
    with pytest.raises(Unauthorized, match="Sign the body again"):
        judge.check([first], BODY, NOW)


def test_seen_signatures_are_kept_within_the_window_and_then_forgotten() -> None:
    judge = callbacks()
    for second in range(3):
        judge.check([sign(SECRET, BODY, NOW + timedelta(seconds=second))], BODY, NOW)
    with pytest.raises(Unauthorized, match="used before"):
        judge.check([sign(SECRET, BODY, NOW)], BODY, NOW)
    later = NOW + timedelta(seconds=WINDOW_S + 10)
    judge.check([sign(SECRET, BODY, later)], BODY, later)
    assert len(judge._seen) == 1


def test_forged_signatures_are_not_remembered() -> None:
    judge = callbacks()
    for second in range(50):
        with pytest.raises(Unauthorized):
            judge.check([sign(b"x" * 32, BODY, NOW + timedelta(seconds=second))], BODY, NOW)
    assert judge._seen == {}
