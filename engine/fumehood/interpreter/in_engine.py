"""The part object of one engine for the interpreter, which provides the wall `interpreter`."""

from __future__ import annotations

from collections.abc import Mapping

from fumehood.config import Config
from fumehood.core.limits import WallLimits
from fumehood.engine_part import EnginePart
from fumehood.interpreter.settings import InterpreterSettings
from fumehood.interpreter.wall import InterpreterWall
from fumehood.sandbox.wall import Wall
from fumehood.sandbox.walls import OwnWalls, logged


class Interpreter(EnginePart):
    """Provides the wall `interpreter` to the engine."""

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        """Return a mapping from the name `interpreter` to the wall for expressions and restricted
        programs. `own` is not used, because this wall needs neither the engine's settings for walls
        nor its container wall.
        """
        limits = configured_limits(self.kernel.config)
        return {"interpreter": InterpreterWall(limits, on_event=logged(self.kernel.log))}


def configured_limits(config: Config) -> WallLimits:
    """Return the interpreter's configured limits for calls: the defaults and the maximums."""
    return (config.of("interpreter", InterpreterSettings) or InterpreterSettings()).limits
