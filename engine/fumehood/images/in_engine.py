"""Images as a part of one engine: adds packages to images if callers ask for them."""

from __future__ import annotations

from functools import partial

from fumehood.engine_part import EnginePart
from fumehood.images.packages import new_layers
from fumehood.images.settings import PackageSettings
from fumehood.sandbox.container.additions import NewImageMaker


class Images(EnginePart):
    """The part that lets an engine add Python packages to the images of container walls."""

    def image_maker(self) -> NewImageMaker:
        """Return a function that creates a container wall's `ImageMaker`, which adds layers of
        packages to images.
        """
        settings = self.kernel.config.of("packages", PackageSettings)
        assert settings is not None
        return partial(new_layers, settings)
