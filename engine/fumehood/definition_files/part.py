"""The part that adds directories of definition files to the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="definition_files",
    settings="fumehood.definition_files.settings:SETTINGS",
    in_engine="fumehood.definition_files.in_engine:DefinitionFiles",
)
