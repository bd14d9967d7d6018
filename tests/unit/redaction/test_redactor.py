"""Redaction of texts, values and streams."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fumehood.observe.log import flush, make_logger, redact_events
from fumehood.redaction.redactor import MAX_HELD, REDACTED, RedactionSettings, Redactor

PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow/+=\n" * 20 + "-----END RSA PRIVATE KEY-----"
# Made up, and in parts: none of them stands in this file as a whole.
KEYS = {
    "cloud": "AKIA" + "IOSFODNN7EXAMPLE",
    "code-host": "ghp_" + "a1B2" * 9,
    "code-host-fine": "github_pat_" + "a1B2_" * 6,
    "other-code-host": "glpat-" + "a1B2-" * 5,
    "chat": "xoxb-" + "1234567890-abc",
    "model-provider": "sk-" + "proj-a1B2c3D4e5F6g7H8i9",
    "payments": "sk_" + "live_a1B2c3D4e5F6g7H8i9",
    "maps": "AIza" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R",
    "web-token": "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + "dozjgNryP4J3jVmNHl0w",
    "private-key": PEM,
}
HARMLESS = (
    "AKIA is a word, AKIA1234 too",
    "ghp_short",
    "task-master-of-all-the-small-things",
    "-----BEGIN CERTIFICATE-----\nMIID\n-----END CERTIFICATE-----",
    "eyJ alone, and eyJabc.def",
    "C:\\task-master-of-all-the-small-things",
    "a 100% task-master-of-all-the-small-things, %task-master-of-all-the-small-things",
    "a commit: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
)


@pytest.mark.row("E8")
@pytest.mark.parametrize("name", KEYS)
def test_key_of_a_known_format_is_redacted_within_text(name: str) -> None:
    text, count = Redactor().text(f"before {KEYS[name]} after")
    assert (text, count) == (f"before {REDACTED} after", 1)


@pytest.mark.row("E8")
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(
    "before",
    ["\\n", "\\\\n", "\\u003d", "\\t", "\x1b[31m", "\x1b[01;31m", "%3D", "%3d", "%20", "%253D"],
)
def test_key_after_an_escape_sequence_is_redacted_in_any_chunks(name: str, before: str) -> None:
    text = f"a{before}{KEYS[name]} b"
    redactor = Redactor()
    whole, count = redactor.text(text)
    assert (whole.startswith("a"), whole.endswith(f"{REDACTED} b"), count) == (True, True, 1)
    for size in (1, 2, 3, 7):
        stream = redactor.stream()
        pieces = (text[at : at + size] for at in range(0, len(text), size))
        assert "".join(map(stream.feed, pieces)) + stream.finish() == whole


@pytest.mark.row("E8")
@pytest.mark.parametrize("text", HARMLESS)
def test_twin_similar_harmless_text_is_kept(text: str) -> None:
    assert Redactor().text(text) == (text, 0)


def test_learned_secret_and_operator_pattern_are_redacted() -> None:
    redactor = Redactor(RedactionSettings(patterns=(r"\b\d{3}-\d{2}-\d{4}\b",)))
    redactor.learn("correct horse (battery)")
    assert redactor.text("say correct horse (battery), 123-45-6789") == (
        f"say {REDACTED}, {REDACTED}",
        2,
    )


def test_redaction_covers_texts_and_keys_but_not_file_bytes() -> None:
    key = KEYS["cloud"]
    encoded = base64.b64encode(key.encode()).decode()
    value = {"a": [f"x {key}", 1, None, True], key: {"b": key}, "content_base64": encoded}
    changed, count = Redactor().value(value)
    assert count == 3
    assert changed == {
        "a": [f"x {REDACTED}", 1, None, True],
        REDACTED: {"b": REDACTED},
        "content_base64": encoded,
    }
    # A key that may be read as base64 is none the less a key.
    assert Redactor().value({"content_base64": key}) == ({"content_base64": REDACTED}, 1)


@pytest.mark.parametrize(
    "secret", ["plain-value", 'with "quotes"', "back\\slash", "zwölf Köpfe", "two\nlines"]
)
def test_quick_json_scan_never_misses_a_match(secret: str) -> None:
    redactor = Redactor()
    assert not redactor.may_match(b'{"value": 4, "text": "4"}')
    redactor.learn(secret)
    for encoded in (json.dumps({"a": f"x{secret}"}), json.dumps([secret], ensure_ascii=False)):
        assert redactor.may_match(encoded.encode())
    for key in KEYS.values():
        assert redactor.may_match(json.dumps({"a": f"\n{key}"}).encode())


@pytest.mark.parametrize("place", ["text", "name", "in a list", "beside half a character"])
def test_log_event_is_redacted_everywhere(place: str) -> None:
    secret = "plain-value"
    redactor = Redactor()
    redactor.learn(secret)
    event = {
        "text": {"event": "a", "path": f"/{secret}/"},
        "name": {"event": "a", secret: Path("b")},
        "in a list": {"event": "a", "where": [1.5, (secret,)]},
        "beside half a character": {"event": "a\udc80", "tool": secret},
    }[place]
    assert secret not in repr(redactor.event(event))
    harmless = {"event": "a", "where": [1.5, (None,)], "path": Path("b")}
    assert redactor.event(harmless) is harmless


def test_too_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        Redactor().learn("yes")


@pytest.mark.parametrize(
    ("pattern", "words"), [("(", "RE2"), ("a*", "empty"), ("(a)b", "group"), ("a" * 1001, "1000")]
)
def test_unusable_redaction_pattern_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RedactionSettings(patterns=(pattern,))


# -- Streams -------------------------------------------------------------------------------

SECRET = "open sesame now"
WORDS = st.sampled_from(
    [*KEYS.values(), *HARMLESS, SECRET, SECRET[:7], "open", " ", "\n", "\r", "é", "-----BEGIN ",
     "-----BEGIN RSA PRIVATE", "AK", "IA", "12345", "id 4711", "id ",
     "\\", "n", "\\u003d", "\x1b", "[0m", "%", "3D", "%3D", "%253d"]
)  # fmt: skip


def cut_up(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@pytest.mark.row("E8")
@pytest.mark.parametrize("patterns", [(), (r"id [0-9]{4}",)], ids=["common", "with a pattern"])
@given(
    words=st.lists(WORDS, max_size=12),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_streamed_redaction_equals_redaction_of_the_whole_text(
    patterns: Any, words: list[str], cuts: list[int]
) -> None:
    redactor = Redactor(RedactionSettings(patterns=patterns))
    redactor.learn(SECRET)
    text = "".join(words)
    stream = redactor.stream()
    pieces = [stream.feed(piece) for piece in cut_up(text, cuts)]
    assert ("".join(pieces) + stream.finish(), stream.count) == redactor.text(text)


def test_text_without_a_key_prefix_is_streamed_at_once() -> None:
    stream = Redactor().stream()
    for piece in ("working", ".", ".", ".", "done 5", "0 % ", "ask"[:1]):
        assert stream.feed(piece) == piece


def test_held_back_text_is_bounded() -> None:
    stream = Redactor().stream()
    word = "sk-" + "." * (MAX_HELD + 1)
    out = stream.feed(word)
    assert MAX_HELD // 2 <= len(out) <= MAX_HELD
    assert out + stream.finish() == word


def test_hostile_text_is_redacted_in_linear_time() -> None:
    redactor = Redactor()
    redactor.learn("aaaaaaaaab" * 100)
    for text in ("a" * 200_000, "eyJ-" * 50_000, "-----BEGIN " * 20_000, " a" * 100_000):
        stream = redactor.stream()
        out = "".join(stream.feed(text[at : at + 4096]) for at in range(0, len(text), 4096))
        assert len(out) + len(stream.finish()) == len(text)


@pytest.mark.row("E8")
@pytest.mark.parametrize(
    "make", [lambda key: {"token": key}, lambda key: [key], lambda key: f"key {key}"]
)
def test_non_base64_file_content_is_redacted(make: Any) -> None:
    value, count = Redactor().value({"content_base64": make(KEYS["code-host"])})
    assert (value, count) == ({"content_base64": make(REDACTED)}, 1)


def test_redacted_keys_stay_distinct() -> None:
    value = {KEYS["cloud"]: 1, KEYS["code-host"]: 2, REDACTED: 3}
    changed, count = Redactor().value(value)
    assert (list(changed.values()), count) == ([1, 2, 3], 2)
    assert all(name.startswith(REDACTED) for name in changed)


@pytest.mark.row("E8")
def test_number_matching_a_secret_or_pattern_is_redacted() -> None:
    redactor = Redactor(RedactionSettings(patterns=(r"\b4\d{15}\b",)))
    value = {"card": 4111111111111111, "count": 4, "rate": 0.5, "ok": True, "none": None}
    assert redactor.value(value) == ({**value, "card": REDACTED}, 1)
    redactor = Redactor()
    redactor.learn("12345678")
    assert redactor.may_match(b"[12345678,1]")
    assert redactor.value([12345678, 1]) == ([REDACTED, 1], 1)


# -- The log -------------------------------------------------------------------------------


@pytest.mark.row("E8")
@pytest.mark.parametrize("style", ["json", "text"])
def test_log_line_is_redacted(tmp_path: Path, style: str) -> None:
    with (tmp_path / "log").open("w") as stream:
        log = make_logger(style=style, stream=stream)
        log.info("before", key=KEYS["cloud"])
        flush(log)
        redact_events(log, Redactor().event)
        log.info("after", key=KEYS["cloud"], text=f"a\n{KEYS['chat']}")
        flush(log)
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert KEYS["cloud"] in first  # the control: there was nothing to redact it yet
    assert all(key not in line for line in rest for key in KEYS.values())
    assert rest[0].count(REDACTED) == 2


@pytest.mark.parametrize("style", ["json", "text"])
def test_failing_log_event_does_not_stop_the_log(tmp_path: Path, style: str) -> None:
    def refuse(event: Any) -> Any:
        if event["event"] == "bad":
            raise ValueError("no such event")
        return event

    with (tmp_path / "log").open("w") as stream:
        log = make_logger(style=style, stream=stream)
        redact_events(log, refuse)
        log.info("bad")
        log.info("good")
        flush(log)
    text = (tmp_path / "log").read_text()
    assert "log.event_lost" in text
    assert "good" in text


def test_attack_what_is_held_back_does_not_tell_the_beginning_of_a_secret() -> None:
    """Twin: a line is passed on at its end."""
    redactor = Redactor()
    redactor.learn("quite-secret-value")
    lengths = set[int]()
    for word in ("quite-secret", "quite-sXcret", "other-things"):
        assert redactor.stream().feed(f"a line\n{word}\n") == f"a line\n{word}\n"
        lengths.add(len(redactor.stream().feed(f"a text that is longer than it: {word}")))
    assert len(lengths) == 1
