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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fumehood.protocol.framing import MAX_REPORT_CHARACTERS

DIRECTORY = "/tmp/.fumehood-figures"  # noqa: S108  # the container's own
CONFIGURATION = "MPLCONFIGDIR"
FONTS = "/opt/fumehood/matplotlib"
MAX_FIGURES = 20
"""Maximum number of figures that are saved for one run."""

BYTES_PER_PIXEL = 24
"""Upper estimate of the memory for drawing and compressing one pixel, images included."""

MARGIN_INCHES = 0.1
"""*Source*: Matplotlib's default of `savefig.pad_inches`."""

MAX_NOTES = 5


class Figures:
    """Saves the figures of one run, numbered in the order in which they are taken."""

    def __init__(self, memory_bytes: int) -> None:
        self.notes: list[str] = []
        """Reasons why figures were left out."""
        self._taken = 0
        self._max_pixels = memory_bytes // 3 // BYTES_PER_PIXEL

    def take(self) -> None:
        """Save and close all open figures. Raises only MemoryError."""
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        if helpers is None or not helpers.Gcf.figs:
            return
        for manager in list(helpers.Gcf.get_all_fig_managers()):
            try:
                self._take_one(manager.canvas.figure, manager.num)
            except MemoryError:
                raise
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
        os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
        path = f"{DIRECTORY}/figure-{self._taken + 1}.png"
        with _warnings_without_place():
            figure.savefig(path, format="png", dpi=figure.dpi, bbox_inches=self._box(figure))
        self._taken += 1

    def _box(self, figure: Any) -> Any:
        """Return the bounding box of everything drawn, including labels outside the figure's area.

        Return None, which means the figure's area, if a picture of the box would be too large.
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
def _warnings_without_place() -> Iterator[None]:
    """Print each warning about a figure once, without a file and line, which would refer to this
    module.
    """
    shown = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **more: object) -> None:
        if (line := f"{category.__name__}: {message}") not in shown:
            shown.add(line)
            print(line, file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def preload() -> None:
    """Load pyplot in the zygote with the image's list of fonts."""
    if not os.path.isdir(FONTS):
        return
    with _fonts_of_image(), fallback_found_late():
        importlib.import_module("matplotlib.pyplot")


FALLBACK = ("DejaVu Sans", "WenQuanYi Micro Hei", "Lohit Devanagari")
"""Fonts of the images for characters that a text's own font lacks: Arabic and symbols; Chinese,
Japanese and Korean; Devanagari.
"""


@contextmanager
def fallback_found_late() -> Iterator[None]:
    """Wrap the loading of Matplotlib's font manager, so that texts in every font fall back to
    `FALLBACK`. Matplotlib's settings cannot be used for this, because styles and seaborn's themes
    replace `font.family`.
    """
    yield
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
    """Wrap a program's own import of Matplotlib, so that it finds the image's fonts."""
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
    """Make Matplotlib use `FONTS` as its configuration directory within this context. `FONTS` is
    reported as writable, so that Matplotlib does not create another directory. Nothing is written
    there.
    """
    access, chosen = os.access, os.environ.get(CONFIGURATION)
    os.access = lambda path, *rest, **more: str(path) == FONTS or access(path, *rest, **more)
    os.environ[CONFIGURATION] = FONTS
    try:
        yield
    finally:
        os.access = access
        os.environ.pop(CONFIGURATION)
        if chosen is not None:
            os.environ[CONFIGURATION] = chosen


def catch_show(figures: Callable[[], Figures]) -> None:
    """Make `pyplot.show()` save and close all open figures, as in a notebook."""
    late_modules().around["matplotlib.pyplot"] = lambda: _show_caught(figures)
    _catch_show(figures)


@contextmanager
def _show_caught(figures: Callable[[], Figures]) -> Iterator[None]:
    yield
    _catch_show(figures)


def _catch_show(figures: Callable[[], Figures]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return

    def show(*args: object, **kwargs: object) -> None:
        """Add all open figures to the answer of this call."""
        figures().take()

    pyplot.show = show  # type: ignore[attr-defined]


Around = Callable[[], AbstractContextManager[object]]


def late_modules() -> LateModules:
    """Return this process's `LateModules`, which is installed at the first call."""
    for finder in sys.meta_path:
        if isinstance(finder, LateModules):
            return finder
    sys.meta_path.insert(0, made := LateModules())
    return made


class LateModules:
    """An import finder that wraps the loading of modules. `around` is name → context manager."""

    def __init__(self) -> None:
        self.around: dict[str, Around] = {}

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `around`, with its loader wrapped, or None for others."""
        around = self.around.get(name)
        spec = PathFinder.find_spec(name, path, target) if around is not None else None  # type: ignore[arg-type]
        if around is None or spec is None or spec.loader is None:
            return None
        loader, load = spec.loader, spec.loader.exec_module

        def load_within(module: ModuleType) -> None:
            del loader.exec_module  # only once: this restores the method of the loader's class
            with around():
                load(module)

        loader.exec_module = load_within  # type: ignore[method-assign]
        return spec
