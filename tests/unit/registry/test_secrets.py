"""Secrets are for the tools and hosts that the configuration binds them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood.core.errors import ExecutionError
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.index import Source, ToolIndex, tool_of_document
from fumehood.registry.secrets import RestSettings, SecretBindings, SecretSettings
from support.definitions import rest_document

pytestmark = pytest.mark.row("T5")

KEY = SecretSettings(env="KEY", tools=("weather",), hosts=("weather.example",))
HEADERS = {"authorization": "Bearer ${secret:key}"}


def bindings(value: str = "value-of-key", **changes: Any) -> SecretBindings:
    settings = {"key": KEY.model_copy(update=changes)}
    return SecretBindings(settings, RestSettings(allowed_hosts=("api.internal",)), {"KEY": value})


def faults(secrets: SecretBindings, **fields: Any) -> list[str]:
    return secrets.faults(parse_definition(rest_document(headers=HEADERS, **fields)))


def test_bound_secret_may_be_referred_to() -> None:
    assert faults(bindings()) == []
    assert faults(bindings(hosts=("weather.example:443",))) == []
    assert faults(bindings(), endpoint="https://WEATHER.example./?k=${secret:key}") == []


@pytest.mark.parametrize(
    ("secrets", "fields", "words"),
    [
        (SecretBindings(), {}, "has no secret 'key'"),
        (bindings(tools=("other",)), {}, "not bound to the tool weather"),
        (bindings(tools=("weath", "weather2", "*")), {}, "not bound to the tool weather"),
        (bindings(hosts=("other.example",)), {}, "not bound to the endpoint's host"),
        (bindings(hosts=("weather.example:8443",)), {}, "not bound to the endpoint's host"),
        (bindings(), {"endpoint": "https://weather.example.evil.example/"}, "not bound to the end"),
        (bindings(), {"endpoint": "https://evil.example/weather.example"}, "not bound to the end"),
        (bindings(), {"endpoint": "http://weather.example/"}, "cannot go to an http address"),
        (bindings(hosts=("api.internal",)), {"endpoint": "https://weather.example/"}, "not bound"),
    ],
)
def test_secret_that_is_not_bound_is_refused_by_name(
    secrets: SecretBindings, fields: dict[str, Any], words: str
) -> None:
    (fault,) = faults(secrets, **fields)
    assert fault.startswith("headers: ")
    assert "'key'" in fault
    assert words in fault


def test_secret_may_go_over_http_to_a_host_that_the_operator_allows() -> None:
    assert faults(bindings(hosts=("api.internal",)), endpoint="http://api.internal:8080/") == []


def test_every_entrance_of_a_definition_checks_its_secrets() -> None:
    document = rest_document(headers=HEADERS)
    with pytest.raises(InvalidDefinition, match="has no secret 'key'"):
        tool_of_document(document, Source.API)
    with pytest.raises(InvalidDefinition, match="has no secret 'key'"):
        ToolIndex().register(parse_definition(document), Source.PROGRAM)
    ToolIndex(bindings()).register(parse_definition(document), Source.PROGRAM)  # twin


def test_value_is_read_when_it_is_asked_for() -> None:
    definition = parse_definition(rest_document(headers=HEADERS))
    assert bindings().values(definition) == {"key": "value-of-key"}


@pytest.mark.parametrize(
    "value", ["", "short", "with\nline-end", "with\r\nheader: x", " space-before", "non-äscii-value",
              "a" * 4097, "nul-\0-character"]
)  # fmt: skip
def test_value_that_cannot_be_sent_is_refused_without_being_shown(value: str) -> None:
    definition = parse_definition(rest_document(headers=HEADERS))
    with pytest.raises(ExecutionError) as caught:
        bindings(value).values(definition)
    assert "'key'" in caught.value.message
    assert not value or value not in caught.value.message


def test_binding_is_checked_again_at_the_call() -> None:
    definition = parse_definition(rest_document(headers=HEADERS, name="other"))
    with pytest.raises(ExecutionError, match="not bound to the tool other"):
        bindings().values(definition)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"env": "A", "file": Path("/a")}, {"file": Path("relative")}, {"env": ""},
        {"env": "A", "tools": ()}, {"env": "A", "hosts": ()}, {"env": "A", "hosts": ("a b",)},
        {"env": "A", "hosts": ("https://a.example",)}, {"env": "A", "hosts": ("*.example",)},
        {"env": "A", "value": "literal"},
    ],
)  # fmt: skip
def test_settings_that_bind_nothing_sound_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SecretSettings.model_validate({"tools": ("a",), "hosts": ("a.example",), **fields})
