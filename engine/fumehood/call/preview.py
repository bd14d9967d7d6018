"""Preview: what a call will change, for the human who is asked."""

from __future__ import annotations

from fumehood.call.authorise import PermittedCall
from fumehood.call.plan import Plan
from fumehood.executors.effects import Effect
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.wire.cursors import Cursors


async def preview(
    permitted: PermittedCall, plan: Plan, sessions: SessionKeeper, cursors: Cursors
) -> Effect | None:
    """Its effect, where its executor can say it."""
    return None
