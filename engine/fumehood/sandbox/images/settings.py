"""`image.toml` of an image's folder, read strictly.

Host side, pure. Invariant: an unknown key is refused, never ignored, so that a misspelling
does not make an image without the requested content.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Any

from fumehood.core.languages import LANGUAGES

GUEST_MB = 32
"""The guest's memory beside a program if nothing is preloaded."""

MAX_GUEST_MB = 512
MAX_PRELOAD = 32

_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}(\.[A-Za-z][A-Za-z0-9_]{0,63}){0,7}")
_RELEASE = re.compile(r"[a-z][a-z0-9-]{0,30}")
_NOT_PRELOADED = frozenset({"antigravity", "fumehood", "site", "sitecustomize", "usercustomize"})
"""The guest's own modules, and modules that change Python at its start."""


class WrongSettings(Exception):
    """The file cannot be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The file's values, with their defaults."""

    release: str
    description: str
    languages: tuple[str, ...] = ("python", "shell")
    preload: tuple[str, ...] = ()
    """Modules that the guest imports once, before all programs."""
    guest_mb: int = GUEST_MB
    """Memory of the guest with these modules, on top of a container's memory class."""


def parse_settings(text: str) -> ImageSettings:
    """Check the whole file.

    Raises:
        WrongSettings: it is not TOML, or has a key or a value that is not known.
    """
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrongSettings(f"it is not TOML ({error})") from None
    unknown = sorted(read.keys() - ImageSettings.__dataclass_fields__.keys())
    if unknown:
        raise WrongSettings(f"the key {unknown[0][:80]!r} is not known")
    release = _text(read, "release")
    if not _RELEASE.fullmatch(release):
        raise WrongSettings("release is not the name of a release of Debian")
    return ImageSettings(
        release,
        _text(read, "description"),
        _languages(read.get("languages", ["python", "shell"])),
        _preload(read.get("preload", [])),
        _guest_mb(read.get("guest_mb", GUEST_MB)),
    )


def _text(read: dict[str, Any], key: str) -> str:
    value = read.get(key)
    if not isinstance(value, str) or not value or len(value) > 200 or not value.isprintable():
        raise WrongSettings(f"{key} is not one line of text")
    return value


def _languages(value: Any) -> tuple[str, ...]:
    names = _names(value, "languages")
    for name in names:
        if name not in LANGUAGES:
            raise WrongSettings(f"{name[:80]!r} is not a language: {', '.join(LANGUAGES)}")
    if "python" not in names:
        raise WrongSettings('languages lacks "python", in which the guest is written')
    return names


def _preload(value: Any) -> tuple[str, ...]:
    names = _names(value, "preload")
    if len(names) > MAX_PRELOAD:
        raise WrongSettings(f"preload has more than {MAX_PRELOAD} names")
    for name in names:
        if not _MODULE.fullmatch(name) or name.split(".")[0] in _NOT_PRELOADED:
            raise WrongSettings(f"{name[:80]!r} is no module that can be preloaded")
    return names


def _names(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise WrongSettings(f"{key} is not a list of names")
    if len(set(value)) != len(value):
        raise WrongSettings(f"{key} names something twice")
    return tuple(value)


def _guest_mb(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongSettings("guest_mb is not a whole number")
    if not GUEST_MB <= value <= MAX_GUEST_MB:
        raise WrongSettings(f"guest_mb is not between {GUEST_MB} and {MAX_GUEST_MB}")
    return value
