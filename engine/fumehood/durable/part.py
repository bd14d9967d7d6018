"""The part that adds durable sessions to the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="durable",
    session_options=frozenset({"durable"}),
    in_engine="fumehood.durable.in_engine:DurablePart",
)
