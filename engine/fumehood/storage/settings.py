"""Where the state is kept: its rows, and its files."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr, field_validator


class StateSettings(BaseModel):
    """Where the rows of the state are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr | None = None
    """A PostgreSQL database (`postgresql://USER@HOST:PORT/DATABASE`), or None for a SQLite file in
    the state directory. It may hold a password, so it is never shown."""

    @property
    def secret_url(self) -> str | None:
        """The URL as text, or None."""
        return self.url.get_secret_value() if self.url is not None else None


class FileSettings(BaseModel):
    """Where blobs and recordings are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = None
    """A directory that the engines of one state share, or None for the state directory."""

    @field_validator("url")
    @classmethod
    def _require_directory(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("must be the absolute path of a directory")
        return value

    @property
    def directory(self) -> Path | None:
        """The directory, or None."""
        return Path(self.url) if self.url is not None else None
