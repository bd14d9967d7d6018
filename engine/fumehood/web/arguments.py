"""Converts a call's arguments to the fields of an HTML form, and a submitted form to arguments.

The fields are made from the tool's schema. The prefix of a field's name is the format of its value:
`text:NAME` is a text, and `number:NAME`, `choice:NAME` and `json:NAME` are JSON. `given:NAME` marks
an argument that the call includes; a choice that is not empty needs no such mark. The browser may
send anything, so the engine validates the result like a new call. Invariant: a form that the user
submits unchanged gives the same arguments. Therefore a text is edited as JSON if a browser would
change it (line ends), or if a reader would misread it (invisible characters).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fumehood.core.call import MAX_KEYS
from fumehood.core.escaping import json_document, printable
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json
from fumehood.web.view import Form, Problem

Kind = Literal["text", "number", "choice", "json"]

LONG_TEXT = 60
"""Length in characters above which a text gets an input field with several lines."""

LONG_NAMES = frozenset({"body", "code", "content", "message", "query", "sql", "stdin", "text"})
"""Names of arguments whose texts get an input field with several lines."""

MAX_TEXT = 200_000
"""Maximum length of all arguments together, in characters of JSON."""


@dataclass(frozen=True, slots=True)
class ArgumentField:
    """One argument of a call, as a field of an HTML form."""

    name: str
    kind: Kind
    value: str
    is_given: bool
    is_required: bool
    label: str = ""
    """The argument's type and description, from the schema."""
    choices: tuple[str, ...] = ()
    """The values from which the user can choose, as JSON."""
    error: str = ""

    @property
    def is_first(self) -> bool:
        """Whether the field is shown immediately, above the optional arguments."""
        return self.is_given or self.is_required or bool(self.error)

    @property
    def is_long(self) -> bool:
        """Whether the field is an input field with several lines."""
        may_be_long = self.kind == "json" or (self.kind == "text" and self.name in LONG_NAMES)
        return may_be_long or "\n" in self.value or len(self.value) > LONG_TEXT


def fields_of(arguments: JsonObject, schema: JsonObject | None) -> list[ArgumentField]:
    """Return the form's fields for a call: first the arguments that the schema names, and then the
    call's other arguments.

    Raises:
        Problem: the arguments are too long or too many for a form, or a browser would change an
            argument's name.
    """
    properties = _object(_object(schema).get("properties"))
    required = _object(schema).get("required")
    names = [*properties, *(name for name in arguments if name not in properties)]
    is_odd = any(char in name for name in names for char in "\0\r")
    if is_odd or len(names) > MAX_KEYS or len(json.dumps(arguments)) > MAX_TEXT:
        why = "have names that no form can hold" if is_odd else "are too long to edit here"
        raise Problem(
            f"These arguments {why}. In a terminal: fumehood approvals approve ID --edit @FILE"
        )
    return [
        _field(
            name,
            arguments,
            _object(properties.get(name)),
            is_required=isinstance(required, list) and name in required,
        )
        for name in names
    ]


def as_sent(fields: list[ArgumentField], form: Form, errors: Mapping[str, str]) -> Any:
    """Return the fields with the values that the user submitted, and with the error messages in
    `errors`.
    """
    return [
        replace(
            one,
            value=form.get(f"{one.kind}:{one.name}", one.value).replace("\r\n", "\n"),
            is_given=f"given:{one.name}" in dict(form.fields),
            error=errors.get(one.name, ""),
        )
        for one in fields
    ]


def arguments_of(form: Form) -> tuple[JsonObject, dict[str, str]]:
    """Parse the arguments in a submitted form.

    Return the arguments, and a dictionary from the name of each invalid argument to its error
    message.
    """
    given = {name[6:] for name, _ in form.fields if name.startswith("given:")}
    arguments: JsonObject = {}
    errors: dict[str, str] = {}
    for field, text in form.fields:
        kind, colon, name = field.partition(":")
        is_given = bool(text) if kind == "choice" else name in given
        if not colon or not is_given or name in arguments:
            continue
        try:
            if kind == "text":
                arguments[name] = text.replace("\r\n", "\n")
            elif kind in ("number", "choice", "json"):
                arguments[name] = strict_json.loads(text.encode())
        except ValueError as error:
            why = f"valid JSON: {str(error).removeprefix('not JSON: ')}"
            errors[name] = f"This is not {'a number' if kind == 'number' else why}."
    return arguments, errors


def errors_of(fields: tuple[str, ...] | None, message: str) -> dict[str, str]:
    """Return a dictionary with one key for each argument that is named in `fields`. Each value is
    `message`, the reason why the engine refused the call.

    If `fields` is None or empty, the only key is the empty text.
    """
    names = {_argument(pointer) for pointer in fields or ()}
    return dict.fromkeys(names or {""}, message)


def _field(
    name: str, arguments: JsonObject, schema: JsonObject, *, is_required: bool
) -> ArgumentField:
    is_given = name in arguments
    value = arguments[name] if is_given else schema.get("default")
    types = schema.get("type")
    allowed = schema.get("enum")
    kind: Kind = "json"
    choices: tuple[str, ...] = ()
    text = json_document(value) if is_given or "default" in schema else ""
    of_enum = tuple(map(json_document, allowed)) if isinstance(allowed, list) else ()
    if types == "boolean" and not of_enum:
        of_enum = ("true", "false")
    if of_enum and (not is_given or text in of_enum):
        kind, choices = "choice", of_enum
    elif types in ("integer", "number") and (not is_given or type(value) in (int, float)):
        kind = "number"
    elif (types == "string" or not schema) and isinstance(value, str) and _is_plain(value):
        kind, text = "text", value
    elif types == "string" and not is_given and value is None:
        kind, text = "text", ""
    if kind == "choice" and not is_given:
        text = ""
    label = types if isinstance(types, str) else "one of these" if of_enum else "JSON"
    if schema.get("description"):
        label = f"{label} · {str(schema['description'])[:300]}"
    return ArgumentField(name, kind, text, is_given, is_required, label, choices)


def _argument(pointer: str) -> str:
    name = pointer.removeprefix("/arguments").removeprefix("/").partition("/")[0]
    return name.removeprefix("arguments.").replace("~1", "/").replace("~0", "~")


def _is_plain(text: str) -> bool:
    return printable(text) == text and "\t" not in text


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}
