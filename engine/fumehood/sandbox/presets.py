"""Presets: sessions as the operator describes them, requests that name one, and bound agents.

Host side, used by `sessions`. Invariant: a session of an agent that is bound to presets has one of
them, and nothing that the preset does not give, except environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fumehood.core.errors import InvalidParams, PermissionDenied
from fumehood.core.names import MAX_NAME_CHARACTERS, listed
from fumehood.core.session import SessionFields
from fumehood.sandbox.session import SessionRequest
from fumehood.sandbox.settings import Preset

NO_PRESET = Preset()


def find_preset(presets: Mapping[str, Preset], name: str | None) -> Preset:
    """Return a preset by its name, or an empty one without a name. Raises InvalidParams."""
    if name is None:
        return NO_PRESET
    if name not in presets:
        raise InvalidParams(
            f"There is no preset {name[:MAX_NAME_CHARACTERS]!r}. Presets of the configuration: "
            f"{listed(sorted(presets)) or 'none'}.",
            fields=["preset"],
        )
    return presets[name]


def merged(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a session: those of a request that are not None, otherwise the preset's.

    Hosts and environment variables are added to those of the preset.
    """
    fields = {name: getattr(preset, name) for name in SessionFields.model_fields}
    fields |= {name: value for name, value in given.items() if value is not None}
    fields["network"] = tuple(dict.fromkeys((*preset.network, *(given.get("network") or ()))))
    fields["env"] = {**preset.env, **(given.get("env") or {})}
    return fields


def require_bound(agent_id: str | None, bound: Sequence[str], preset: str | None) -> None:
    """Raise PermissionDenied if an agent is bound to presets, and this is none of them."""
    if bound and preset not in bound:
        raise _refusal(agent_id, bound, ["preset"], "Name one of them.")


def require_within(
    agent_id: str | None, bound: Sequence[str], wanted: SessionRequest, granted: SessionRequest
) -> None:
    """Raise PermissionDenied, which names the fields, if a session would have more than `granted`,
    which is that of its preset alone.
    """
    more = {
        "image": wanted.image != granted.image,
        "memory_mb": wanted.memory_mb > granted.memory_mb,
        "cpus": (wanted.cpus or 0) > (granted.cpus or 0),
        "disk_mb": (wanted.disk_mb or 0) > (granted.disk_mb or 0),
        "packages": not set(wanted.packages) <= set(granted.packages),
        "network": not set(wanted.network) <= set(granted.network),
        "durable": wanted.durable and not granted.durable,
        "idle_seconds": wanted.idle_s > granted.idle_s,
        "lifetime_seconds": wanted.lifetime_s > granted.lifetime_s,
    }
    fields = [name for name, is_more in more.items() if is_more]
    if fields:
        words = f"Leave out what is more than its preset gives: {', '.join(fields)}."
        raise _refusal(agent_id, bound, fields, words)


def _refusal(
    agent_id: str | None, bound: Sequence[str], fields: Sequence[str], remedy: str
) -> PermissionDenied:
    words = f"The agent {agent_id} is bound to presets: {listed(bound)}. {remedy}"
    return PermissionDenied(words, fields=fields)
