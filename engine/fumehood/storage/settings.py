"""Settings for the storage of the state: its rows, its files, and the records of calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from fumehood.core.value import Value

BUCKET_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/\w[\w.-]*)*", re.ASCII)
"""A bucket with an optional prefix. No part of the prefix begins with a dot."""


class RecordSettings(Value):
    """Which calls' arguments and answers are kept, and for how long."""

    calls: Literal["all", "failed", "none"] | None = None
    """If this is None, all calls are kept, or no calls if the engine is a service, because a
    service runs other people's calls."""

    kept_days: int = Field(default=7, ge=1, le=3650)
    kept_mb: int = Field(default=512, ge=1, le=1_000_000)


class StateSettings(Value):
    """Where the rows of the state are kept."""

    url: SecretStr | None = None
    """A database of a kind that a part adds, or None for a SQLite file in the state directory. The
    URL may contain a password, so it is never shown."""

    @property
    def secret_url(self) -> str | None:
        """The URL as text, or None."""
        return self.url.get_secret_value() if self.url is not None else None


class FileSettings(Value):
    """Where blobs and recordings are kept."""

    url: str | None = None
    """A directory or a bucket (`s3://BUCKET/PREFIX`) that the engines of one state share, or None
    for the state directory."""

    @field_validator("url")
    @classmethod
    def _require_place(cls, value: str | None) -> str | None:
        if value is None or value.startswith("/") or BUCKET_URL.fullmatch(value):
            return value
        raise ValueError("must be the absolute path of a directory, or s3://BUCKET/PREFIX")

    @property
    def directory(self) -> Path | None:
        """The shared directory, or None if `url` does not name a directory."""
        return Path(self.url) if self.url is not None and self.bucket is None else None

    @property
    def bucket(self) -> str | None:
        """The bucket with its prefix, `BUCKET/PREFIX`, or None."""
        is_bucket = self.url is not None and self.url.startswith("s3://")
        return self.url.removeprefix("s3://") if self.url is not None and is_bucket else None
