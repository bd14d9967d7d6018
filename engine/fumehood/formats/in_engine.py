"""The part object of one engine for the formats, and the state that it keeps."""

from __future__ import annotations

import anyio

from fumehood.engine_part import EnginePart, Kernel
from fumehood.formats.exports import Exports


class Formats(EnginePart):
    """The formats' part in one engine. It keeps the cached exports (`exports`), and limits how many
    threads may repair JSON at the same time (`repairs`).
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.exports = Exports()
        self.repairs = anyio.CapacityLimiter(1)
