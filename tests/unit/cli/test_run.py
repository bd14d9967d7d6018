"""Output and figures of `fumehood run`; figures are drawn only by terminals that can."""

from __future__ import annotations

import base64
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fumehood.cli.run import MAX_DRAWN_BYTES, PNG_START, draw, drawing_of, show_program
from fumehood.cli.show import in_options
from support.answers import envelope_bytes

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00"


def figure(name: str = "figure-1.png", content: bytes = PNG) -> dict[str, Any]:
    return {
        "filename": name, "size": len(content), "content_type": "image/png",
        "content_base64": base64.b64encode(content).decode(),
    }  # fmt: skip


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def show(data: dict[str, Any], *, with_files: bool = True) -> str:
        answer = json.loads(envelope_bytes(data))
        show_program(answer, download, with_files=with_files, with_output=True)
        return capfd.readouterr().err

    def download(url: str, write: Any) -> None:
        write(url.encode())

    return show


def test_figures_are_saved_to_a_new_directory_that_is_named(shown: Any, tmp_path: Path) -> None:
    large = {"filename": "figure-2.png", "size": 5, "url": "/v1/blobs/x"}
    lines = shown({"images": [figure(), large], "files": [figure("a.png")]}).splitlines()
    assert lines[0] == f"files: a.png ({len(PNG)} bytes). To save them: --save DIR"
    found = [Path(line.removeprefix("figure: ")) for line in lines[1:]]
    assert [path.name for path in found] == ["figure-1.png", "figure-2.png"]
    assert [path.read_bytes() for path in found] == [PNG, b"/v1/blobs/x"]
    assert found[0].parent.parent == tmp_path
    assert found[0].parent.name.startswith("fumehood-")
    assert found[0].parent.stat().st_mode & 0o077 == 0
    assert {path.name for path in found[0].parent.iterdir()} == {"figure-1.png", "figure-2.png"}


def test_no_temporary_directory_is_made_without_figures_or_with_save(
    shown: Any, tmp_path: Path
) -> None:
    shown({"files": [figure("a.png")]})
    shown({"images": [figure()]}, with_files=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../out.png", "/etc/x.png", "a\x1b[2J.png"])
def test_figure_with_an_unsafe_name_is_not_saved(name: str, shown: Any, tmp_path: Path) -> None:
    assert "was not saved" in shown({"images": [figure(name)]})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Try this: work on smaller parts, or allow more (memory_limit_mb).",
         "Try this: work on smaller parts, or allow more (--memory)."),
        ("processes: … allow more memory (memory_limit_mb)", "processes: … allow more memory (--memory)"),
        ("allow more (timeout_seconds).", "allow more (--timeout)."),
        ("allow more with timeout_seconds.", "allow more with --timeout."),
        ("memory_limit_mb must be at least 16 here.", "--memory must be at least 16 here."),
        ("memory_limit_mb: 900 was asked for, 512 is", "--memory: 900 was asked for, 512 is"),
        ("NameError: name 'memory_limit_mb' is not defined", "NameError: name 'memory_limit_mb' is not defined"),
    ],
)  # fmt: skip
def test_advice_in_messages_names_command_line_options(message: str, says: str) -> None:
    assert in_options(message) == says


def png(width: int = 640, height: int = 480, more: bytes = b"\x08\x02\x00\x00\x00") -> bytes:
    return PNG_START + width.to_bytes(4, "big") + height.to_bytes(4, "big") + more


KITTY = [
    {"KITTY_WINDOW_ID": "1", "TERM": "xterm-256color"}, {"TERM": "xterm-kitty"},
    {"TERM": "xterm-ghostty"},
]  # fmt: skip
ITERM = [{"TERM_PROGRAM": "iTerm.app"}, {"TERM_PROGRAM": "WezTerm", "TERM": "xterm-256color"}]


@pytest.mark.parametrize("environ", KITTY, ids=str)
def test_figure_for_kitty_is_sent_in_chunks_without_a_reply(environ: dict[str, str]) -> None:
    image = png(more=b"x" * 10_000)
    drawing = drawing_of(image, environ)
    chunks = re.findall(r"\x1b_G([^;]*);([A-Za-z0-9+/=]*)\x1b\\", drawing)
    assert [control for control, _ in chunks] == ["a=T,f=100,q=2,m=1", "m=1", "m=1", "m=0"]
    assert max(len(text) for _, text in chunks) == 4096
    assert base64.b64decode("".join(text for _, text in chunks)) == image
    assert sum(len(control) + len(text) + 6 for control, text in chunks) == len(drawing)


@pytest.mark.parametrize("environ", ITERM, ids=str)
def test_figure_for_iterm_is_one_sequence_of_base64(environ: dict[str, str]) -> None:
    image = png()
    text = base64.b64encode(image).decode()
    assert drawing_of(image, environ) == f"\x1b]1337;File=inline=1;size={len(image)}:{text}\x07"


@pytest.mark.parametrize(
    "environ",
    [{}, {"TERM": "xterm"}, {"TERM": "dumb"}, {**KITTY[0], "TMUX": "/tmp/x"},
     {**ITERM[0], "TERM": "screen-256color"}],
    ids=str,
)  # fmt: skip
def test_figure_is_not_sent_to_other_terminals(environ: dict[str, str]) -> None:
    assert drawing_of(png(), environ) is None


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self._is_one = is_one

    def isatty(self) -> bool:
        return self._is_one


@pytest.mark.parametrize(("stderr", "stdout"), [(True, True), (True, False), (False, True)])
def test_figure_is_drawn_only_if_both_output_streams_are_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stderr: bool, stdout: bool
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal(is_one=stdout))
    stream = Terminal(is_one=stderr)
    draw(png(), stream, KITTY[1])
    assert stream.getvalue().startswith("\x1b_G") == (stderr and stdout)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x1b]0;owned\x07", b"GIF89a" + png(), PNG_START, png()[1:], png(0, 5),
        png(100_000, 100_000), png(more=b"x" * MAX_DRAWN_BYTES), PNG_START[:-4] + b"IDAT" + png()[16:],
    ],
    ids=lambda data: str(data[:20]),
)  # fmt: skip
@pytest.mark.parametrize("environ", [*KITTY, *ITERM], ids=str)
def test_file_that_is_not_a_png_of_acceptable_size_is_not_drawn(
    data: bytes, environ: dict[str, str]
) -> None:
    assert drawing_of(data, environ) is None
