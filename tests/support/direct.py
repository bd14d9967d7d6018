"""Images for direct sandboxes."""

from __future__ import annotations

from functools import cache

from fumehood.direct.store import open_store
from fumehood.images.build import build_image
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import read_recipe


@cache
def ready_direct_image(name: str) -> Image:
    """An image of ours as this engine builds it without Docker; built now where it is not there."""
    return build_image(open_store(), read_recipe(name), print).image
