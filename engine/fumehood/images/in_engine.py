"""Images as a part of one engine: adds packages to images if callers ask for them."""

from __future__ import annotations

from functools import partial

from fumehood.engine_part import EnginePart
from fumehood.images.packages import new_layers
from fumehood.images.settings import PackageSettings
from fumehood.sandbox.container.additions import NewImageMaker


class Images(EnginePart):
    """Gives container walls what adds packages to their images."""

    def image_maker(self) -> NewImageMaker:
        """Return the function that creates the maker of package layers for a container wall."""
        settings = self.kernel.config.of("packages", PackageSettings)
        assert settings is not None
        return partial(new_layers, settings)
