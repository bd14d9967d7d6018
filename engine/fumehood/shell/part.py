"""Declaration of the part `shell`: policy conditions on the programs of shell commands."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(name="shell", conditions={"runs": "fumehood.shell.condition:Runs"})
