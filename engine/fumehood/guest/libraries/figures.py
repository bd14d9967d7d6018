"""Figures: pyplot figures of a program become PNG files automatically.

Guest side, in the child; does nothing if Matplotlib was not loaded. The files are saved in a
separate directory, from which the housekeeper collects them. The size of a figure is estimated
before it is drawn; a figure that is too large is left out with a reason. A figure is cropped to its
contents unless these extend so far that the picture would be too large.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fumehood.guest.languages.libraries import MAX_NOTES, PICTURES, late_modules
from fumehood.protocol.framing import MAX_REPORT_CHARACTERS

CONFIGURATION = "MPLCONFIGDIR"
FONTS = "/opt/fumehood/matplotlib"
MAX_FIGURES = 20
"""Maximum number of figures that are saved for one run."""

BYTES_PER_PIXEL = 24
"""Upper estimate of the memory for drawing and compressing one pixel, images included."""

MARGIN_INCHES = 0.1
"""*Source*: Matplotlib's default of `savefig.pad_inches`."""


class Results:
    """Saves the pyplot figures of programs as files. If a program calls `pyplot.show()`, all open
    figures are saved and closed. Within a run, the figures are numbered in the order in which they
    are saved.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.notes: list[str] = []
        """Reasons why figures were left out."""
        self._taken = 0
        self._max_pixels = memory_bytes // 3 // BYTES_PER_PIXEL
        late_modules().around["matplotlib.pyplot"] = self._show_caught
        self._catch_show()

    def begin(self) -> None:
        """Forget the figures of the last run."""
        self.notes, self._taken = [], 0

    def take(self) -> None:
        """Save and close all open figures. Raises only MemoryError."""
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        if helpers is None or not helpers.Gcf.figs:
            return
        for manager in list(helpers.Gcf.get_all_fig_managers()):
            try:
                self._take_one(manager.canvas.figure, manager.num)
            except MemoryError:
                raise MemoryError("MemoryError in a figure") from None
            except BaseException as fault:  # drawing can run the program's code
                self._leave_out(manager.num, f"could not be drawn: {type(fault).__name__}: {fault}")
        helpers.Gcf.destroy_all()

    def _take_one(self, figure: Any, number: object) -> None:
        if self._taken >= MAX_FIGURES:
            self._leave_out(number, f"is one more than the {MAX_FIGURES} that are returned")
            return
        width, height = (round(inches * figure.dpi) for inches in figure.get_size_inches())
        if not self._fits(width, height):
            self._leave_out(
                number,
                f"has {width} x {height} pixels, more than the {self._max_pixels / 1e6:.0f} "
                "million that a picture may have: make it smaller (figsize, dpi)",
            )
            return
        os.makedirs(PICTURES, mode=0o700, exist_ok=True)
        path = f"{PICTURES}/figure-{self._taken + 1}.png"
        with _warnings_without_place():
            figure.savefig(path, format="png", dpi=figure.dpi, bbox_inches=self._box(figure))
        self._taken += 1

    def _box(self, figure: Any) -> Any:
        """Return the box that contains everything drawn, including labels outside the figure's own
        area. Return None if a picture of this box would be too large. The picture then shows only
        the figure's own area.
        """
        figure.draw_without_rendering()  # this places the texts
        box = figure.get_tightbbox().padded(MARGIN_INCHES)
        return box if self._fits(box.width * figure.dpi, box.height * figure.dpi) else None

    def _fits(self, width: float, height: float) -> bool:
        return width * height <= self._max_pixels

    def _leave_out(self, number: object, why: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(f"images: pyplot's figure {number} {why}"[:MAX_REPORT_CHARACTERS])

    @contextmanager
    def _show_caught(self) -> Iterator[None]:
        yield
        self._catch_show()

    def _catch_show(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return

        def show(*args: object, **kwargs: object) -> None:
            """Save and close all open figures. They become images in the answer to the call."""
            self.take()

        pyplot.show = show  # type: ignore[attr-defined]


@contextmanager
def _warnings_without_place() -> Iterator[None]:
    """Inside the `with` block, print each warning only once, without its file and line."""
    shown = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **more: object) -> None:
        if (line := f"{category.__name__}: {message}") not in shown:
            shown.add(line)
            print(line, file=sys.stderr)

    with warnings.catch_warnings():
        # The file and line would be those of this module, not of the program.
        warnings.showwarning = show
        yield


def preload(modules: Sequence[str]) -> None:
    """Load pyplot in the zygote with the image's list of fonts, if Matplotlib is preloaded."""
    if not os.path.isdir(FONTS) or not any(m.partition(".")[0] == "matplotlib" for m in modules):
        return
    with _fonts_of_image(), fallback_found_late():
        importlib.import_module("matplotlib.pyplot")


FALLBACK = ("DejaVu Sans", "WenQuanYi Micro Hei", "Lohit Devanagari")
"""Fonts of the images for characters that a text's own font lacks: Arabic and symbols; Chinese,
Japanese and Korean; Devanagari.
"""


@contextmanager
def fallback_found_late() -> Iterator[None]:
    """Make Matplotlib use the fonts in `FALLBACK` for characters that a text's own font lacks. The
    block must load Matplotlib's font manager, which is changed when the block is left.
    """
    yield
    # A setting cannot do this, because styles and seaborn's themes replace `font.family`.
    fonts: Any = sys.modules["matplotlib.font_manager"]
    find = fonts.FontManager._find_fonts_by_props
    known = {one.name for one in fonts.fontManager.ttflist}
    there = [name for name in FALLBACK if name in known]

    def find_with_fallback(
        self: Any, prop: Any, fontext: str = "ttf", *rest: Any, **more: Any
    ) -> Any:
        found = find(self, prop, fontext, *rest, **more)
        if fontext == "ttf":
            others = [self.findfont(fonts.FontProperties(family=name)) for name in there]
            found += [path for path in others if path not in found]
        return found

    fonts.FontManager._find_fonts_by_props = find_with_fallback


@contextmanager
def fonts_found_late() -> Iterator[None]:
    """Make Matplotlib find the image's fonts if a program itself imports it. The block must load
    Matplotlib. If the image has no fonts, nothing is changed.
    """
    if not os.path.isdir(FONTS):
        yield
        return
    with _fonts_of_image():
        yield
        matplotlib = sys.modules["matplotlib"]
        matplotlib.get_configdir()  # Matplotlib remembers this and the next result
        matplotlib.get_cachedir()


@contextmanager
def _fonts_of_image() -> Iterator[None]:
    """Inside the `with` block, make Matplotlib use `FONTS` as its configuration directory."""
    access, chosen = os.access, os.environ.get(CONFIGURATION)
    # If the directory were not writable, Matplotlib would create another. Nothing is written there.
    os.access = lambda path, *rest, **more: str(path) == FONTS or access(path, *rest, **more)
    os.environ[CONFIGURATION] = FONTS
    try:
        yield
    finally:
        os.access = access
        os.environ.pop(CONFIGURATION)
        if chosen is not None:
            os.environ[CONFIGURATION] = chosen


AROUND = {"matplotlib": fonts_found_late, "matplotlib.font_manager": fallback_found_late}
"""Name of a module → what surrounds a program's own import of the module."""
