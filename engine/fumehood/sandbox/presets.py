"""Presets: sessions as the operator describes them, and requests that name one.

Host side, used by `sessions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fumehood.core.errors import InvalidParams
from fumehood.core.names import MAX_NAME_CHARACTERS, did_you_mean
from fumehood.core.session import SessionFields
from fumehood.sandbox.settings import Preset

NO_PRESET = Preset()


def find_preset(presets: Mapping[str, Preset], name: str | None) -> Preset:
    """Return a preset by its name, or an empty one without a name. Raises InvalidParams."""
    if name is None:
        return NO_PRESET
    if name not in presets:
        raise InvalidParams(
            f"There is no preset {name[:MAX_NAME_CHARACTERS]!r}.{did_you_mean(name, presets)}",
            fields=["preset"],
        )
    return presets[name]


def merged(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a session: those of a request that are not None, otherwise the preset's.

    Hosts and environment variables are added to those of the preset.
    """
    fields = {name: getattr(preset, name) for name in SessionFields.model_fields}
    fields |= {name: value for name, value in given.items() if value is not None}
    fields["network"] = tuple(dict.fromkeys((*preset.network, *(given["network"] or ()))))
    fields["env"] = {**preset.env, **(given["env"] or {})}
    return fields
