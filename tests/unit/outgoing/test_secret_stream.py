"""Secrets of a request in an answer that comes in pieces."""

from __future__ import annotations

import base64
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.outgoing.secret_values import SecretValues

pytestmark = pytest.mark.row("E8", "T3")

SECRETS = ["abababac", 'quote"/slash', "abababacdef-longer"]
FORMS = [form.text for secret in SECRETS for form in SecretValues([secret])._forms]
WHOLE = [
    form.text for secret in SECRETS for form in SecretValues([secret])._forms
    if not form.shares_first and not form.shares_last
]  # fmt: skip
PIECES = st.lists(
    st.sampled_from(FORMS)
    | st.sampled_from([form[:end] for form in FORMS for end in (1, len(form) // 2, len(form) - 1)])
    | st.text(alphabet='ab\\"/%[]', max_size=4),
    max_size=12,
)


def streamed(pieces: list[str]) -> tuple[str, int]:
    values = SecretValues(SECRETS)
    stream = values.stream()
    text = "".join(map(stream.feed, pieces)) + stream.finish()
    return text, values.count


@given(PIECES, st.data())
def test_redaction_is_independent_of_chunk_boundaries(
    pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    split = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(split) == streamed([text]) == streamed(list(text))


@given(st.sampled_from(WHOLE), st.text(alphabet="xyz ", max_size=5))
def test_streamed_secret_is_redacted_in_each_encoding(form: str, text: str) -> None:
    assert streamed([text, *form, text]) == (f"{text}[redacted]{text}", 1)
    assert streamed([text, form[:-1].rstrip("="), "~", text])[0].endswith(f"~{text}")


@given(
    st.binary(max_size=7), st.sampled_from(SECRETS), st.binary(max_size=7), st.booleans(),
    st.lists(st.integers(0, 60), max_size=3),
)  # fmt: skip
def test_secret_within_longer_base64_is_redacted_to_its_last_bit(
    before: bytes, secret: str, after: bytes, is_for_urls: bool, cuts: list[int]
) -> None:
    """As in credentials of the scheme Basic. Twin: what is around it is kept."""
    pack = base64.urlsafe_b64encode if is_for_urls else base64.b64encode
    packed = pack(before + secret.encode() + after).decode()
    borders = sorted({0, len(packed), *(min(cut, len(packed)) for cut in cuts)})
    told, count = streamed([packed[a:b] for a, b in itertools.pairwise(borders)])
    head, tail = told.split("[redacted]")
    assert count == 1
    assert packed.startswith(head)
    assert packed.endswith(tail)
    assert len(before) * 8 // 6 - len(head) in (0, 1)
    assert len(head) * 6 <= len(before) * 8  # no bit of the secret is before it
    assert len(tail.rstrip("=")) * 6 <= len(after) * 8 + 5
    assert len(packed) - len(tail) >= (len(before) + len(secret)) * 8 / 6


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("a" * 4095 + "b", "a" * 400_000),
        ("a" * 4096, "a" * 400_000),
        ("secret" * 600, "secret" * 70_000),
        ("/" * 4096, "%2F" * 130_000),
        ("s3cret-of-the-api/1", "s3cret-of-the-api/" * 20_000),
        ("s3cret-of-the-api/1", "s3cret-of-the-api/1" * 20_000),
    ],
    ids=["almost", "all", "periods", "escaped", "beginnings", "secrets"],
)
@pytest.mark.parametrize("length", [65_536, 300])
def test_attack_no_text_takes_longer_than_its_length(secret: str, text: str, length: int) -> None:
    """In processor time, of the whole text, and of its pieces. It took minutes."""
    values, began = SecretValues([secret]), time.thread_time()
    stream = values.stream()
    told = "".join(stream.feed(text[at : at + length]) for at in range(0, len(text), length))
    told += stream.finish()
    took_s = time.thread_time() - began
    assert told == SecretValues([secret]).text(text)
    assert secret not in told
    assert took_s < 5


def test_text_without_a_secret_prefix_is_not_held_back() -> None:
    stream = SecretValues(SECRETS).stream()
    assert stream.feed("data: x\n\n") == "data: x\n\n"
    assert SecretValues().stream().feed("abc") == "abc"


@given(st.sampled_from(FORMS), st.text(alphabet="xyz/%", min_size=1, max_size=60), st.data())
def test_attack_what_is_held_back_does_not_tell_the_beginning_of_a_secret(
    form: str, other: str, data: st.DataObject
) -> None:
    """Who writes a text and sees its pieces would otherwise guess a secret by its characters."""
    begun = data.draw(st.integers(1, len(form) - 1))
    length = len(SecretValues(SECRETS).stream().feed(f"{other}~{'~' * begun}"))
    assert len(SecretValues(SECRETS).stream().feed(f"{other}~{form[:begun]}")) == length


def test_header_name_with_a_secret_is_found_in_any_case() -> None:
    values = SecretValues(["s3cret-Of-the-api"])
    assert values.finds_in_name("X-S3cret-of-The-Api")
    assert not values.finds_in_name("X-S3cret-of-The")
    assert not SecretValues().finds_in_name("x")
