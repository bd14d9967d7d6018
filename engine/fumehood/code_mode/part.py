"""Declaration of the part `code_mode`: programs in containers call other tools."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="code_mode",
    gives=frozenset({"tools"}),
    in_engine="fumehood.code_mode.in_engine:CodeMode",
)
