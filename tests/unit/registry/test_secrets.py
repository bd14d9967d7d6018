"""Secrets are for the tools and hosts that the configuration binds them to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keyring
import keyring.backends.fail
import keyring.errors
import pytest
from keyring.backend import KeyringBackend
from pydantic import ValidationError

from fumehood.config import Config
from fumehood.core.errors import ExecutionError
from fumehood.engine import Engine
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.index import Source, ToolIndex, tool_of_document
from fumehood.registry.secrets import KeyringEntry, RestSettings, SecretBindings, SecretSettings
from support.definitions import rest_document
from support.file_keyring import FileKeyring
from support.recording import RecordingLog

pytestmark = pytest.mark.row("T5")

KEY = SecretSettings(env="KEY", tools=("weather",), hosts=("weather.example",))
ENTRY = {"service": "weather.example", "username": "fumehood"}
HEADERS = {"authorization": "Bearer ${secret:key}"}


def bindings(
    value: str = "value-of-key", log: RecordingLog | None = None, **changes: Any
) -> SecretBindings:
    settings = {"key": KEY.model_copy(update=changes)}
    rest = RestSettings(allowed_hosts=("api.internal",))
    return SecretBindings(settings, rest, {"KEY": value}, log or RecordingLog())


def faults(secrets: SecretBindings, **fields: Any) -> list[str]:
    return secrets.faults(parse_definition(rest_document(headers=HEADERS, **fields)))


def test_bound_secret_can_be_referenced() -> None:
    assert faults(bindings()) == []
    assert faults(bindings(hosts=("weather.example:443",))) == []
    assert faults(bindings(), endpoint="https://WEATHER.example./?k=${secret:key}") == []
    assert faults(bindings(hosts=("api.internal",)), endpoint="http://api.internal:8080/") == []


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
def test_unbound_secret_is_refused_by_name(
    secrets: SecretBindings, fields: dict[str, Any], words: str
) -> None:
    (fault,) = faults(secrets, **fields)
    assert fault.startswith("headers: ")
    assert "'key'" in fault
    assert words in fault


def test_every_way_to_register_a_tool_checks_its_secrets() -> None:
    document = rest_document(headers=HEADERS)
    with pytest.raises(InvalidDefinition, match="has no secret 'key'"):
        tool_of_document(document, Source.API)
    with pytest.raises(InvalidDefinition, match="has no secret 'key'"):
        ToolIndex().register(parse_definition(document), Source.PROGRAM)
    ToolIndex(bindings()).register(parse_definition(document), Source.PROGRAM)  # twin


def test_secret_of_a_tool_without_an_endpoint_is_refused() -> None:
    document = {"name": "weather", "type": "MCP", "description": "A.", "headers": HEADERS}
    with pytest.raises(InvalidDefinition, match="the definition has no endpoint"):
        tool_of_document(document, Source.API, bindings())


@pytest.mark.parametrize(
    "value", ["", "short", "with\nline-end", "with\r\nheader: x", " space-before", "non-äscii-value",
              "a" * 4097, "nul-\0-character"]
)  # fmt: skip
def test_unusable_secret_value_is_refused_without_revealing_it(value: str) -> None:
    """The remedy is the operator's, so it is in the log, and the caller gets none."""
    definition, log = parse_definition(rest_document(headers=HEADERS)), RecordingLog()
    with pytest.raises(ExecutionError) as caught:
        bindings(value, log).values(definition)
    assert "'key' has no usable value, so nothing was sent" in caught.value.message
    assert "environment" not in caught.value.message
    (event,) = log.named("secret.unusable")
    assert "Set its environment variable KEY to a line" in event["remedy"]
    assert not value or value not in caught.value.message + str(event)


