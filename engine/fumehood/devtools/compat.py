"""Compares two versions of a tool definition: which callers the new version breaks, and by which
step its version number must be raised.

Host side, without I/O. Invariant: some parts of a schema (references, combinations, patterns)
cannot be compared in detail. Any difference in these parts counts as breaking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition


class Step(StrEnum):
    """A step between two version numbers: the part of the number that is raised. *Source*:
    semver.org, items 6 to 8.
    """

    NONE = "none"
    PATCH = "patch"
    MINOR = "minor"
    MAJOR = "major"


_ORDER = list(Step)
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OPAQUE = (
    "pattern", "format", "const", "multipleOf", "uniqueItems", "$ref", "anyOf", "oneOf", "allOf",
    "not", "if", "then", "else", "patternProperties", "propertyNames", "prefixItems", "contains",
    "dependentRequired", "dependentSchemas", "$defs", "definitions",
)  # fmt: skip
"""Keywords that are only compared for equality. If such a keyword is added or changed, this counts
as breaking."""

_STRICTER = {
    "dangerous": "its calls now wait for a human's approval",
    "strict": "values are no longer converted to the declared type",
    "requires_auth": "calls without authentication are refused",
}
"""Maps a field to what callers experience if the field becomes true, which breaks callers."""

_PROMISES = {"read_only": "changes things now", "idempotent": "can no longer be repeated safely"}
"""Maps a field to what callers experience if the field becomes false, which breaks callers."""

_LIMITS = ("timeout_seconds", "memory_limit_mb", "rate_limit", "timeout")
"""Fields of a definition whose value may be lowered in a minor version."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two versions of a definition.

    `path` is the place of the difference in the definition. `step` is the version step that the
    difference requires. `breaks` describes the callers that the difference breaks. It is None if
    the difference breaks no callers.
    """

    path: str
    message: str
    step: Step
    breaks: str | None = None
    todo: str | None = None
    """What the callers that break must change."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """All differences between two versions of a definition, from which the required version step
    follows.
    """

    old: ToolDefinition
    new: ToolDefinition
    changes: tuple[Change, ...]

    @property
    def breaking(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.breaks is not None)

    @property
    def needed(self) -> Step:
        return max((change.step for change in self.changes), key=_ORDER.index, default=Step.NONE)

    @property
    def made(self) -> Step:
        """The step from the old to the new version number. NONE if the new version number is not
        higher.
        """
        before, after = self.old.version_key, self.new.version_key
        if after <= before:
            return Step.NONE
        places = (Step.MAJOR, Step.MINOR, Step.PATCH, Step.PATCH, Step.PATCH)
        return next(s for s, a, b in zip(places, before, after, strict=True) if a != b)

    @property
    def is_enough(self) -> bool:
        """Whether the version number was raised by at least the required step. For versions below
        1.0.0, a minor step is enough even if the differences break callers.
        """
        needed = self.needed
        if needed is Step.MAJOR and self.old.version_key[0] == 0:
            needed = Step.MINOR
        return _ORDER.index(self.made) >= _ORDER.index(needed)

    def migration_note(self) -> str:
        """Return a Markdown text for callers: what has changed, what they must do, and how they can
        check it.
        """
        old, new = (f"{tool.name}@{tool.version}" for tool in (self.old, self.new))
        changed = [f"- `{each.path}`: {each.message}" for each in self.changes] or ["- nothing"]
        steps = [f"{n}. {each.todo}" for n, each in enumerate(self.breaking, 1) if each.todo]
        return "\n".join(
            [
                f"# From {old} to {new}", "", "## What changed", *changed, "", "## Steps",
                *(steps or ["No caller has to change anything."]), "", "## Check",
                f"Call `{new}` with `dry_run`: it says what is wrong with the arguments.", "",
            ]
        )  # fmt: skip


def compare(old: ToolDefinition, new: ToolDefinition) -> Compatibility:
    """Return all differences between two versions of a definition."""
    changes = list(_of_input(old.parameters, new.parameters, "parameters"))
    changes += _of_output(old.output_schema, new.output_schema)
    changes += _of_tool(old, new)
    compared = ("parameters", "output_schema", "version", "id", "changelog")
    said = {change.path for change in changes}
    for name in type(old).model_fields:
        if name not in compared and name not in said and getattr(old, name) != getattr(new, name):
            changes.append(Change(name, "changed", Step.PATCH))
    if old.parameters != new.parameters and not any(
        change.path.startswith("parameters") for change in changes
    ):
        changes.append(Change("parameters", "descriptions changed", Step.PATCH))
    return Compatibility(old, new, tuple(changes))


def _of_tool(old: ToolDefinition, new: ToolDefinition) -> Iterator[Change]:
    if old.name != new.name:
        yield _breaking("name", f"{old.name} is {new.name} now", "every call", f"Call {new.name}.")
    for field, message in _STRICTER.items():
        if getattr(new, field) and not getattr(old, field):
            yield _breaking(field, message, "every call", "Expect that.")
    for field, message in _PROMISES.items():
        if getattr(old, field) and not getattr(new, field):
            who = "callers that repeat calls or run them unasked"
            yield _breaking(field, f"the tool {message}", who, f"Do not rely on {field}.")
    for field in _LIMITS:
        before, after = getattr(old, field), getattr(new, field)
        if after is not None and (before is None or after < before):
            yield Change(field, f"lowered from {before or 'the default'} to {after}", Step.MINOR)
    if new.deprecated and not old.deprecated:
        yield Change("deprecated", f"deprecated; use {new.replacement or 'another'}", Step.MINOR)


def _of_output(old: JsonObject | None, new: JsonObject | None) -> Iterator[Change]:
    """Yield the changes between two output schemas.

    A change breaks callers if it allows results that the old schema does not allow.
    """
    if old == new:
        return
    if new is None:
        who = "readers of the result"
        yield _breaking("output_schema", "is no longer promised", who, "Check the result.")
    elif old is None:
        yield Change("output_schema", "is promised now", Step.MINOR)
    else:
        found = [c for c in _of_input(new, old, "output_schema") if c.breaks is not None]
        for change in found:
            message = f"results may differ here ({change.message}, read from new to old)"
            who = "readers of this part of the result"
            yield _breaking(change.path, message, who, f"Read {change.path} as it is now.")
        if not found:
            yield Change("output_schema", "extended", Step.MINOR)


def _breaking(path: str, message: str, who: str, todo: str) -> Change:
    return Change(path, message, Step.MAJOR, who, todo)


def _of_input(old: Any, new: Any, path: str) -> Iterator[Change]:
    """Yield the differences between two input schemas. `path` is their place in the definition.

    A difference breaks callers if values that the old schema allows are now invalid.
    """
    if old == new:
        return
    if not isinstance(old, dict) or not isinstance(new, dict):
        yield _breaking(path, "changed", f"calls that send {path}", f"Check {path}.")
        return
    who = f"calls that send {path}"
    yield from _of_type(old, new, path, who)
    yield from _of_bounds(old, new, path, who)
    for keyword in _OPAQUE:
        if keyword in new and old.get(keyword) != new[keyword]:
            message = f"{keyword} was {'changed' if keyword in old else 'added'}"
            yield _breaking(f"{path}.{keyword}", message, who, f"Check {path} against {keyword}.")
        elif keyword in old and keyword not in new:
            yield Change(f"{path}.{keyword}", f"{keyword} was removed", Step.MINOR)
    if "default" in old and old["default"] != new.get("default"):
        left_out = f"calls that leave out {path}"
        message = f"the default {old['default']!a} is {new.get('default')!a} now"
        yield _breaking(f"{path}.default", message, left_out, f"Send {path} explicitly.")
    yield from _of_input(old.get("items", {}), new.get("items", {}), f"{path}.items")
    yield from _of_properties(old, new, path)


def _of_type(old: JsonObject, new: JsonObject, path: str, who: str) -> Iterator[Change]:
    before, after = _types(old), _types(new)
    if after is not None and (before is None or not before <= after):
        lost = ", ".join(sorted((before or {"anything else"}) - after))
        yield _breaking(f"{path}.type", f"no longer takes {lost}", who, f"Convert {path}.")
    elif before != after:
        yield Change(f"{path}.type", "takes more types", Step.MINOR)
    if "enum" in new:
        gone = [each for each in old.get("enum", ()) if each not in new["enum"]]
        gone = gone if "enum" in old else ["any other value"]
        if gone:
            shown = ", ".join(map(ascii, gone[:10]))
            yield _breaking(f"{path}.enum", f"no longer takes {shown}", who, f"Replace {shown}.")
        elif old["enum"] != new["enum"]:
            yield Change(f"{path}.enum", "takes more values", Step.MINOR)
    elif "enum" in old:
        yield Change(f"{path}.enum", "takes any value", Step.MINOR)


def _types(schema: JsonObject) -> set[str] | None:
    """Return the types that a schema names, or None if it names none. If it names `number`, the
    result also contains `integer`.
    """
    named = schema.get("type")
    if named is None:
        return None
    types = set(named) if isinstance(named, list) else {named}
    return types | ({"integer"} if "number" in types else set())


def _of_bounds(old: JsonObject, new: JsonObject, path: str, who: str) -> Iterator[Change]:
    for keyword in (*_LEAST, *_MOST):
        before, after = old.get(keyword), new.get(keyword)
        if before == after:
            continue
        is_least = keyword in _LEAST
        if after is not None and (before is None or (after > before) is is_least):
            message = f"{keyword} {'is' if before is None else f'was {before}, is'} {after} now"
            yield _breaking(f"{path}.{keyword}", message, who, f"Keep {path} within {keyword}.")
        else:
            yield Change(f"{path}.{keyword}", f"{keyword} is wider", Step.MINOR)


def _of_properties(old: JsonObject, new: JsonObject, path: str) -> Iterator[Change]:
    before, after = old.get("properties", {}), new.get("properties", {})
    needed_before, needed = set(old.get("required", ())), set(new.get("required", ()))
    removed, added = [n for n in before if n not in after], [n for n in after if n not in before]
    is_output = path.startswith("output_schema")
    renamed: set[str] = set()
    for name in removed:
        place = f"{path}.{name}"
        into = next((other for other in added if after[other] == before[name]), None)
        if into is not None:
            added.remove(into)
            renamed.add(into)
            message, who = f"{name} is {into} now", f"calls that send {name}"
            yield _breaking(place, message, who, f"Send {into} instead of {name}.")
        elif not is_output or new.get("additionalProperties") is False:
            yield _breaking(place, "removed", f"calls that send {name}", f"Do not send {name}.")
    for name in [*added, *sorted(needed - needed_before - renamed - set(added))]:
        if name in needed:
            message = "required now" if name in before else "new and required"
            who = f"calls that leave out {name}"
            yield _breaking(f"{path}.{name}", message, who, f"Send {name}.")
        else:
            yield Change(f"{path}.{name}", "new and optional", Step.MINOR)
    for name in before:
        if name in after:
            yield from _of_input(before[name], after[name], f"{path}.{name}")
    open_before, open_now = (s.get("additionalProperties", True) for s in (old, new))
    if open_before != open_now:
        if open_now is True:
            yield Change(f"{path}.additionalProperties", "takes others, too", Step.MINOR)
        else:
            who = "calls that send undeclared parameters"
            message = "undeclared parameters are refused or restricted"
            todo = "Send declared parameters only."
            yield _breaking(f"{path}.additionalProperties", message, who, todo)
