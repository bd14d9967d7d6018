"""Secrets of a request in an answer that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.redaction.secret_values import SecretValues

pytestmark = pytest.mark.row("E8", "T3")

SECRETS = ["abababac", 'quote"/slash', "abababacdef-longer"]
FORMS = [form for secret in SECRETS for form in SecretValues([secret])._forms]
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


@given(st.sampled_from(FORMS), st.text(alphabet="xyz ", max_size=5))
def test_streamed_secret_is_redacted_in_each_encoding(form: str, text: str) -> None:
    assert streamed([text, *form, text]) == (f"{text}[redacted]{text}", 1)
    assert streamed([text, form[:-1].rstrip("="), "~", text])[0].endswith(f"~{text}")


def test_text_without_a_secret_prefix_is_not_held_back() -> None:
    stream = SecretValues(SECRETS).stream()
    assert stream.feed("data: x\n\n") == "data: x\n\n"
    assert SecretValues().stream().feed("abc") == "abc"
