"""Texts that are cut before the engine redacts them hold no part of a key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fumehood.executors.endings import MAX_MESSAGE_CHARACTERS, sentence
from fumehood.executors.inside import _text
from fumehood.guest.interpreter import calculator, restricted
from fumehood.guest.languages import python
from fumehood.protocol.framing import MAX_KEY_CHARACTERS, before_word, whole_words
from fumehood.redaction.redactor import REDACTED, Redactor

SECRET = "qx7.Zr-41_kkPw=9/aaB"
KEYS = {
    "common form": "ghp_" + "a1B2c3D4e5F6" * 3,
    "token": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIx" * 40 + ".SflKxwRJSMeK",
    "known": SECRET,
    "private key": "-----BEGIN RSA PRIVATE KEY-----\n"
    + "MIIEpAIBAAKCAQEA7bq1+/3xY9ZkQw0u8Jd2sT\n" * 12
    + "-----END RSA PRIVATE KEY-----",
}
CUTS: dict[str, tuple[int, Callable[[str], str]]] = {
    "beginning": (200, lambda text: whole_words(text, 200)),
    "both ends": (300, lambda text: python.shortened(text, 300)),
    "sentence": (MAX_MESSAGE_CHARACTERS, sentence),
    "function's words": (2000, _text),
    "calculator": (200, lambda text: calculator._failure_message(ValueError(text))),
    "restricted program": (
        restricted.MAX_TEXT_CHARACTERS, lambda text: restricted._message(ValueError(text)),
    ),
    "restricted value": (restricted.MAX_REPR_CHARACTERS, lambda text: restricted.short_repr([text])),
}  # fmt: skip
PART = 7
"""Characters of a key that could be of any word."""


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize(("most", "cut"), CUTS.values(), ids=CUTS)
def test_attack_key_at_any_place_of_a_text_that_is_cut_leaves_no_part(
    most: int, cut: Callable[[str], str], key: str
) -> None:
    redactor = Redactor()
    redactor.learn(SECRET)
    parts = {key[at : at + PART] for at in range(12, len(key) - PART)} - set(
        _parts("-----BEGIN RSA PRIVATE KEY----- -----END RSA PRIVATE KEY-----")
    )
    was_cut = was_whole = 0
    for before in (
        *range(max(0, most // 2 - len(key) - 30), most // 2 + 60),
        *range(most - len(key) - 30, most + 60),
    ):
        if before < 0:
            continue
        text = "a b " * (before // 4) + "." * (before % 4) + " " + key + " c d" * (most // 4)
        shown = redactor.line(cut(text))
        assert not [part for part in parts if part in shown], (before, shown)
        was_whole += REDACTED in shown
        was_cut += REDACTED not in shown
    assert was_cut
    assert was_whole or len(key) > most // 2


def _parts(text: str) -> list[str]:
    return [text[at : at + PART] for at in range(len(text) - PART + 1)]


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("a short text", 12, "a short text"),
        ("a short text", 11, "a short …"),
        ("a short text", 9, "a short …"),
        ("a short text", 8, "a short…"),
        ("a short text", 7, "a …"),
        ("unbroken", 7, "…"),
        ("b" * 9000, 5000, "b" * (4999 - MAX_KEY_CHARACTERS) + "…"),
        ("用户名或密码不正确", 5, "用户名或…"),
    ],
)
def test_harmless_text_is_cut_between_words(text: str, most: int, shown: str) -> None:
    assert whole_words(text, most) == shown


def test_value_without_white_space_shows_its_ends() -> None:
    shown = python.represent("b" * 50_000)
    assert shown.startswith("'bbb")
    assert shown.endswith("bbb'")
    assert 800 < shown.count("b") / 2 < 1000


def test_attack_private_key_in_one_line_leaves_no_part_in_a_value() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----" + "\\nMIIEpAIBAAKCAQEA7bq1+/3xY9ZkQw0u8Jd2sT" * 80
    redactor = Redactor()
    for before in range(0, 6000, 97):
        shown = redactor.line(python.shortened(f"{'.' * before} {key} {'.' * 9000}", 10_000))
        assert "AKCAQEA7bq1" not in shown, before


@pytest.mark.parametrize(
    ("text", "kept"), [("ab, " * 3, "ab, ab, ab, "), ("a b", "a "), ("b" * 5000, "b" * 904)]
)
def test_text_that_was_cut_elsewhere_loses_its_last_word_or_a_keys_length(
    text: str, kept: str
) -> None:
    assert before_word(text) == kept
