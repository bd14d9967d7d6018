"""Who may call at all: a known principal with the scope `call`.

Host side, asked by `pipeline/authorize`. Nothing configured grants nothing: without a
principal, or without the scope, there is no call.
"""

from __future__ import annotations

from fumehood.core.errors import PermissionDenied, Unauthorized
from fumehood.core.identity import Principal, Scope


def require_caller(principal: Principal | None) -> Principal:
    """The principal, if it may call tools.

    Raises:
        Unauthorized: nobody knows who is asking.
        PermissionDenied: known, but without the scope `call`.
    """
    if principal is None:
        raise Unauthorized("This socket serves its owner only, and the caller is somebody else.")
    if Scope.CALL not in principal.scopes:
        raise PermissionDenied("This identity may not call tools. Do not retry.")
    return principal
