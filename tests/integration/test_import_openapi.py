"""`fumehood tools import openapi`: fetching, generated definitions, files and messages."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fumehood.cli.main import app
from fumehood.definition_files.directory import ToolDirectory
from fumehood.registry.secrets import RestSettings, SecretBindings, SecretSettings
from fumehood.rest import import_openapi
from support.definition_files import DefinitionDirectory
from support.definitions import rest_document
from upstream import Reply, Upstream, bomb, redirect, running_upstream

pytestmark = pytest.mark.row("R4", "T5")

SHOP: dict[str, Any] = {
    "openapi": "3.0.3",
    "servers": [{"url": "/v1"}],
    "security": [{"shop-key": []}],
    "paths": {
        "/orders": {"get": {"operationId": "list_orders"}, "post": {"operationId": "add_order"}},
        "/status": {"get": {"operationId": "read_status", "security": []}},
    },
    "components": {
        "securitySchemes": {"shop-key": {"type": "apiKey", "in": "header", "name": "X-Key"}}
    },
}
NAMES = ["list_orders", "add_order", "read_status"]


def run(*arguments: str | Path, stdin: bytes = b"", **variables: str) -> Result:
    command = ["tools", "import", "openapi", *map(str, arguments)]
    return CliRunner(env=variables).invoke(app, command, input=stdin)


def put(directory: Path, **fields: Any) -> Path:
    file = directory / "shop.json"
    file.write_text(json.dumps({**SHOP, "servers": [{"url": "https://shop.example"}], **fields}))
    return file


def printed(done: Result) -> list[str]:
    assert done.exit_code == 0, done.stderr
    return [tool["name"] for tool in json.loads(done.stdout)["tools"]]


def configuration(done: Result) -> dict[str, Any]:
    """The suggested configuration, parsed from the output."""
    return tomllib.loads(done.stderr.partition("if the hosts are right:\n")[2])


def bindings(settings: dict[str, Any]) -> SecretBindings:
    secrets = {name: SecretSettings(**row) for name, row in settings["secrets"].items()}
    return SecretBindings(secrets, RestSettings(**settings.get("rest", {})), {})


# -- reading -------------------------------------------------------------------------------


def test_redirect_to_another_private_address_is_refused(upstream: Upstream) -> None:
    """SSRF: a document's server must not reach other services through the operator's host."""
    body = json.dumps(SHOP).encode()
    with running_upstream() as other:
        other.script("/secret", Reply(body=body))
        upstream.script("/a", redirect(f"{other.url}/secret"))
        done = run(f"{upstream.url}/a")
        assert (done.exit_code, done.stdout) == (2, "")
        assert "not public" in done.stderr
        assert other.requests == []
        upstream.script("/b", redirect("/c"))
        upstream.script("/c", Reply(body=body))
        assert printed(run(f"{upstream.url}/b")) == NAMES  # twin


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(404), "the answer has the status 404"),
        (Reply(body=b"<html>"), "is not an OpenAPI document"),
        (bomb(17), "larger than 16 MB"),
        (Reply(reset=True), "cannot be fetched"),
        (Reply(body=b'{"swagger": "2.0"}'), "Swagger 2.0, which is not supported"),
    ],
)
def test_invalid_openapi_document_is_a_one_line_usage_error(
    upstream: Upstream, reply: Reply, words: str
) -> None:
    upstream.script("/a", reply)
    done = run(f"{upstream.url}/a")
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_server_without_answer_ends_the_import_at_its_deadline(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_openapi, "DEADLINE_S", 0.2)
    upstream.script("/a", Reply(held=True))
    done = run(f"{upstream.url}/a")
    assert done.exit_code == 2
    assert "did not arrive" in done.stderr


def test_document_is_read_from_a_file_or_standard_input(tmp_path: Path) -> None:
    file = put(tmp_path)
    assert printed(run(file)) == NAMES
    assert printed(run("-", stdin=file.read_bytes())) == NAMES
    yaml = tmp_path / "shop.yaml"
    yaml.write_bytes(file.read_bytes())
    assert printed(run(yaml, "--only", "read_*")) == ["read_status"]
    for missing in (tmp_path / "none.json", tmp_path):
        done = run(missing)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "cannot be read" in done.stderr
    assert run("https://user:word@a.example/x").exit_code == 2
    misspelt = run(file, "--only", "list_order")
    assert misspelt.stderr.endswith("document. Did you mean 'list_orders' or 'add_order'?\n")


# -- writing -------------------------------------------------------------------------------


def test_written_definitions_are_private_and_load_with_the_suggested_configuration(
    tmp_path: Path,
) -> None:
    out = tmp_path / "tools"
    umask = os.umask(0)
    try:
        done = run(put(tmp_path), "--out", out)
    finally:
        os.umask(umask)
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"3 definitions are in {out}." in done.stderr
    assert sorted(file.name for file in out.iterdir()) == sorted(f"{name}.json" for name in NAMES)
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o600}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    loaded = ToolDirectory(out, secrets=bindings(configuration(done))).load()
    assert loaded.faults == ()
    assert sorted(tool.definition.name for tool in loaded.tools) == sorted(NAMES)
    without = ToolDirectory(out).load()
    assert [tool.definition.name for tool in without.tools] == ["read_status"]


def test_existing_definition_is_not_replaced_without_force_and_nothing_is_written(
    tmp_path: Path, definitions: DefinitionDirectory
) -> None:
    file, out = put(tmp_path), definitions.path
    definitions.put("read_status.json", b"mine")
    done = run(file, "--out", out)
    assert done.exit_code == 2
    assert "read_status.json is there already (--force replaces it). Nothing was" in done.stderr
    assert [(f.name, f.read_bytes()) for f in out.iterdir()] == [("read_status.json", b"mine")]
    assert run(file, "--out", out, "--force").exit_code == 0
    assert run(file, "--out", out, "--force").exit_code == 0
    assert json.loads((out / "read_status.json").read_bytes())["name"] == "read_status"
    assert len(list(out.iterdir())) == 3


def test_symlink_in_place_of_a_definition_is_replaced_not_followed(
    tmp_path: Path, definitions: DefinitionDirectory
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    (definitions.path / "read_status.json").symlink_to(target)
    assert run(put(tmp_path), "--out", definitions.path).exit_code == 2
    assert run(put(tmp_path), "--out", definitions.path, "--force").exit_code == 0
    assert target.read_bytes() == b"mine"
    assert not (definitions.path / "read_status.json").is_symlink()


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_imported_tool_cannot_shadow_a_tool_defined_in_another_file(
    tmp_path: Path, definitions: DefinitionDirectory, force: list[str]
) -> None:
    """Two files that define one name are both left out, so a document could disable a tool."""
    headers = {"authorization": "Bearer ${secret:mine}"}
    definitions.put("mine.json", rest_document(name="read_status", headers=headers))
    done = run(put(tmp_path), "--out", definitions.path, *force)
    assert done.exit_code == 2
    assert "another file there defines read_status already; use --prefix" in done.stderr
    assert len(list(definitions.path.iterdir())) == 1
    prefixed = run(put(tmp_path), "--out", definitions.path, "--prefix", "shop_", *force)
    assert prefixed.exit_code == 0
    assert list(configuration(prefixed)["secrets"]) == ["shop_shop-key"]


def test_world_or_group_writable_output_directory_is_refused(
    tmp_path: Path, definitions: DefinitionDirectory
) -> None:
    definitions.path.chmod(0o770)
    done = run(put(tmp_path), "--out", definitions.path)
    assert done.exit_code == 2
    assert "can be written by others" in done.stderr
    assert list(definitions.path.iterdir()) == []
    for wrong in (tmp_path / "shop.json", tmp_path / "not" / "there"):
        assert run(put(tmp_path), "--out", wrong).exit_code == 2


def test_import_exceeding_the_file_limit_is_refused(
    tmp_path: Path, definitions: DefinitionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_openapi, "MAX_FILES", 3)
    definitions.put("other.json", rest_document())
    done = run(put(tmp_path), "--out", definitions.path)
    assert done.exit_code == 2
    assert "more than 3 files; choose tools with --only" in done.stderr
    assert run(put(tmp_path), "--out", definitions.path, "--only", "*_orders").exit_code == 0


# -- remarks -------------------------------------------------------------------------------


def test_control_characters_in_a_document_never_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\u202e\nNo tool could be made"
    paths = {
        "/ok": {"get": {"summary": evil, "tags": [evil], "operationId": evil}},
        f"/{evil}": {"get": {}, "post": {"requestBody": {"content": {evil: {}}}}, "trace": {}},
        "/b": {"get": {"security": [{evil: []}], "parameters": [{"name": evil, "in": evil}]}},
        "/c": {"get": {"servers": [{"url": f"https://a.example/{evil}"}]}},
        "/d": {"post": {"requestBody": {"$ref": evil}}},
    }
    done = run(put(tmp_path, paths=paths, security=[]))
    assert len(printed(done)) == 1
    assert len(done.stderr.splitlines()) == 7
    for char in ("\x1b", "\u202e"):
        assert char not in done.stdout + done.stderr


def test_saved_definition_escapes_unprintable_characters(tmp_path: Path) -> None:
    choices = ["\x9b2Jshown", "\u202enwohs", "grün"]
    parameters = [{"name": "colour", "in": "query", "schema": {"enum": choices}}]
    operation = {"operationId": "paint", "parameters": parameters, "security": []}
    file = put(tmp_path, paths={"/x": {"get": operation}})
    assert run(file, "--out", tmp_path / "tools").exit_code == 0
    text = (tmp_path / "tools" / "paint.json").read_text()
    assert "grün" in text
    assert all(char.isprintable() for char in text.replace("\n", ""))
    assert json.loads(text)["parameters"]["properties"]["colour"]["enum"] == choices


def test_private_host_named_only_by_the_document_is_warned_about_not_allowed(
    tmp_path: Path,
) -> None:
    file = put(tmp_path, servers=[{"url": "http://169.254.169.254/latest"}])
    done = run(file, "--only", "read_status")
    assert "Caution: the document chose 169.254.169.254, not public" in done.stderr
    assert configuration(done) == {}
    lines = done.stderr.splitlines()
    assert lines[-2:] == ["# [rest]", '# allowed_hosts = ["169.254.169.254"]']
    uncommented = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines[-2:]))
    assert uncommented == {"rest": {"allowed_hosts": ["169.254.169.254"]}}
    named = run(file, "--only", "read_status", "--server", "http://127.0.0.1:8000")
    assert configuration(named) == {"rest": {"allowed_hosts": ["127.0.0.1:8000"]}}
    secret = run(file, "--server", "http://shop.example")  # in clear, with a secret
    assert configuration(secret)["rest"] == {"allowed_hosts": ["shop.example"]}
    public = run(file, "--server", "https://shop.example")
    assert "rest" not in configuration(public)


MANY: dict[str, Any] = {f"/{number}": {"get": {}} for number in range(2000)}


@pytest.mark.parametrize(
    ("limit", "most", "fields"),
    [
        ("WORK_S", 0.5, {"security": [{"unknown": []}] * 50_000, "paths": MANY}),
        (
            "MEMORY_MB",
            64,
            {
                "security": [],
                "components": {
                    "schemas": {"E": {"type": "string", "nullable": True, "enum": ["x"] * 100_000}}
                },
                "paths": {
                    "/x": {
                        "get": {
                            "parameters": [
                                {
                                    "name": f"p{number}",
                                    "in": "query",
                                    "schema": {"$ref": "#/components/schemas/E"},
                                }
                                for number in range(1000)
                            ]
                        }
                    }
                },
            },
        ),
    ],
)
def test_small_document_with_excessive_time_or_memory_cost_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    most: float,
    fields: dict[str, Any],
) -> None:
    monkeypatch.setattr(import_openapi, limit, most)
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)
    done = run(put(tmp_path, **fields))
    assert done.exit_code == 2
    assert "to import" in done.stderr
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)) == before
    monkeypatch.undo()
    assert printed(run(put(tmp_path))) == NAMES  # twin
