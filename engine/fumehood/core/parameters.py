"""Parameters as a list: a simple alternative to JSON Schema for a tool's parameters.

Values only. A list becomes the JSON Schema of a definition; nothing later knows that it was a list.
Invariant: a property that the schema of one plain type cannot express, such as bounds on a boolean,
is a fault, never dropped. The schema itself is checked like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fumehood.core.errors import faults_of
from fumehood.core.json_types import JsonObject

_BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}


def _finite_number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError("a finite number is needed")
    return value


Bound = Annotated[Any, BeforeValidator(_finite_number)]
"""An integer or a float, as it was given: 5 stays 5."""


class ToolParameter(BaseModel):
    """One parameter of a tool.

    `min` and `max` bound a number's value, a string's length or an array's. A parameter is
    required unless it has a default or says `required=False`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    type: Literal["string", "integer", "number", "boolean", "array", "object"]
    description: str = Field(min_length=1, max_length=10_000)
    required: bool | None = None
    default: Any = None
    enum: list[Any] | None = Field(default=None, min_length=1)
    min: Bound | None = None
    max: Bound | None = None
    pattern: str | None = None

    @model_validator(mode="after")
    def _refuse_what_does_not_fit(self) -> ToolParameter:
        faults = list(self._faults())
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def has_default(self) -> bool:
        """Whether a default was given, which may be null."""
        return "default" in self.model_fields_set

    @property
    def is_required(self) -> bool:
        """Whether every call must give this parameter."""
        return not self.has_default if self.required is None else self.required

    def json_schema(self) -> JsonObject:
        """Return the JSON Schema of this parameter's value."""
        schema: JsonObject = {"type": self.type, "description": self.description}
        if self.has_default:
            schema["default"] = self.default
        if self.enum is not None:
            schema["enum"] = list(self.enum)
        if self.pattern is not None:
            schema["pattern"] = self.pattern
        for keyword, bound in zip(_BOUNDS.get(self.type, ()), (self.min, self.max), strict=False):
            if bound is not None:
                schema[keyword] = bound
        return schema

    def _faults(self) -> Iterator[str]:
        if self.required and self.has_default:
            yield "a required parameter has no use for a default"
        if self.pattern is not None and self.type != "string":
            yield f"a pattern does not fit the type {self.type}"
        if self.type not in _BOUNDS and not (self.min is None and self.max is None):
            yield f"min and max do not fit the type {self.type}"


def parameter_list_schema(listed: Sequence[Any]) -> tuple[JsonObject, list[str]]:
    """Convert a list of parameters to a JSON Schema. Also return every fault in the list.

    The elements are `ToolParameter`s or their documents. Invalid ones are not in the schema.
    """
    properties: JsonObject = {}
    required: list[str] = []
    faults: list[str] = []
    for position, item in enumerate(listed):
        try:
            parameter = ToolParameter.model_validate(item)
        except ValidationError as error:
            place = f"parameters.{position}"
            faults += [
                f"{place}.{path}: {said}" if path else f"{place}: {said}"
                for path, said in faults_of(error)
            ]
            continue
        if parameter.name in properties:
            faults.append(f"parameters.{position}: {parameter.name!r} is in the list already")
            continue
        properties[parameter.name] = parameter.json_schema()
        if parameter.is_required:
            required.append(parameter.name)
    schema: JsonObject = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return schema, faults
