"""The arguments of executors: their models, their JSON Schemas, and the faults of a call's
arguments.

Host side. The models for the executors that are not added by parts are in `core/arguments.py`. If a
part adds an executor whose tools the engine runs in a sandbox, the executor's `ToolKind` names the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from fumehood.core.arguments import ARGUMENTS, Arguments, SentFile, faults_of_arguments
from fumehood.core.json_types import JsonObject
from fumehood.core.part import imported
from fumehood.parts import tool_kinds


def arguments_of(executor: str) -> type[Arguments] | None:
    """Return the model of an executor's arguments. Return None if each tool of the executor
    declares its own parameters.
    """
    return all_arguments().get(executor)


@lru_cache(maxsize=1)
def all_arguments() -> Mapping[str, type[Arguments]]:
    """Return the models of the arguments of all executors that have one, by the executor's name."""
    # Not a constant: parts may import this module while they are being loaded.
    kinds = tool_kinds().items()
    added = {name: imported(kind.arguments) for name, kind in kinds if kind.arguments is not None}
    return MappingProxyType({**added, **ARGUMENTS})


def argument_faults(executor: str, arguments: JsonObject) -> list[tuple[str, str]]:
    """Return all faults of a call's arguments. Each fault is a pair of a dotted path and a clause.

    The list is empty if the executor has no model of its arguments, or if its arguments are not
    checked on the host.
    """
    model = arguments_of(executor)
    if model is None or not model.is_checked_here:
        return []
    return faults_of_arguments(model, arguments)


def source_of(executor: str) -> str:
    """Return the name of the argument that contains the program to run. Return an empty text if the
    executor runs no program.
    """
    model = arguments_of(executor)
    return model.source if model is not None else ""


def without_empty_twins(executor: str, arguments: JsonObject) -> JsonObject:
    """Return a call's arguments without an empty argument that another argument excludes.

    If two arguments exclude each other and both are given, the empty one is left out. If both are
    empty, the second is left out. The same applies to the fields of each file in `files`.
    """
    model = arguments_of(executor)
    if model is None:
        return arguments
    # Some models and frameworks fill in every parameter, so they send empty arguments that the
    # caller did not intend.
    kept: JsonObject = _without_empty(arguments, model.exclusive)
    files = kept.get("files")
    if "files" in model.model_fields and isinstance(files, list):
        exclusive = SentFile.exclusive
        kept = {**kept, "files": [_without_empty(file, exclusive) for file in files]}
    return kept


def _without_empty(given: Any, exclusive: tuple[tuple[str, str], ...]) -> Any:
    for pair in exclusive if isinstance(given, dict) else ():
        if all(name in given for name in pair):
            # If both are empty, the first one stays: an empty `content` may be intended.
            empty = next((name for name in reversed(pair) if given[name] in ("", [])), None)
            given = {name: value for name, value in given.items() if name != empty}
    return given


def argument_schema(executor: str) -> JsonObject:
    """Return the JSON Schema of all arguments that an executor accepts. A tool has the same schema,
    unless its definition restricts the arguments further.

    In the schema, required arguments and alternatives come first.

    Raises:
        KeyError: there is no such executor, or its tools declare their own parameters.
    """
    model = all_arguments()[executor]
    schema = model.model_json_schema(schema_generator=_PlainSchema)
    inlined: JsonObject = _inlined(schema, schema.pop("$defs", {}))
    properties = inlined["properties"]
    first = (*inlined.get("required", ()), *model.one_of)
    inlined["properties"] = {name: properties[name] for name in (*first, *properties)}
    return inlined


class _PlainSchema(GenerateJsonSchema):
    """Generates schemas for language models: no titles, and no null for optional arguments."""

    def nullable_schema(self, schema: Any) -> Any:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> Any:
        return self.generate_inner(schema["schema"])

    def literal_schema(self, schema: Any) -> Any:
        return {"enum": schema["expected"]}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> Any:
        return {
            key: value
            for key, value in super().model_schema(schema).items()
            if key not in ("title", "description")
        }

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        """Return the value unchanged, so that fields keep the order that they have in the model."""
        return value


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(element, definitions) for element in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return {key: _inlined(value, definitions) for key, value in schema.items()}
