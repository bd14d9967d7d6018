"""Checks of an OpenAPI document, and of an answer against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

SPECIFICATION = Path(__file__).with_name("openapi-3.1.schema.json")
"""*Source*: the OpenAPI Initiative's schema of 3.1 documents, 2022-10-07 (Apache-2.0)."""

DOCUMENT = "urn:document"


def faults_of(document: dict[str, Any]) -> list[str]:
    """The document's faults by the specification's schema and by rules beyond it."""
    specification = json.loads(SPECIFICATION.read_text(encoding="utf-8"))
    faults = [e.message for e in Draft202012Validator(specification).iter_errors(document)]
    ids = [operation["operationId"] for _, _, operation in operations_of(document)]
    faults += [f"operation id {name!r} is given twice" for name in ids if ids.count(name) > 1]
    for path, method, operation in operations_of(document):
        declared = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        if declared != set(re.findall(r"{(\w+)}", path)):
            faults.append(f"{method} {path} declares {sorted(declared)}")
    for reference in _references(document):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node.get(part) if isinstance(node, dict) else None
        if node is None:
            faults.append(f"{reference} leads nowhere")
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    return faults


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation of each documented route."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def faults_of_answer(
    document: dict[str, Any], operation: dict[str, Any], status: int, body: Any
) -> list[str]:
    """The answer's deviations from the document."""
    response = operation["responses"].get(str(status))
    if response is None:
        return [f"the status {status} is not among {sorted(operation['responses'])}"]
    if "application/json" not in response["content"]:
        return [] if isinstance(body, bytes) else ["JSON where the bytes of a file belong"]
    if isinstance(body, bytes) and "text/event-stream" in response["content"]:
        return []
    schema = response["content"]["application/json"]["schema"]
    return [e.message for e in validator_of(document, schema).iter_errors(body)]


def validator_of(document: dict[str, Any], schema: Any) -> Draft202012Validator:
    """A validator for a schema of the document."""
    registry: Registry[Any] = Registry().with_resource(
        DOCUMENT, Resource.from_contents(document, default_specification=DRAFT202012)
    )
    return Draft202012Validator(_absolute(schema), registry=registry)


def _absolute(schema: Any) -> Any:
    """The schema with references into the document; those inside the document stay as they are."""
    if isinstance(schema, list):
        return [_absolute(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{DOCUMENT}{value}" if key == "$ref" else _absolute(value)
        for key, value in schema.items()
    }


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)
