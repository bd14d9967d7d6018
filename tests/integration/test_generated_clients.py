"""Clients that generators of others make from the OpenAPI documents, unmodified: they call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import GENERATORS, NPM, Daemon
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS, make_document
from support.authority import Authority
from support.http import SocketClient
from support.network import free_port
from support.scripted_daemon import running_scripted_daemon

pytestmark = pytest.mark.row("D1")

PROGRAMS = Path(__file__).parents[1] / "generators"
PATIENCE_S = 300
DONE = "all calls were answered as documented\n"
SOCKETS = {"callers": OPERATIONS, "control": CONTROL_OPERATIONS}


def run(*command: str | Path, **environment: str) -> str:
    """The output of a program that succeeds."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each socket's document."""
    directory = tmp_path_factory.mktemp("documents")
    for (name, operations), title in zip(
        SOCKETS.items(), ("fumehood", "fumehood, control socket"), strict=True
    ):
        document = make_document(title, "1.0.0", operations)
        (directory / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


@dataclass
class Reached:
    """A daemon, and how a program reaches it over TCP."""

    daemon: Daemon
    url: str
    token: str


@pytest.fixture(scope="module")
def reached() -> Iterator[Reached]:
    port = free_port()
    with running_scripted_daemon(approver=True, tcp=f"127.0.0.1:{port}") as daemon:
        token = Authority(daemon.home, daemon.credential).token("generated")
        yield Reached(daemon, f"http://127.0.0.1:{port}", token)


@pytest.mark.needs("generators")
def test_openapi_python_client_generates_everything_and_calls(
    documents: Path, reached: Reached, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"post_hooks": []}', encoding="utf-8")
    for name in SOCKETS:
        said = run(
            GENERATORS / "openapi-python-client", "generate", "--path", documents / f"{name}.json",
            "--config", config, "--output-path", tmp_path / name,
        )  # fmt: skip
        # Without a warning: one tells of each part that is missing in the client.
        assert said.splitlines() == [f"Generating {tmp_path / name}"]
    daemon = reached.daemon
    said = run(
        GENERATORS / "python", PROGRAMS / "call.py", daemon.socket, daemon.control,
        daemon.credential, PYTHONPATH=f"{tmp_path / 'callers'}:{tmp_path / 'control'}",
    )  # fmt: skip
    assert said == DONE


@pytest.mark.needs("generators")
def test_models_of_datamodel_code_generator_read_the_answers(
    documents: Path, reached: Reached, tmp_path: Path
) -> None:
    for name in SOCKETS:
        run(
            GENERATORS / "datamodel-codegen", "--input", documents / f"{name}.json",
            "--input-file-type", "openapi", "--output", tmp_path / f"{name}.py",
            "--output-model-type", "pydantic_v2.BaseModel", "--target-python-version", "3.11",
            "--formatters", "builtin", "--disable-timestamp",
        )  # fmt: skip
    client = SocketClient(reached.daemon.socket)
    answers = {
        "ResultEnvelope": client.call("calculator", {"expression": "6 * 7"}).body,
        "Refusal": client.call("calculator", {"expression": "1 / 0"}).body,
        "CallListEnvelope": client.get("/v1/calls?limit=2").body,
        "Health": client.get("/v1/health").body,
    }
    client.close()
    program = (
        "import json, sys, callers, control\n"
        "for name, answer in json.load(sys.stdin).items():\n"
        "    getattr(callers, name).model_validate(answer, extra='forbid')\n"
        "    try: getattr(callers, name).model_validate({**answer, 'more': 1}, extra='forbid')\n"
        "    except ValueError: continue\n"
        "    raise SystemExit(f'{name} takes any field')\n"
        "control.Refusal.model_validate(json.loads(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [GENERATORS / "python", "-c", program, json.dumps(answers["Refusal"])],
        input=json.dumps(answers), cwd=tmp_path, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.needs("npm", "node")
def test_openapi_typescript_types_compile_and_call(
    documents: Path, reached: Reached, tmp_path: Path
) -> None:
    for name in SOCKETS:
        run(NPM / "openapi-typescript", documents / f"{name}.json", "-o", tmp_path / f"{name}.d.ts")
    (tmp_path / "node_modules").symlink_to(NPM.parent)
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    shutil.copy(PROGRAMS / "call.ts", tmp_path)
    run(
        NPM / "tsc", "--strict", "--noUncheckedIndexedAccess", "--target", "es2022", "--module",
        "nodenext", "--lib", "es2022,dom,dom.iterable", tmp_path / "call.ts",
    )  # fmt: skip
    said = run("node", tmp_path / "call.js", reached.url, reached.token)
    assert said == DONE
