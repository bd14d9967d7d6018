"""A figure on the terminal: only where that can draw, and only what is a picture."""

from __future__ import annotations

import base64
import re

import pytest

from fumehood.cli.inline_images import MAX_BYTES, PNG_START, drawing_of


def png(width: int = 640, height: int = 480, more: bytes = b"\x08\x02\x00\x00\x00") -> bytes:
    return PNG_START + width.to_bytes(4, "big") + height.to_bytes(4, "big") + more


KITTY = [{"KITTY_WINDOW_ID": "1", "TERM": "xterm-256color"}, {"TERM": "xterm-kitty"}]
ITERM = [{"TERM_PROGRAM": "iTerm.app"}, {"TERM_PROGRAM": "WezTerm", "TERM": "xterm-256color"}]


@pytest.mark.parametrize("environ", KITTY, ids=str)
def test_kitty_gets_chunks_of_base64_and_is_asked_for_no_reply(environ: dict[str, str]) -> None:
    image = png(more=b"x" * 10_000)
    drawing = drawing_of(image, environ)
    assert drawing is not None
    chunks = re.findall(r"\x1b_G([^;]*);([A-Za-z0-9+/=]*)\x1b\\", drawing)
    assert [control for control, _ in chunks] == ["a=T,f=100,q=2,m=1", "m=1", "m=1", "m=0"]
    assert max(len(text) for _, text in chunks) == 4096
    assert base64.b64decode("".join(text for _, text in chunks)) == image
    assert sum(len(control) + len(text) + 6 for control, text in chunks) == len(drawing)


@pytest.mark.parametrize("environ", ITERM, ids=str)
def test_iterm_gets_one_sequence_of_base64(environ: dict[str, str]) -> None:
    image = png()
    text = base64.b64encode(image).decode()
    assert drawing_of(image, environ) == f"\x1b]1337;File=inline=1;size={len(image)}:{text}\x07"


@pytest.mark.parametrize(
    "environ",
    [{}, {"TERM": "xterm"}, {"TERM": "dumb"}, {**KITTY[0], "TMUX": "/tmp/x"},
     {**ITERM[0], "TERM": "screen-256color"}],
    ids=str,
)  # fmt: skip
def test_other_terminals_get_nothing(environ: dict[str, str]) -> None:
    assert drawing_of(png(), environ) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x1b]0;owned\x07", b"GIF89a" + png(), PNG_START, png()[1:], png(0, 5),
        png(100_000, 100_000), png(more=b"x" * MAX_BYTES), PNG_START[:-4] + b"IDAT" + png()[16:],
    ],
    ids=lambda data: str(data[:20]),
)  # fmt: skip
@pytest.mark.parametrize("environ", [*KITTY, *ITERM], ids=str)
def test_what_is_no_picture_of_a_bearable_size_is_not_drawn(
    data: bytes, environ: dict[str, str]
) -> None:
    assert drawing_of(data, environ) is None
