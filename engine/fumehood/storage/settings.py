"""Where the state is kept."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class StateSettings(BaseModel):
    """Where the rows of the state are kept. Files and keys stay in the state directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr | None = Field(default=None)
    """A PostgreSQL database (`postgresql://USER@HOST:PORT/DATABASE`), or None for a SQLite file in
    the state directory. It may hold a password, so it is never shown."""

    @property
    def secret_url(self) -> str | None:
        """The URL as text, or None."""
        return self.url.get_secret_value() if self.url is not None else None
