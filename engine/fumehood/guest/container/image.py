"""What an image says of itself: which modules to load ahead, and where they lie.

Guest side, read by the zygote before anything untrusted exists. The file is root's and was written
when the image was built; an image without one has nothing to add.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

PATH = "/opt/fumehood/image.json"


@dataclass(frozen=True, slots=True)
class Image:
    """What the zygote does for this image."""

    preload: tuple[str, ...] = ()
    site_paths: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def read_image(path: str = PATH) -> Image:
    """Raises ValueError, KeyError, TypeError where the file is there and not of its form."""
    try:
        with open(path, encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return Image()
    return Image(
        preload=tuple(map(str, told.get("preload", ()))),
        site_paths=tuple(map(str, told.get("site_paths", ()))),
        environment={str(key): str(value) for key, value in told.get("environment", {}).items()},
    )
