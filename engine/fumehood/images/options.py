"""The call option `packages`, which the part `images` adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from fumehood.core.call import Packages
from fumehood.core.errors import InvalidParams
from fumehood.core.part import CallOption

if TYPE_CHECKING:
    from fumehood.pipeline.authorize import PermittedCall
    from fumehood.pipeline.plan import Plan


def require_own_container(permitted: PermittedCall, plan: Plan) -> None:
    """Raise InvalidParams if packages cannot be added for this call.

    This is possible only for a Python or shell program that runs in a container of its own.
    """
    for is_wrong, words in (
        (plan.placement.is_of_session,
         "A session has the packages that it was made with: sessions new --package."),
        (plan.executor.language == "javascript",
         "Packages are those of Python, and JavaScript cannot use them."),
        (plan.image is None, "Packages are for programs that run in containers."),
    ):  # fmt: skip
        if is_wrong:
            raise InvalidParams(words, fields=["options.packages"])


PACKAGES: CallOption[list[str] | None] = CallOption(
    name="packages",
    # An empty list becomes None, because a stored call or key must be the same as without the
    # option.
    type=Annotated[Packages | None, AfterValidator(lambda given: given or None)],
    default=None,
    adds_to_image=True,
    check=require_own_container,
)

OPTIONS = (PACKAGES,)
