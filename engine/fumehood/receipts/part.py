"""Receipts as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(name="receipts", in_engine="fumehood.receipts.in_engine:Receipts")
