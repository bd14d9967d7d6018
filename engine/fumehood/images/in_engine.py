"""Images as one engine uses them: the packages that may be added to them."""

from __future__ import annotations

from functools import partial

from fumehood.engine_part import EnginePart
from fumehood.images.packages import new_layers
from fumehood.images.settings import PackageSettings
from fumehood.sandbox.container.additions import NewImageMaker


class Images(EnginePart):
    """The images part of one engine."""

    def image_maker(self) -> NewImageMaker:
        """Return what creates the maker of layers of packages."""
        settings = self.kernel.config.of("packages", PackageSettings)
        assert settings is not None
        return partial(new_layers, settings)
