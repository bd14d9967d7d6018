"""`image.toml` of an image's folder, read strictly.

Host side, pure. Invariant: an unknown key is refused, never ignored, so that a misspelling
does not make an image without the requested content.
"""

from __future__ import annotations

import re
import tomllib
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fumehood.core.languages import LANGUAGES

GUEST_MB = 32
"""The guest's memory beside a program if nothing is preloaded."""

_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}(\.[A-Za-z][A-Za-z0-9_]{0,63}){0,7}")
_NOT_PRELOADED = frozenset({"antigravity", "fumehood", "site", "sitecustomize", "usercustomize"})
"""The guest's own modules, and modules that change Python at its start."""


class WrongSettings(Exception):
    """The file cannot be used. The message gives the reason."""


def _once_each(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError("names something twice")
    return names


def _language(name: str) -> str:
    if name not in LANGUAGES:
        raise ValueError(f"is not a language: {', '.join(LANGUAGES)}")
    return name


def _with_python(names: tuple[str, ...]) -> tuple[str, ...]:
    if "python" not in names:
        raise ValueError('lacks "python", in which the guest is written')
    return names


def _module(name: str) -> str:
    if not _MODULE.fullmatch(name) or name.split(".")[0] in _NOT_PRELOADED:
        raise ValueError("is not a module that can be preloaded")
    return name


class ImageSettings(BaseModel):
    """The file's values, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    release: str = Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")
    description: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")
    languages: Annotated[
        tuple[Annotated[str, AfterValidator(_language)], ...],
        Field(strict=False),
        AfterValidator(_once_each),
        AfterValidator(_with_python),
    ] = ("python", "shell")
    preload: Annotated[
        tuple[Annotated[str, AfterValidator(_module)], ...],
        Field(strict=False),
        AfterValidator(_once_each),
    ] = ()
    """Modules that the guest imports once, before all programs."""
    guest_mb: int = Field(default=GUEST_MB, ge=GUEST_MB)
    """Memory of the guest with these modules, on top of a container's memory class."""


def parse_settings(text: str) -> ImageSettings:
    """Check the whole file.

    Raises:
        WrongSettings: it is not TOML, or has a key or a value that is not known.
    """
    try:
        return ImageSettings.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise WrongSettings(f"it is not TOML ({error})") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part)[:80] for part in first["loc"])
        raise WrongSettings(f"{key}: {first['msg'].removeprefix('Value error, ')}") from None
