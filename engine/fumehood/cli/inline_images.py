"""A figure on the terminal itself, where that can draw.

The bytes are a guest's. Invariant: nothing of theirs reaches the terminal but our own base64 of
them, between control sequences of ours, and only where they begin as a PNG of a bearable size.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TextIO

PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
"""*Source*: W3C PNG, 5.2 and 11.2.2: the signature, and the first chunk with its length."""

MAX_BYTES = 4 * 1024 * 1024
MAX_PIXELS = 25_000_000
"""A few bytes can unpack to gigabytes in the terminal's memory."""

CHUNK = 4096
"""*Source*: kitty's graphics protocol: characters of base64 in one sequence."""


def drawing_of(png: bytes, environ: Mapping[str, str]) -> str | None:
    """What draws an image on this terminal. None: it cannot, or the bytes are not for it."""
    if not _is_bearable_png(png):
        return None
    if environ.get("TMUX") or environ.get("TERM", "").startswith(("screen", "tmux")):
        return None  # they pass such sequences on to nobody
    if environ.get("KITTY_WINDOW_ID") or environ.get("TERM") == "xterm-kitty":
        return _for_kitty(png)
    if environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm"):
        return _for_iterm(png)
    return None


def draw(png: bytes, stream: TextIO, environ: Mapping[str, str]) -> None:
    """Draw an image, where there is a terminal that can."""
    drawing = drawing_of(png, environ) if stream.isatty() else None
    if drawing is not None:
        stream.write(drawing + "\n")
        stream.flush()


def _is_bearable_png(data: bytes) -> bool:
    if len(data) > MAX_BYTES or len(data) < len(PNG_START) + 8 or not data.startswith(PNG_START):
        return False
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    return 0 < width * height <= MAX_PIXELS


def _for_kitty(png: bytes) -> str:
    """*Source*: kitty's graphics protocol; a=T draws, f=100 is PNG, q=2 wants no reply."""
    text = base64.b64encode(png).decode("ascii")
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    drawn = []
    for number, chunk in enumerate(chunks):
        first = "a=T,f=100,q=2," if number == 0 else ""
        more = int(number < len(chunks) - 1)
        drawn.append(f"\x1b_G{first}m={more};{chunk}\x1b\\")
    return "".join(drawn)


def _for_iterm(png: bytes) -> str:
    """*Source*: iTerm2's inline images protocol, which WezTerm has, too."""
    text = base64.b64encode(png).decode("ascii")
    return f"\x1b]1337;File=inline=1;size={len(png)}:{text}\x07"
