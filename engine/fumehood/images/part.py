"""Declaration of the part `images`, which builds images and adds packages to them."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="images",
    settings="fumehood.images.settings:SETTINGS",
    commands={
        "images": Command(
            "The images that containers run.", "fumehood.images.command:images", after="sessions"
        )
    },
    call_options="fumehood.images.options:OPTIONS",
    in_engine="fumehood.images.in_engine:Images",
)
