"""`ETag` and `If-Match`: the first of two who change the same thing wins, the other is told.

*Source*: RFC 9110, sections 8.8.3 and 13.1.1. Of that, one strong tag or `*` is taken.
"""

from __future__ import annotations

import re

from starlette.requests import Request

from fumehood.core.errors import InvalidParams

ANY = "*"
_TAG = re.compile(r'"(0|[1-9][0-9]{0,14})"', re.ASCII)


def etag(version: int) -> str:
    """The tag of a version."""
    return f'"{version}"'


def expected_version(request: Request) -> int | None:
    """The version that the client has seen; None where it says that any will do.

    Raises:
        InvalidParams: it says nothing, or what cannot be understood. Who has seen nothing
            decides on what somebody else may have changed meanwhile.
    """
    given = request.headers.getlist("if-match")
    if not given:
        raise InvalidParams(
            "Send If-Match with the ETag of what you were shown, or `*` for whatever it is now.",
            fields=["If-Match"],
        )
    if given == [ANY]:
        return None
    match = _TAG.fullmatch(given[0].strip(" \t")) if len(given) == 1 else None
    if match is None:
        raise InvalidParams('If-Match takes one ETag such as "3", or `*`.', fields=["If-Match"])
    return int(match[1])
