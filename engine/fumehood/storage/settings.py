"""The operator's settings for the storage of the state: its rows, its files, and records of
calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SecretStr, field_validator

from fumehood.core.value import Value

if TYPE_CHECKING:
    from fumehood.storage.files import RemoteFiles


class RecordSettings(Value):
    """Settings for the records of calls (arguments and answers): which calls get a record, for how
    many days records are kept, and how many megabytes they may use.
    """

    calls: Literal["all", "failed", "none"] | None = None
    """The calls that get a record. None means `none` if the engine is a service, because a service
    runs other people's calls, and otherwise `all`."""

    kept_days: int = Field(default=7, ge=1, le=3650)
    kept_mb: int = Field(default=512, ge=1, le=1_000_000)


class StateSettings(Value):
    """Settings that determine where the state's database rows are kept."""

    url: SecretStr | None = None
    """The URL of a database for which a part provides a backend. None means a SQLite file in the
    state directory. The URL may contain a password, so it is never shown."""

    @property
    def secret_url(self) -> str | None:
        """The URL as plain text with its password, or None if no URL is set."""
        return self.url.get_secret_value() if self.url is not None else None


class FileSettings(Value):
    """Settings that determine where the engine's files, such as blobs, are kept."""

    url: str | None = None
    """The absolute path of a directory, or the URL of a remote place that a part supports. None
    means the state directory. All engines of one state must use the same place."""

    @field_validator("url")
    @classmethod
    def _require_place(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            from fumehood.storage.files import remote_kind  # most engines do not need it

            remote_kind(value)
        return value

    @property
    def directory(self) -> Path | None:
        """The directory that `url` names, or None if `url` is not the path of a directory."""
        return Path(self.url) if self.url is not None and self.url.startswith("/") else None

    def remote(self) -> RemoteFiles | None:
        """Return the remote place at the URL. Return None if `url` is a directory or not set.

        Raises:
            StoreError: the optional dependencies for this kind of remote place are not installed.
        """
        if self.url is None or self.directory is not None:
            return None
        from fumehood.storage.files import remote_kind

        return remote_kind(self.url).at(self.url)
