"""The keyword arguments of the public methods: the check of their names, and their signatures.

The types are in `keyword_types.py`. The engine checks values as it does for requests over a socket.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from fumehood.core.json_types import JsonObject
from fumehood.core.names import nearest

Class = TypeVar("Class", bound=type)


def checked(kind: type, method: str, given: Mapping[str, object]) -> JsonObject:
    """Return the keyword arguments of a method, after a check of their names.

    Raises:
        TypeError: a name is not a key of `kind`.
    """
    known: dict[str, object] = kind.__annotations__
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return dict(given)
    near = nearest(unknown, known)
    cure = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(sorted(known))}."
    raise TypeError(f"{method}() has no keyword argument {unknown!r}. {cure}")


class _Absent:
    """Placeholder in a signature for a default that the model defines."""

    def __repr__(self) -> str:
        return "..."


_ABSENT = _Absent()


def show_keywords(cls: Class) -> Class:
    """Add the keywords of methods that take `**name: Unpack[…]` to `inspect.signature`.

    Editors and notebooks then show them, as type checkers do.
    """
    for method in vars(cls).values():
        if inspect.isfunction(method) and method.__code__.co_flags & inspect.CO_VARKEYWORDS:
            signature: Any = inspect.signature(method)
            *others, rest = signature.parameters.values()
            (kind,) = get_args(get_type_hints(method)[rest.name])
            named = (
                rest.replace(
                    name=name, kind=rest.KEYWORD_ONLY, default=_ABSENT, annotation=annotation
                )
                for name, annotation in get_type_hints(kind).items()
            )
            vars(method)["__signature__"] = signature.replace(parameters=[*others, *named])
    return cls
