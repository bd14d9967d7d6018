"""Declaration of the part `docker`: the container runtime Docker."""

from __future__ import annotations

from fumehood.core.part import Check, Part

PART = Part(
    name="docker",
    checks=(
        Check("docker", "fumehood.docker.doctor:check", after="Limits", group="Docker"),
        Check("image", "fumehood.docker.doctor:check_images", after="Docker", group="Images"),
    ),
    runtime="fumehood.docker.api:new_docker",
    runtime_fits="fumehood.docker.host:is_installed",
)
