"""`@tool`: declares a typed Python function as a tool.

Host side, the interface for tool authors. The function's types, defaults, `Annotated` constraints
and docstring become the tool's definition. The function can still be called. A JSON document with
the same content gives the same definition.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Unpack, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from fumehood.core.errors import ArgumentsRefused, faults_of
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.registry.definitions import InvalidDefinition, parse_definition

if TYPE_CHECKING:
    from fumehood.core.keyword_types import ToolKeywords

_GOOGLE_ARGUMENT = re.compile(r"^\s{2,}(\*{0,2}\w+)(?:\s*\([^)]*\))?:\s*(.+)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$")


class FunctionTool:
    """A function that is declared as a tool, together with its definition. Calling the object calls
    the function.
    """

    def __init__(
        self, function: Callable[..., Any], definition: ToolDefinition, model: type[BaseModel]
    ) -> None:
        self.definition = definition
        self.function = function
        self._model = model
        self.__doc__ = function.__doc__
        self.__name__ = definition.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the function is asynchronous. Such a function can be cancelled."""
        is_generator = inspect.isasyncgenfunction(self.function)
        return is_generator or inspect.iscoroutinefunction(self.function)

    async def invoke(self, arguments: JsonObject) -> Any:
        """Call the asynchronous function of this tool, and return its result. If the function
        streams, return its generator. The arguments must be valid under the tool's schema.

        Raises:
            ArgumentsRefused: the arguments break a rule of a declared type that JSON Schema cannot
                express.
        """
        returned = self.function(**self.bind(arguments))
        return await returned if inspect.isawaitable(returned) else returned

    def bind(self, arguments: JsonObject) -> dict[str, Any]:
        """Convert arguments to the declared types. Return them as keyword arguments for the
        function.

        Raises:
            ArgumentsRefused: the arguments break a rule of a declared type that JSON Schema cannot
                express.
        """
        try:
            typed = self._model.model_validate(arguments)
        except ValidationError as error:
            faults = faults_of(error)
            words = "; ".join(f"{field}: {said}" for field, said in faults)
            fields = [field for field, _ in faults]
            raise ArgumentsRefused(f"The arguments are wrong: {words}.", fields=fields) from None
        extra = typed.model_extra or {}
        given = {
            str(field.alias): getattr(typed, name)
            for name, field in type(typed).model_fields.items()
        }
        return {**given, **extra}


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    **fields: Unpack[ToolKeywords],
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **fields: Unpack[ToolKeywords]
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Declare a function as a tool: `@tool` or `@tool(dangerous=True, cost_per_use="0.01", …)`.

    `fields` are fields of `ToolDefinition`. The defaults for name, description and parameters are
    taken from the function.

    Raises:
        InvalidDefinition: the declaration has faults. The error lists all of them.
    """
    if function is None:
        return lambda decorated: _declare(decorated, dict(fields))
    return _declare(function, dict(fields))


def _declare(function: Callable[..., Any], fields: Mapping[str, Any]) -> FunctionTool:
    name = str(fields.get("name", function.__name__))
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    if not summary and "description" not in fields:
        raise InvalidDefinition(name, ["description: write a docstring that says what it does"])
    model = _arguments_model(function, name)
    document: JsonObject = {
        "name": name,
        "description": summary,
        "parameters": _parameters_schema(model, described),
        **fields,
    }
    definition = parse_definition(document)
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if definition.streaming and not is_generator:
        raise InvalidDefinition(name, ["streaming: the function must yield its parts"])
    return FunctionTool(function, definition, model)


def _arguments_model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidDefinition(name, [f"parameters: an annotation is wrong: {error}"]) from None
    fields: dict[str, Any] = {}
    extra: typing.Literal["allow", "ignore"] = "ignore"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra = "allow"
            continue
        if parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.POSITIONAL_ONLY,
        ):
            raise InvalidDefinition(
                name, [f"parameters: {parameter.name!r} must be accepted by keyword"]
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        # Fields get numbers as names: not every parameter's name is valid for a model's field.
        fields[f"p{len(fields)}"] = (
            hints.get(parameter.name, Any),
            Field(default, alias=parameter.name),
        )
    return create_model(
        f"{name}_arguments", __config__=ConfigDict(extra=extra, protected_namespaces=()), **fields
    )


class _ToolSchema(GenerateJsonSchema):
    """Pydantic's generator for JSON Schema, changed to omit keywords that language models do not
    need.
    """

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Describe a decimal as a number. Pydantic's own schema contains a pattern with look-ahead,
        which RE2 does not support.
        """
        names = {
            "gt": "exclusiveMinimum",
            "ge": "minimum",
            "lt": "exclusiveMaximum",
            "le": "maximum",
        }
        bounds = {
            keyword: float(schema[key])  # type: ignore[literal-required]
            for key, keyword in names.items()
            if key in schema
        }
        return {"type": "number", **bounds}

    def encode_default(self, dft: Any) -> Any:
        """Encode the default of a decimal as a number."""
        return float(dft) if isinstance(dft, Decimal) else super().encode_default(dft)

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False, so that titles are omitted. A title only repeats the field's name."""
        return False


def _parameters_schema(model: type[BaseModel], described: Mapping[str, str]) -> JsonObject:
    schema = model.model_json_schema(schema_generator=_ToolSchema)
    schema.pop("title", None)
    schema.setdefault("properties", {})
    for name, words in described.items():
        if name in schema["properties"]:
            schema["properties"][name].setdefault("description", words)
    return schema


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring. Return the text before the first section, and the descriptions of the
    parameters by name.
    """
    summary: list[str] = []
    described: dict[str, str] = {}
    section: str | None = None
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading.group(1)
        elif section in ("Args", "Arguments", "Parameters"):
            if match := _GOOGLE_ARGUMENT.match(line):
                described[match.group(1).lstrip("*")] = match.group(2).strip()
        elif section is None:
            summary.append(line)
    return "\n".join(summary).strip(), described
