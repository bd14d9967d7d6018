"""Conditions on the programs of shell commands, as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(name="shell", conditions={"runs": "fumehood.shell.condition:Runs"})
