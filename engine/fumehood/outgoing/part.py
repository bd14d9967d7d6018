"""The part that sends requests to other services, for the parts that need it."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(name="outgoing", in_engine="fumehood.outgoing.in_engine:Outgoing")
