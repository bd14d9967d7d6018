"""Tokens, approvers and changes of authority as administrators see them. Values only.

What is kept of a secret is in `gates/`; here a secret appears once, in the answer that makes
it, and never in a representation that could end in a log.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from fumehood.core.call import Id
from fumehood.core.identity import Scope
from fumehood.core.json_types import JsonObject
from fumehood.identity.agent import PrincipalId

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NewToken(_Value):
    """A token to be made. `principal_id` is `token:<name>` unless it is given."""

    name: Name
    principal_id: PrincipalId | None = None
    scopes: tuple[Scope, ...] = (Scope.CALL,)
    agents: tuple[Id, ...] = Field(default=(), max_length=100)
    expires_at: AwareDatetime | None = None


class TokenInfo(_Value):
    """A token without its secret. `is_valid`: neither revoked nor expired."""

    id: str
    name: str
    principal_id: str
    scopes: tuple[Scope, ...]
    agents: tuple[str, ...]
    created_at: AwareDatetime
    created_by: str
    expires_at: AwareDatetime | None
    revoked_at: AwareDatetime | None
    is_valid: bool


class MadeToken(_Value):
    """A new token with the text to give away, which is shown only here."""

    token: TokenInfo
    secret: str = Field(repr=False)


class NewApprover(_Value):
    """An approver to be made. Scopes are `approve`, `admin`, or both."""

    name: Name
    scopes: tuple[Scope, ...] = (Scope.APPROVE,)


class ApproverInfo(_Value):
    """An approver without the credential."""

    name: str
    scopes: tuple[Scope, ...]
    created_at: AwareDatetime
    created_by: str
    removed_at: AwareDatetime | None


class MadeApprover(_Value):
    """A new approver with the credential, which is shown only here."""

    approver: ApproverInfo
    secret: str = Field(repr=False)


class Change(_Value):
    """One change of authority, of agents or of the registry: who changed what, and when."""

    seq: int
    at: AwareDatetime
    principal_id: str
    action: str
    subject: str
    details: JsonObject
