"""Preview: what a call would change, for the human who is going to decide on it.

Between a call's `plan` and its approval. Takes a turn of the call's session, touches nothing, and
leaves. After the yes the executor holds the workspace to `Effect.base`.
"""

from __future__ import annotations

from fumehood.executors.effects import Effect
from fumehood.executors.kinds import executor_of
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import Plan
from fumehood.sandbox.sessions import SessionKeeper


async def preview(permitted: PermittedCall, plan: Plan, sessions: SessionKeeper) -> Effect | None:
    """The effect of a call; None where its tool has no preview.

    Raises:
        EngineError: it cannot be told, and the call would not run now either: the session is
            over, lost or too busy, or there is too much to look at.
    """
    tool = permitted.tool.definition
    executor = executor_of(tool)
    if not executor.has_preview or plan.session is None:
        return None
    # No call of the session's yet: a turn as for its owner's own look at the files.
    turn = await sessions.files(permitted.principal, plan.session.id)
    async with turn as lease:
        return await executor.preview(tool, permitted.arguments, plan.limits, lease)
