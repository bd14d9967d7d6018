"""The call options that the part `receipts` adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fumehood.core.errors import InvalidParams
from fumehood.core.part import CallOption
from fumehood.receipts.receipt import Cassette

if TYPE_CHECKING:
    from fumehood.pipeline.authorize import PermittedCall
    from fumehood.pipeline.plan import Plan


def require_repeatable(permitted: PermittedCall, plan: Plan) -> None:
    """Raise InvalidParams if the call depends on something that a receipt cannot contain."""
    options = permitted.request.options
    for is_wrong, words in (
        (plan.executor.language is None, "Only programs have receipts."),
        (getattr(options, "preview", False), "A trial has no receipt."),
        (permitted.arguments.get("tools"),
         "A receipt does not hold the answers of tools: leave the argument tools out."),
        (plan.session is not None and plan.session.env,
         "A receipt does not hold environment variables of a session, and this one has some."),
    ):  # fmt: skip
        if is_wrong:
            option = RECEIPT if RECEIPT.of(options) else REPLAY
            raise InvalidParams(words, fields=[f"options.{option.name}"])


RECEIPT = CallOption(name="receipt", type=bool, default=False, check=require_repeatable)

REPLAY: CallOption[Cassette | None] = CallOption(
    name="replay", type=Cassette | None, default=None, check=require_repeatable
)
"""The cassette of a receipt. If it is given, the program's requests are answered from it, and none
is sent.
"""

OPTIONS = (RECEIPT, REPLAY)