@pytest.mark.parametrize(("value", "expected"), [("short", ["key"]), ("value-of-key", [])])
def test_engine_at_its_start_logs_secrets_without_a_usable_value(
    value: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a human is asked first, and the call fails after the yes."""
    monkeypatch.setenv("KEY", value)
    log = RecordingLog()
    Engine(config=Config(home=tmp_path / "state", secrets={"key": KEY}), log=log)
    events = log.named("secret.unusable")
    assert [event["secret"] for event in events] == expected
    assert all("environment variable KEY to a line" in event["remedy"] for event in events)


def test_keyring_is_not_read_before_a_call() -> None:
    keyring_key = bindings(env=None, keyring=KeyringEntry(**ENTRY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyring, "get_password", lambda *_: pytest.fail("it was read"))
        assert keyring_key.report_unusable() == []


def test_secret_binding_is_checked_again_at_the_call() -> None:
    definition = parse_definition(rest_document(headers=HEADERS, name="other"))
    with pytest.raises(ExecutionError, match="not bound to the tool other"):
        bindings().values(definition)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"env": "A", "file": Path("/a")}, {"file": Path("relative")}, {"env": ""},
        {"env": "A", "tools": ()}, {"env": "A", "hosts": ()}, {"env": "A", "hosts": ("a b",)},
        {"env": "A", "hosts": ("https://a.example",)}, {"env": "A", "hosts": ("*.example",)},
        {"env": "A", "value": "literal"}, {"env": "A", "keyring": ENTRY},
        {"file": Path("/a"), "keyring": ENTRY}, {"keyring": {"service": "a"}},
        {"keyring": {"service": "", "username": "b"}}, {"keyring": "a/b"},
    ],
)  # fmt: skip
def test_invalid_secret_binding_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SecretSettings.model_validate({"tools": ("a",), "hosts": ("a.example",), **fields})


# -- keyrings ------------------------------------------------------------------------------


@pytest.fixture
def file_keyring(tmp_path: Path) -> Iterator[FileKeyring]:
    """A keyring in a file, in the place of the user's own."""
    before = keyring.get_keyring()
    backend = FileKeyring(tmp_path / "keyring.json")
    keyring.set_keyring(backend)
    yield backend
    keyring.set_keyring(before)


def from_keyring(log: RecordingLog | None = None) -> dict[str, str]:
    secrets = bindings(log=log, env=None, keyring=KeyringEntry.model_validate(ENTRY))
    return secrets.values(parse_definition(rest_document(headers=HEADERS)))


def test_secret_is_read_from_its_keyring_entry(file_keyring: FileKeyring) -> None:
    keyring.set_password("weather.example", "another", "not-this-value")
    keyring.set_password("weather.example", "fumehood", "value-of-keyring")
    assert from_keyring() == {"key": "value-of-keyring"}
    keyring.set_password("weather.example", "fumehood", "changed-value")
    assert from_keyring() == {"key": "changed-value"}


def test_missing_or_unusable_keyring_entry_has_a_clear_error(file_keyring: FileKeyring) -> None:
    with pytest.raises(ExecutionError, match=r"'key' cannot be read.*no such entry"):
        from_keyring()
    keyring.set_password("weather.example", "fumehood", "short")
    log = RecordingLog()
    with pytest.raises(ExecutionError, match="'key' has no usable value") as caught:
        from_keyring(log)
    assert "short" not in caught.value.message
    (event,) = log.named("secret.unusable")
    assert "Set its keyring's entry to a line" in event["remedy"]


class Locked(FileKeyring):
    def get_password(self, service: str, username: str) -> str | None:
        raise keyring.errors.KeyringLocked("hidden words")


class Broken(FileKeyring):
    def get_password(self, service: str, username: str) -> str | None:
        raise ZeroDivisionError("hidden words")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (keyring.backends.fail.Keyring, "no keyring on this host"),
        (Locked, "is locked"),
        (Broken, "backend failed: ZeroDivisionError"),
    ],
)
def test_unreadable_keyring_error_hides_its_details(
    file_keyring: FileKeyring, backend: type[KeyringBackend], words: str
) -> None:
    keyring.set_keyring(backend())
    with pytest.raises(ExecutionError, match=words) as caught:
        from_keyring()
    assert "hidden" not in caught.value.message
    assert caught.value.__cause__ is None


def test_missing_keyring_package_is_told_to_the_operator(
    file_keyring: FileKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.registry.secrets.find_spec", lambda name: None)
    log = RecordingLog()
    with pytest.raises(ExecutionError, match="the extra for keyrings is not installed"):
        from_keyring(log)
    (event,) = log.named("secret.unusable")
    assert event["remedy"] == "Install it: pip install 'PATH_OF_THE_CHECKOUT[keyring]'."


def test_locked_keyring_blocks_only_one_call(
    file_keyring: FileKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, unlocked = threading.Event(), threading.Event()

    class Asks(FileKeyring):
        def get_password(self, service: str, username: str) -> str | None:
            begun.set()
            assert unlocked.wait(20)
            return "value-of-keyring"

    keyring.set_keyring(Asks())
    monkeypatch.setattr("fumehood.registry.secrets.KEYRING_WAIT_S", 0.01)
    secrets = bindings(env=None, keyring=KeyringEntry.model_validate(ENTRY))
    definition = parse_definition(rest_document(headers=HEADERS))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(secrets.values, definition)
        assert begun.wait(20)
        with pytest.raises(ExecutionError, match="does not answer"):
            secrets.values(definition)
        unlocked.set()
        assert first.result(20) == {"key": "value-of-keyring"}
    assert secrets.values(definition) == {"key": "value-of-keyring"}
