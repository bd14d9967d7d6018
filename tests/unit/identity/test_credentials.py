"""Credentials: made at random, told apart by form, and kept so that nothing leads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.identity.credentials import (
    MOST_RECENT,
    CredentialCache,
    Presented,
    make_credential,
    parse_credential,
    quick_hash,
    slow_hash,
)

GOOD = "fht_0123456789abcdef_" + "A" * 43


@pytest.mark.row("D4")
@pytest.mark.parametrize("kind", ["fht", "fha"])
def test_a_credential_says_its_kind_id_and_secret(kind: str) -> None:
    identifier, secret, text = make_credential(kind)
    assert parse_credential(text) == Presented(kind, identifier, secret)


def test_no_two_credentials_share_an_id_or_a_secret() -> None:
    made = [make_credential("fht") for _ in range(100)]
    assert len({identifier for identifier, _, _ in made}) == 100
    assert len({secret for _, secret, _ in made}) == 100


@pytest.mark.row("D4")
@pytest.mark.parametrize(
    "text",
    [
        "", "fht", GOOD + "A", GOOD[:-1], GOOD + "\n", " " + GOOD, GOOD.replace("fht", "fhx"),
        GOOD.upper(), GOOD.replace("a", "g"), GOOD.replace("A", "é", 1), GOOD.replace("A", "٣", 1),
        GOOD.replace("0", "０", 1), GOOD.replace("_", "-"), GOOD.replace("A", "\x00", 1),
    ],
)  # fmt: skip
def test_another_form_is_no_credential(text: str) -> None:
    assert parse_credential(text) is None
    assert parse_credential(GOOD) is not None


@given(st.text(max_size=80))
def test_no_text_makes_the_parser_fail(text: str) -> None:
    presented = parse_credential(text)
    assert presented is None or f"{presented.kind}_{presented.id}_{presented.secret}" == text


@pytest.mark.row("D4")
def test_what_is_kept_depends_on_the_secret_and_holds_nothing_of_it() -> None:
    _, secret, _ = make_credential("fha")
    assert quick_hash(secret) == quick_hash(secret) != quick_hash(secret[:-1])
    assert secret.encode() not in quick_hash(secret)
    salted = slow_hash(secret, b"salt" * 4)
    assert salted == slow_hash(secret, b"salt" * 4)
    assert salted != slow_hash(secret, b"tlas" * 4)
    assert salted != slow_hash(secret[:-1], b"salt" * 4)


def test_what_was_right_is_kept_for_the_newest_few_only() -> None:
    right = CredentialCache()
    for number in range(MOST_RECENT + 3):
        right.add(f"credential {number}")
    assert not any(right.has(f"credential {number}") for number in range(3))
    assert right.has("credential 3")
    assert not right.has("credential")
    assert not right.has("\ud800")  # no text that could be kept
