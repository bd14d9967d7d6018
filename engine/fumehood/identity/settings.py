"""The operator's settings of principals. Values only."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Uid = Annotated[int, Field(ge=0, lt=2**32)]


class PrincipalSettings(BaseModel):
    """A name for Unix users; several uids may be one principal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}$")
    uids: tuple[Uid, ...] = Field(min_length=1)


def _require_unique_uids(value: tuple[PrincipalSettings, ...]) -> tuple[PrincipalSettings, ...]:
    uids = [uid for principal in value for uid in principal.uids]
    twice = next((uid for uid in uids if uids.count(uid) > 1), None)
    if twice is not None:
        raise ValueError(f"the uid {twice} is given to more than one principal")
    return value


AllPrincipals = Annotated[tuple[PrincipalSettings, ...], AfterValidator(_require_unique_uids)]

__all__ = ["AllPrincipals", "PrincipalSettings"]
