"""The call option that the part `trials` adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fumehood.core.errors import InvalidParams
from fumehood.core.part import CallOption

if TYPE_CHECKING:
    from fumehood.pipeline.authorize import PermittedCall
    from fumehood.pipeline.plan import Plan


def require_undoable(permitted: PermittedCall, plan: Plan) -> None:
    """Raise InvalidParams if the effect of the call could not be held back until a human decides.
    `plan` and `permitted` describe the call.
    """
    for is_wrong, words in (
        (plan.executor.language is None,
         "Only programs can be tried: other tools show what they will change by themselves."),
        (permitted.arguments.get("tools"),
         "What tools do cannot be held back: leave the argument tools out."),
        (plan.session is None or not plan.session.durable,
         "A trial needs a session whose files are saved: sessions new --durable."),
    ):  # fmt: skip
        if is_wrong:
            raise InvalidParams(words, fields=["options.preview"])


PREVIEW = CallOption(name="preview", type=bool, default=False, check=require_undoable)
"""Whether the call runs as a trial. The effect of a trial is applied to the session only after
approval.
"""

OPTIONS = (PREVIEW,)
