"""Each part is deleted from a copy of the engine, and what is left is imported.

Without a part that is marked `deletable` every other module can be imported, and the kernel keeps
its contract (`tests/contract`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import anyio
import pytest

from conftest import AVAILABLE, CLEAN_ENVIRONMENT
from fumehood import Config, Engine
from fumehood.budgets.settings import BudgetRule
from fumehood.core.identity import Principal, Scope
from fumehood.core.usage_table import BudgetStanding
from fumehood.policy.service import HARMLESS_PASSES
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall
from support.asking import add_approvers
from support.definitions import rest_document
from support.parts import PACKAGE, Code, Line, Part, module_of, read_parts, with_dependents
from support.unplugged import Importer, Tree, Unfit, copy_of_checkout, importing

PARTS = read_parts()
OF_KERNEL = f"{PACKAGE}/core/errors.py"


@cache
def code() -> Code:
    return Code()


@cache
def contract() -> list[str]:
    """The arguments of pytest for what this host can try of the contract."""
    return ["-x", "-q", *([] if AVAILABLE["landlock"]() else ["-k", "not jailed"])]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy with all parts."""
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def importer(whole: Tree) -> Iterator[Importer]:
    with importing(whole) as running:
        yield running


@pytest.fixture
def tree(whole: Tree, tmp_path: Path) -> Tree:
    """A copy that a test may change."""
    return whole.copy(tmp_path / "checkout")


def test_all_modules_can_be_imported_if_nothing_is_deleted(tree: Tree, importer: Importer) -> None:
    nothing = PARTS["console"].model_copy(update={"files": ()})
    modules = code().modules_without(nothing)
    assert len(modules) > 300
    assert importer.try_out(tree, modules).broken == {}


@pytest.mark.parametrize("name", PARTS)
def test_rest_of_the_engine_works_without_a_part(name: str, tree: Tree, importer: Importer) -> None:
    part, deleted = PARTS[name], with_dependents(name, PARTS)
    tree.delete(deleted)
    modules = code().modules_without(deleted)
    ending = importer.try_out(tree, modules, contract=contract() if part.deletable else None)
    importing = {module_of(file) for file in code().count(part).importing}
    why = "\n".join(f"{module}: {error}" for module, error in ending.broken.items())
    # What was counted is what breaks, and nothing else does.
    assert ending.broken.keys() >= importing.intersection(modules)
    assert importing.intersection(modules) or not ending.broken, why
    assert not (part.deletable and ending.broken), why
    assert ending.contract is None, f"The kernel fails without {name}:\n{ending.contract}"


NODES = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("file", "variables", "arguments", "words"),
    [
        (f"[cluster]\naddress = '{NODES}'", {}, [], "cluster: there is no such key in "),
        (
            "",
            {"FUMEHOOD_CLUSTER__ADDRESS": NODES},
            [],
            "cluster: there is no such key (variable FUMEHOOD_CLUSTER__ADDRESS)",
        ),
        (
            "",
            {"FUMEHOOD_CLUSTER": json.dumps({"address": NODES})},
            [],
            "cluster: there is no such key (variable FUMEHOOD_CLUSTER)",
        ),
        ("", {}, ["--cluster", NODES], "No such option: --cluster"),
    ],
    ids=["file", "variable", "json", "option"],
)
def test_configuration_that_names_nodes_is_refused_without_the_cluster(
    file: str, variables: dict[str, str], arguments: list[str], words: str, tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["cluster"])
    (home / "config.toml").write_text(file)
    refused = serve(tree, home, *arguments, FUMEHOOD_CONFIG=str(home / "config.toml"), **variables)
    assert refused.returncode == 2, refused.stderr
    assert words in refused.stderr
    assert not (home / "state.db").exists()


WITHOUT_INTERPRETER = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine, InvalidDefinition, ToolDefinition
from fumehood.core.errors import EngineError
from fumehood.pipeline.plan import executor_of

SUMS = {"name": "sums", "description": "Add.", "executor": sys.argv[1],
        "parameters": {"properties": {"expression": {"type": "string"}}}}

def refused(make, *given, **named):
    try:
        make(*given, **named)
    except (EngineError, InvalidDefinition) as error:
        return type(error).__name__, error.message

async def main():
    async with Engine(config=Config(home=Path(sys.argv[2]))) as engine:
        called = await engine.call("calculator", {"expression": "1 + 1"})
        ready = engine.ready()
        print(json.dumps({
            "called": called.error.code, "walls": list(engine.walls), "ready": ready.status,
            "faults": [fault.reason for fault in engine.load_faults],
            "given": refused(Engine, [SUMS]),
            "planned": refused(executor_of, ToolDefinition(**SUMS)),
        }))

anyio.run(main)
"""


@pytest.mark.parametrize("executor", ["expression", "restricted_python"])
def test_tools_of_the_interpreter_are_refused_without_it(
    executor: str, tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["interpreter"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_INTERPRETER, executor, str(home)]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["called"], found["walls"], found["ready"]) == ("TOOL_NOT_FOUND", [], "ready")
    assert found["faults"] == []
    kind, message = found["given"]
    assert kind == "InvalidDefinition"
    assert f"executor: {executor!r} is not enforced by this version" in message
    kind, message = found["planned"]
    assert kind == "SandboxUnavailable"
    assert f"no sandbox for the executor {executor!r}, and never falls back" in message


def test_tool_whose_entry_point_outlives_the_interpreter_is_left_out(
    tree: Tree, home: Path
) -> None:
    own = [line for line in PARTS["interpreter"].lines if "fumehood_tools" not in line.text]
    tree.delete(PARTS["interpreter"].model_copy(update={"lines": own}))
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_INTERPRETER, "expression", str(home)]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["called"], found["ready"]) == ("TOOL_NOT_FOUND", "ready")
    assert len(found["faults"]) == 2  # the calculator and restricted programs


def test_doctor_examines_a_host_without_the_interpreter(tree: Tree, home: Path) -> None:
    tree.delete(PARTS["interpreter"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def doctor(*options: str) -> Any:
        command = [sys.executable, "-m", "fumehood.cli.main", "doctor", "--json", *options]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert not ran.stderr, ran.stderr
        return json.loads(ran.stdout)

    checks = {finding["check"] for finding in doctor()}
    assert {"platform", "python", "jail: memory"} <= checks  # the twins
    assert not {"asteval", "RestrictedPython", "interpreter: memory"} & checks
    (card,) = doctor("--attack", "--wall", "interpreter")["walls"]
    assert (card["wall"], card["verdict"]) == ("interpreter", "absent")


WITHOUT_DOCKER = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine

async def main():
    async with Engine(config=Config(home=Path(sys.argv[1]))) as engine:
        ran = await engine.call("run_python", {"code": "1 + 1"})
        added = await engine.call("calculator", {"expression": "1 + 1"})
        print(json.dumps({
            "code": ran.error.code, "words": ran.error.message, "retry": ran.error.retryable,
            "twin": added.data["value"], "ready": engine.ready().walls["container"].ready,
        }))

anyio.run(main)
"""


def test_programs_are_refused_without_docker(whole: Tree, tree: Tree, home: Path) -> None:
    tree.delete(with_dependents("docker", PARTS))
    tree.delete(with_dependents("direct", PARTS))  # it would run them

    def run(used: Tree, *arguments: str) -> Any:
        known = {
            **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "DOCKER_HOST": "unix:///none",
            "PYTHONPATH": ":".join(used.import_path),
        }  # fmt: skip
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert ran.stdout, ran.stderr
        return json.loads(ran.stdout)

    found = run(tree, "-c", WITHOUT_DOCKER, str(home))
    assert found.pop("words") == (
        "Containers are unavailable; nothing ran. "
        "The part of the engine that runs containers is not installed. "
        "Install fumehood with its part docker."
    )
    refused = {"code": "SANDBOX_UNAVAILABLE", "retry": False, "twin": 2, "ready": False}
    assert found == refused
    checks = {finding["check"] for finding in run(tree, *DOCTOR)}
    assert "jail: memory" in checks  # the twin
    assert not [check for check in checks if check.startswith(("docker", "image:"))]
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "fumehood.cli.main", "images", "list"]
    listed = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert listed.returncode == 4
    assert "The part of the engine that runs containers is not installed." in listed.stderr
    for wall in ("container", "gateway"):
        (card,) = run(tree, *DOCTOR, "--attack", "--wall", wall)["walls"]
        assert (card["wall"], card["verdict"]) == (wall, "absent")
    control = run(whole, "-c", WITHOUT_DOCKER, str(home))
    assert "Docker is not running" in control.pop("words")
    assert control == {**refused, "retry": True}


DOCTOR = ("-m", "fumehood.cli.main", "doctor", "--json")


WITHOUT_GATEWAY = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.testing import CONTAINER_LIMITS, FakeWall

async def main():
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    config = Config(home=Path(sys.argv[1]), sessions={"image": "python"})
    async with Engine(config=config, container=wall) as engine:
        reaching = await engine.sessions.create(engine.owner, network=["example.com"])
        other = await engine.sessions.create(engine.owner)
        ways = {
            "option": {"network": ["example.com"]}, "session": {"session_id": reaching.id},
            "twin": {}, "twin of session": {"session_id": other.id},
        }
        answers = {
            way: await engine.call("run_python", {"code": way}, **options)
            for way, options in ways.items()
        }
        print(json.dumps({
            "codes": {way: one.error and one.error.code for way, one in answers.items()},
            "words": [one.error.message for one in answers.values() if one.error],
            "runs": [run.arguments["code"] for run in wall.runs],
        }))

anyio.run(main)
"""


def test_programs_that_want_hosts_are_refused_without_the_gateway(tree: Tree, home: Path) -> None:
    tree.delete(with_dependents("gateway", PARTS))
    (home / "config.toml").write_text('[gateway]\nhosts = ["example.com"]\n')
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert refused.returncode == 2, refused.stderr
    assert "gateway: there is no such key in " in refused.stderr
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}

    def python(*arguments: str) -> Any:
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert not ran.stderr, ran.stderr
        return json.loads(ran.stdout)

    found = python("-c", WITHOUT_GATEWAY, str(home))
    assert all("what the call needs (network)" in words for words in found.pop("words"))
    assert found == {
        "codes": {
            "option": "SANDBOX_UNAVAILABLE", "session": "SANDBOX_UNAVAILABLE", "twin": None,
            "twin of session": None,
        },
        "runs": ["twin", "twin of session"],
    }  # fmt: skip
    attack = ("-m", "fumehood.cli.main", "doctor", "--json", "--attack", "--wall", "gateway")
    (card,) = python(*attack)["walls"]
    assert (card["wall"], card["verdict"]) == ("gateway", "absent")


WITHOUT_STREAMS = """
import json, sys
from pathlib import Path
import anyio
from fumehood import AsyncClient, Client, Config, Engine, tool
from fumehood.storage.database import open_database

@tool(sandboxed=False, read_only=True, description="Greet.")
async def greet() -> str:
    return "hello"

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / "state.db")
    async with Engine([greet], config=Config(home=home), database=database) as engine:
        called = await engine.call("greet")
        with_option = await engine.call("greet", **json.loads('{"enable_streaming": false}'))
        print(json.dumps({
            "called": called.data, "with_option": with_option.error.code,
            "streams": [hasattr(one, "stream") for one in (Engine, Client, AsyncClient)],
        }))
    database.close()

anyio.run(main)
"""


def test_recordings_are_kept_and_options_refused_without_streams(tree: Tree, home: Path) -> None:
    tree.delete(PARTS["streams"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    recording = home / "spool" / ("call_" + "0" * 24)
    recording.parent.mkdir(mode=0o700)
    recording.write_text("of an engine with the part\n")
    ran = python("-c", WITHOUT_STREAMS, str(home))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "called": {"value": "hello"}, "with_option": "INVALID_PARAMS", "streams": [False] * 3,
    }  # fmt: skip
    assert recording.read_text() == "of an engine with the part\n"
    shown = python("-m", "fumehood.cli.main", "call", "greet", "--stream")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "--stream needs the part streams, which is not installed." in shown.stderr
    (home / "config.toml").write_text("streams_mb = 1\n")
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert refused.returncode == 2, refused.stderr
    assert "streams_mb: there is no such key in " in refused.stderr


def test_directories_of_definitions_are_refused_without_definition_files(
    tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["definition_files"])
    directory, document = home / "tools", home / "openapi.json"
    directory.mkdir(mode=0o700)
    (directory / "weather.json").write_text(json.dumps(rest_document()))
    operation = {"operationId": "now", "description": "Ask.", "responses": {}}
    document.write_text(json.dumps({
        "openapi": "3.1.0", "info": {"title": "Weather", "version": "1"},
        "servers": [{"url": "https://weather.example"}], "paths": {"/now": {"get": operation}},
    }))  # fmt: skip
    (home / "config.toml").write_text(f"tools_directory = '{directory}'\n")
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert refused.returncode == 2, refused.stderr
    assert "tools_directory: there is no such key in " in refused.stderr
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip
    for arguments, words in (
        (("policy", "check", "--tools-directory", str(directory)), "--tools-directory needs the"),
        (("tools", "lint", str(directory)), "weather.json needs the"),
        (("tools", "import", "openapi", str(document), "--out", str(home / "out")), "out: the"),
    ):
        command = [sys.executable, "-m", "fumehood.cli.main", *arguments]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 2, (arguments, ran.stderr)
        assert f"{words} part definition_files" in ran.stderr
        assert "is not installed" in ran.stderr
    assert not list((home / "out").glob("*"))


WITHOUT_FIGURES = """
import json
from fumehood.guest.languages import python
from fumehood.guest.languages.libraries import LIBRARIES

python.preload()
python.expect_late()
ended, claim = python.Program(512 << 20).run("1 + 1")
print(json.dumps([len(LIBRARIES), ended, claim["result"]["value"], "notes" in claim["result"]]))
"""


def test_python_programs_run_without_figures(whole: Tree, tree: Tree) -> None:
    tree.delete(PARTS["figures"])
    for copy, libraries in ((whole, 1), (tree, 0)):
        known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": copy.import_path[0]}
        command = [sys.executable, "-c", WITHOUT_FIGURES]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout) == [libraries, 0, 2, False]


WITHOUT_BATCHES = """
import json
from fumehood import AsyncClient, Client, Engine
from fumehood.http.app import OPERATIONS

print(json.dumps({
    "methods": [hasattr(one, "batch") for one in (Engine, Client, AsyncClient)],
    "calls": [one.method for one in OPERATIONS if one.path == "/v1/calls"],
}))
"""


def test_many_calls_cannot_be_made_at_once_without_batches(tree: Tree, home: Path) -> None:
    tree.delete(with_dependents("batches", PARTS))
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    ran = python("-c", WITHOUT_BATCHES)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"methods": [False] * 3, "calls": ["GET"]}
    shown = python("-m", "fumehood.cli.main", "call", "--batch", "-")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "--batch needs the part batches, which is not installed." in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--state", "postgresql://me:secret@host/db"], "an unknown scheme. Known schemes: none."),
        (
            ["--files", "s3://bucket"],
            "files.url: Value error, must be the absolute path of a directory\n",
        ),
    ],
    ids=["state", "files"],
)
def test_places_elsewhere_are_refused_without_their_part(
    arguments: list[str], words: str, tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["elsewhere"])
    refused = serve(tree, home, *arguments)
    assert refused.returncode not in (0, 1), refused.stderr
    assert words in refused.stderr
    assert "secret" not in refused.stderr
    assert not (home / "state.db").exists()


WITHOUT_BUDGETS = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine, InvalidDefinition, tool
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import FakeWall

LIMITED = {"name": "other", "description": "Ask.", "type": "REST", "method": "GET",
           "endpoint": "https://weather.example/now", "rate_limit": 1}

@tool(sandboxed=False)
async def act() -> dict:
    "Act."
    return {}

def fault(document):
    try:
        Engine([document])
    except InvalidDefinition as refused:
        return refused.message

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    config, wall = Config(home=home), FakeWall()
    async with Engine([act], config=config, database=database, interpreter=wall) as engine:
        called = [(await engine.call("act")).error for _ in range(3)]
        usage = await engine.usage()
        print(json.dumps({
            "called": called, "counted": usage.total.calls, "budgets": usage.budgets,
            "stored": [one.message for one in engine.registrations.load_faults],
            "given": fault(LIMITED), "twin": fault({**LIMITED, "rate_limit": None}),
        }))
    database.close()

anyio.run(main)
"""


async def spend(home: Path) -> list[BudgetStanding]:
    """Register a tool with a rate limit, make a call, and return what is left of a budget."""
    admin = Principal("approver:root", frozenset({Scope.ADMIN}))
    config = Config(home=home, budgets=(BudgetRule(name="b", period="total", calls=100),))  # type: ignore[arg-type]
    database = open_database(home / FILE_NAME)
    async with Engine(config=config, database=database, interpreter=FakeWall()) as engine:
        assert engine.registrations.load_faults == []
        if engine.registry.find("weather", "1.0.0") is None:
            document = rest_document(rate_limit=1)
            await engine.registrations.register(document, by=admin, now=engine.now())
        await engine.call("calculator", {"expression": "1"})
        table = await engine.usage()
    database.close()
    return list(table.budgets)


def test_rates_of_definitions_are_refused_without_budgets_and_what_was_spent_is_kept(
    tree: Tree, home: Path
) -> None:
    (before,) = anyio.run(spend, home)
    tree.delete(PARTS["budgets"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_BUDGETS, str(home)]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["called"], found["counted"], found["budgets"]) == ([None] * 3, 4, [])
    told = "rate_limit: it is not enforced by this version"
    assert told in found["given"]
    assert found["twin"] is None
    assert [told in message for message in found["stored"]] == [True]
    (after,) = anyio.run(spend, home)
    assert (before.spent, after.spent) == (1, 2)  # and the stored tool is here again


LIMITED = {
    "budgets": ("[[budgets]]\nname = 'b'\ncalls = 1\n", "budgets: there is no such key in"),
    "rate-limits": (
        "[[rate_limits]]\ntool = '*'\nlimit = 1\n", "rate_limits: there is no such key in",
    ),
    "external": (
        "[external_tools.Read]\nrate_limit = 1\n",
        "rate_limit: it is not enforced by this version",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITED)
def test_configuration_that_limits_spending_is_refused_without_budgets(
    name: str, tree: Tree, home: Path
) -> None:
    text, words = LIMITED[name]
    tree.delete(PARTS["budgets"])
    (home / "config.toml").write_text(text)
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert not (home / "state.db").exists()


@pytest.mark.parametrize("name", ["BUDGETS", "RATE_LIMITS"])
def test_variable_that_limits_spending_is_refused_without_budgets(
    name: str, tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["budgets"])
    rules = json.dumps([{"name": "b", "calls": 1, "tool": "*", "limit": 1}])
    refused = serve(tree, home, **{f"FUMEHOOD_{name}": rules})
    words = f"{name.lower()}: there is no such key (variable FUMEHOOD_{name})"
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr


OVER = '[[rules]]\nid = "r"\ndecision = "deny"\nover_budget = true\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[budgets]]\nname = 'b'\ncalls = 1\n", "unknown key 'budgets'; known are mode, rules"),
        (OVER, "rule 'r': over_budget: unknown key"),
    ],
)
def test_policy_that_limits_spending_is_refused_without_budgets(
    text: str, words: str, tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["budgets"])
    file = home / "policy.toml"
    file.write_text(text)
    refused = serve(tree, home, FUMEHOOD_POLICY_FILE=str(file))
    assert refused.returncode not in (0, 1), refused.stderr
    assert words in refused.stderr
    assert "fumehood listens" not in refused.stderr


WITHOUT_REST = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine, InvalidDefinition
from fumehood.approvals.model import NewDecision
from fumehood.core.identity import Principal, Scope
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import FakeWall

WEATHER = json.loads(sys.argv[2])

def fault(document):
    try:
        Engine([document])
    except InvalidDefinition as refused:
        return refused.message

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    config, wall = Config(home=home, web={"fetch_url": True}), FakeWall()
    async with Engine(config=config, database=database, interpreter=wall) as engine:
        approver = Principal("approver:alice", frozenset({Scope.APPROVE}))
        desk, yes = engine.approvals, NewDecision(decision="approve")
        approval = await desk.decide(sys.argv[3], yes, approver, channel="test")
        with anyio.fail_after(120):
            seen = 0
            while approval.code is None:
                seen = await desk.next_change(seen, within_s=1)
                approval = await desk.show(approval.id)
        print(json.dumps({
            "called": [(await engine.call(name, {})).error.code for name in ("weather", "fetch_url")],
            "stored": [one.message for one in engine.registrations.load_faults],
            "approved": approval.code, "given": fault(WEATHER),
            "fetch": fault({"name": "x", "description": "X.", "executor": "http:fetch"}),
        }))
    database.close()

anyio.run(main)
"""


async def ask_for_weather(home: Path) -> str:
    """Register a dangerous REST tool, call it, and return the id of the approval that waits."""
    admin = Principal("approver:root", frozenset({Scope.ADMIN}))
    database = open_database(home / FILE_NAME)
    async with Engine(
        config=Config(home=home), database=database, interpreter=FakeWall()
    ) as engine:
        document = rest_document(dangerous=True)
        await engine.registrations.register(document, by=admin, now=engine.now())
        await engine.approvers.add("alice", [Scope.APPROVE], by=admin, now=engine.now())
        answer = await engine.call("weather", {"city": "Rome"})
    database.close()
    assert answer.error is not None
    assert answer.error.approval_id is not None
    return answer.error.approval_id


def test_rest_tools_are_refused_without_their_part_also_after_a_yes(tree: Tree, home: Path) -> None:
    approval_id = anyio.run(ask_for_weather, home)
    tree.delete(PARTS["rest"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    given = json.dumps(rest_document())
    command = [sys.executable, "-c", WITHOUT_REST, str(home), given, approval_id]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["called"], found["approved"]) == (["TOOL_NOT_FOUND"] * 2, "TOOL_NOT_FOUND")
    (stored,) = found["stored"]
    assert "'weather'" in stored
    assert "only tools of type MCP can come from outside" in stored
    assert "type: REST is not enforced by this version" in found["given"]
    assert "'http:fetch' is not enforced by this version" in found["fetch"]


def test_document_of_a_service_cannot_be_imported_without_rest(tree: Tree, home: Path) -> None:
    tree.delete(PARTS["rest"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "fumehood.cli.main", "tools", "import", "openapi", "-"]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 2
    assert "No such command 'import'" in ran.stderr


WITHOUT_TRIALS = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.approvals.refusals import require_known_options
from fumehood.core.errors import InvalidParams
from fumehood.storage.database import open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall

RULES = '''[[rules]]
id = "look-first"
tools = ["run_python"]
decision = "ask"
preview = true
'''

def refused(options):
    try:
        require_known_options(options)
    except InvalidParams as error:
        return error.fields

async def main():
    home = Path(sys.argv[1])
    (home / "policy.toml").write_text(RULES)
    (home / "policy.toml").chmod(0o600)
    config = Config(home=home, policy_file=home / "policy.toml", sessions={"image": "python"})
    wall, database = FakeWall(limits=CONTAINER_LIMITS), open_database(home / "state.db")
    async with Engine(config=config, container=wall, database=database) as engine:
        session = await engine.sessions.create(engine.owner, durable=True)
        tried = await engine.call("run_python", {"code": "1"}, preview=True)
        ruled = await engine.call("run_python", {"code": "1"}, session_id=session.id)
        print(json.dumps({
            "tried": [tried.error.code, tried.error.fields],
            "ruled": ruled.error.code,
            "stored": refused({"timeout_seconds": 1, "preview": True}),
            "runs": [run.program for run in wall.runs if run.program != "files"],
        }))
    database.close()

anyio.run(main)
"""


def test_trials_are_refused_or_asked_about_without_their_part(tree: Tree, home: Path) -> None:
    """A call that asks for one, a rule that lets one run before anybody is asked, a stored call."""
    tree.delete(PARTS["trials"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_TRIALS, str(home)]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "tried": ["INVALID_PARAMS", ["options.preview"]],
        "ruled": "REQUIRES_HUMAN_APPROVAL",
        "stored": ["options.preview"],
        "runs": [],
    }


WITHOUT_WORKSPACE = """
import json, sys
from pathlib import Path
import anyio
from fumehood import AsyncClient, Client, Config, Engine, InvalidDefinition
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall

OWN = {"name": "own", "description": "Read.", "type": "BUILTIN", "executor": "workspace:read"}

def fault(document):
    try:
        Engine([document])
    except InvalidDefinition as refused:
        return refused.message

async def main():
    home = Path(sys.argv[1])
    database, wall = open_database(home / FILE_NAME), FakeWall(limits=CONTAINER_LIMITS)
    config = Config(home=home, sessions={"image": "python"})
    async with Engine(
        config=config, database=database, container=wall, interpreter=FakeWall()
    ) as engine:
        made = await engine.sessions.create(engine.owner)
        called = {
            name: (await engine.call(name, {"path": "a"}, session_id=made.id)).error.code
            for name in ("read_file", "write_file", "list_files", "delete_files")
        }
        files = [{"path": "a", "content": "b"}]
        twin = await engine.call("run_python", {"code": "1", "files": files}, session_id=made.id)
        print(json.dumps({
            "called": sorted(set(called.values())), "twin": twin.success,
            "runs": [run.program for run in wall.runs],
            "fault": fault(OWN), "faults": [fault.reason for fault in engine.load_faults],
            "routes": [one.path for one in (*OPERATIONS, *CONTROL_OPERATIONS)
                       if "files" in one.path or "archive" in one.path],
            "methods": [hasattr(engine, "session_files")]
            + [hasattr(one, "put_file") for one in (Client, AsyncClient)],
        }))
    database.close()

anyio.run(main)
"""


def test_files_of_sessions_are_refused_without_workspace_and_programs_still_run(
    tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["workspace"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    ran = python("-c", WITHOUT_WORKSPACE, str(home))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert "executor: 'workspace:read' is not enforced by this version" in found.pop("fault")
    assert found == {
        "called": ["TOOL_NOT_FOUND"], "twin": True, "runs": ["python"], "faults": [], "routes": [],
        "methods": [False] * 3,
    }  # fmt: skip
    shown = python("-m", "fumehood.cli.main", "sessions", "put", "s", "-", "a")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "No such command 'put'" in shown.stderr


WITHOUT_PROCESSES = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine, InvalidDefinition
from fumehood.core.identity import TrustDomain
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.storage.sessions import SessionTable
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall

OWN = {"name": "own", "description": "Start.", "type": "BUILTIN", "executor": "process:start"}

def fault(document):
    try:
        Engine([document])
    except InvalidDefinition as refused:
        return refused.message

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    (before,) = SessionTable(database).all_now()
    wall, asked = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True), []
    wall.held.append(FakePlace(
        wall, TrustDomain("", None, before.record.id), "python", 512, ("python",), lambda: None,
        name=before.home.container, has_disk=True, is_stopped=True, on_processes=asked.append,
    ))
    config = Config(home=home, sessions={"image": "python"})
    async with Engine(
        config=config, database=database, container=wall, interpreter=FakeWall()
    ) as engine:
        found = engine.sessions.find(engine.owner, before.record.id)
        called = {
            name: (await engine.call(name, {"name": "web"}, session_id=found.id)).error.code
            for name in ("start_process", "list_processes", "read_process", "stop_process")
        }
        twin = await engine.call("run_python", {"code": "1"}, session_id=found.id)
        print(json.dumps({
            "called": sorted(set(called.values())), "twin": twin.success, "asked": asked,
            "fault": fault(OWN), "faults": [fault.reason for fault in engine.load_faults],
            "routes": [one.path for one in (*OPERATIONS, *CONTROL_OPERATIONS)
                       if "processes" in one.path],
        }))
    (after,) = SessionTable(database).all_now()
    assert after.home.of_parts == before.home.of_parts != {}
    database.close()

anyio.run(main)
"""


async def start_again(home: Path, wall: FakeWall) -> list[str]:
    """Use a session in which a process starts again, and return the names of what was started."""
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    database = open_database(home / FILE_NAME)
    started: list[str] = []
    async with Engine(
        config=config, database=database, container=wall, interpreter=FakeWall()
    ) as engine:
        if not engine.sessions.every():
            made = await engine.sessions.create(engine.owner, disk_mb=100)
            asked = {"do": "start", "name": "web", "command": "serve", "started_at": 1.0}
            await engine.sessions.keep(made.id, "processes", {"web": asked})
        (found,) = engine.sessions.list(engine.owner)
        (place,) = wall.held
        await engine.sessions.stop(engine.owner, found.id)
        place.on_processes = lambda request: started.append(request["name"]) or {}
        before = place.until_free

        async def until_free() -> None:
            await before()
            place.name += "+"

        place.until_free = until_free  # type: ignore[method-assign]
        await engine.sessions.resume(engine.owner, found.id)
        place.until_free = before  # type: ignore[method-assign]
        await engine.sessions.stop(engine.owner, found.id)
    database.close()
    return started


def test_processes_are_refused_and_kept_for_later_without_their_part(
    tree: Tree, home: Path
) -> None:
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    assert anyio.run(start_again, home, wall) == ["web"]
    tree.delete(PARTS["processes"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    ran = python("-c", WITHOUT_PROCESSES, str(home))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert "executor: 'process:start' is not enforced by this version" in found.pop("fault")
    assert found == {
        "called": ["TOOL_NOT_FOUND"], "twin": True, "asked": [], "faults": [], "routes": [],
    }  # fmt: skip
    shown = python("-m", "fumehood.cli.main", "sessions", "ps", "s")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "No such command 'ps'" in shown.stderr
    assert anyio.run(start_again, home, wall) == ["web"]  # and here it is again


WITHOUT_PROJECTS = """
import json, sys
from pathlib import Path
import anyio
from fumehood import AsyncClient, Client, Config, Engine
from fumehood.core.errors import InvalidParams
from fumehood.core.identity import TrustDomain
from fumehood.core.session import NewSession
from fumehood.http.bodies import parse_body
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.storage.sessions import SessionTable
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall

def refused(document):
    try:
        parse_body(NewSession, document)
    except InvalidParams as error:
        return error.fields

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    (before,) = SessionTable(database).all_now()
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    wall.held.append(FakePlace(
        wall, TrustDomain("", None, before.record.id), "python", 512, ("python",), lambda: None,
        name=before.home.container,
    ))
    config = Config(home=home, sessions={"image": "python"})
    async with Engine(config=config, database=database, container=wall) as engine:
        found = engine.sessions.find(engine.owner, before.record.id)
        called = {
            name: await engine.call(name, arguments, session_id=found.id)
            for name, arguments in (
                ("workspace_diff", {}), ("apply_workspace", {}), ("run_python", {"code": "1"}),
            )
        }
        print(json.dumps({
            "state": found.state, "shown": found.project,
            "called": {name: one.error and one.error.code for name, one in called.items()},
            "refused": refused({"project": "proj_1"}), "twin": refused({"image": "python"}),
            "faults": [fault.reason for fault in engine.load_faults],
            "methods": [hasattr(engine, "projects")]
            + [hasattr(one, "create_session_from") for one in (Client, AsyncClient)],
        }))
    (after,) = SessionTable(database).all_now()
    assert after.home.of_parts == before.home.of_parts != {}
    database.close()

anyio.run(main)
"""


async def keep_project(home: Path, wall: FakeWall) -> str | None:
    """Keep a project with a session, which is made if there is none, and return what is shown."""
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    database = open_database(home / FILE_NAME)
    async with Engine(config=config, database=database, container=wall) as engine:
        if not engine.sessions.every():
            made = await engine.sessions.create(engine.owner)
            await engine.sessions.keep(made.id, "project", {"directory": "/home/a/shop"})
        (found,) = engine.sessions.list(engine.owner)
    database.close()
    return found.project


def test_session_keeps_its_project_and_the_rest_is_refused_without_projects(
    tree: Tree, home: Path
) -> None:
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    assert anyio.run(keep_project, home, wall) == "shop"
    journal = home / "projects" / "0.json"
    journal.parent.mkdir(mode=0o700, exist_ok=True)
    journal.write_text("of a killed engine with the part")
    tree.delete(PARTS["projects"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    ran = python("-c", WITHOUT_PROJECTS, str(home))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "state": "active", "shown": None,
        "called": {
            "workspace_diff": "TOOL_NOT_FOUND", "apply_workspace": "TOOL_NOT_FOUND",
            "run_python": None,
        },
        "refused": ["project"], "twin": None, "faults": [], "methods": [False] * 3,
    }  # fmt: skip
    assert journal.read_text() == "of a killed engine with the part"
    for option, words in (
        (("run", "--project", str(home), "--", "true"), "--project"),
        (("sessions", "new", "--from", str(home)), "--from"),
    ):
        shown = python("-m", "fumehood.cli.main", *option)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert f"{words} needs the part projects, which is not installed." in shown.stderr
    assert anyio.run(keep_project, home, wall) == "shop"  # and here it is again


KILLED_APPLY = """
import os, signal, sys
from pathlib import Path
import anyio, anyio.to_thread
from fumehood import Config, Engine
from fumehood.projects.in_engine import ProjectsPart
from fumehood.projects.tree import ProjectDirectory
from fumehood.projects.writing import Change, Writing
from fumehood.storage.database import FILE_NAME, open_database

def apply(journals, top):
    os.link = lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL)
    with ProjectDirectory(top) as project, Writing(project, journals, "call_1") as writing:
        (old, _), (new, _) = project.entry("old"), project.entry("like-new")
        with writing.add("new") as file:
            file.write(b"new")
        writing.write([Change("old", old, None), Change("new", None, new)], frozenset())

async def main():
    home, top = Path(sys.argv[1]), Path(sys.argv[2])
    database = open_database(home / FILE_NAME)
    async with Engine(config=Config(home=home), database=database) as engine:
        journals = engine.part(ProjectsPart)._journals
        await anyio.to_thread.run_sync(apply, journals, top)

anyio.run(main)
"""


async def start_once(home: Path) -> None:
    database = open_database(home / FILE_NAME)
    async with Engine(config=Config(home=home), database=database, interpreter=FakeWall()):
        pass
    database.close()


def test_state_of_an_engine_that_was_killed_while_it_wrote_a_project_needs_projects(
    tree: Tree, home: Path, tmp_path: Path
) -> None:
    """Until one with the part has put the project back."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("old", "like-new"):
        (project / name).write_text(name)
    tree.delete(PARTS["projects"])

    def refused() -> str:
        """Open the state without the part; why it is refused, or an empty text."""
        known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
        command = [sys.executable, "-c", CALL_ONCE, str(home)]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)["refused"] or ""

    anyio.run(start_once, home)
    assert refused() == ""  # the twin
    command = [sys.executable, "-c", KILLED_APPLY, str(home), str(project)]
    killed = subprocess.run(command, env=CLEAN_ENVIRONMENT, capture_output=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(path.name for path in project.iterdir())
    assert "old" not in left
    assert "The state needs the part 'projects', which is not installed." in refused()
    assert sorted(path.name for path in project.iterdir()) == left
    anyio.run(start_once, home)
    assert sorted(path.name for path in project.iterdir()) == ["like-new", "old"]
    assert refused() == ""


WITHOUT_SNAPSHOTS = """
import json, sys
from pathlib import Path
import anyio
from fumehood import AsyncClient, Client, Config, Engine
from fumehood.core.identity import TrustDomain
from fumehood.http.app import OPERATIONS
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.storage.sessions import SessionTable
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    (before,) = SessionTable(database).all_now()
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    wall.held.append(FakePlace(
        wall, TrustDomain("", None, before.record.id), "python", 512, ("python",), lambda: None,
        has_disk=True, name=before.home.container,
    ))
    config = Config(home=home, sessions={"image": "python"})
    async with Engine(config=config, database=database, container=wall) as engine:
        found = engine.sessions.find(engine.owner, before.record.id)
        called = await engine.call("run_python", {"code": "1"}, session_id=found.id)
        print(json.dumps({
            "state": found.state, "shown": [one.name for one in found.snapshots],
            "spared": list(wall.copies()) == [one.id for one in found.snapshots],
            "called": called.error,
            "offered": [one.path for one in OPERATIONS if one.path.endswith(("/fork", "/snapshots"))],
            "methods": [hasattr(engine, "snapshots")]
            + [hasattr(one, "map_forks") for one in (Client, AsyncClient)],
        }))
    database.close()

anyio.run(main)
"""


async def take_snapshot(home: Path, wall: FakeWall) -> list[str | None]:
    """Take a snapshot of a session, which is made if there is none, and list all of them."""
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    database = open_database(home / FILE_NAME)
    async with Engine(config=config, database=database, container=wall) as engine:
        if not engine.sessions.every():
            made = await engine.sessions.create(engine.owner, disk_mb=64)
            await engine.snapshots.take(engine.owner, made.id, "before")
        (session,) = engine.sessions.list(engine.owner)
        restored = await engine.snapshots.restore(engine.owner, session.id, "before")
        assert list(wall.copies()) == [one.id for one in restored.snapshots]
    database.close()
    return [one.name for one in restored.snapshots]


def test_snapshots_are_shown_and_spared_but_neither_made_nor_restored_without_their_part(
    tree: Tree, home: Path
) -> None:
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    assert anyio.run(take_snapshot, home, wall) == ["before"]
    tree.delete(PARTS["snapshots"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    ran = python("-c", WITHOUT_SNAPSHOTS, str(home))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "state": "stopped", "shown": ["before"], "spared": True, "called": None, "offered": [],
        "methods": [False] * 3,
    }  # fmt: skip
    for name in ("snapshot", "snapshots", "delete-snapshot", "restore", "fork"):
        refused = python("-m", "fumehood.cli.main", "sessions", name, "sess_1")
        assert refused.returncode == 2
        assert f"No such command '{name}'" in refused.stderr
    assert anyio.run(take_snapshot, home, wall) == ["before"]  # and here it is again


WITHOUT_DURABLE = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.core.errors import EngineError
from fumehood.core.identity import TrustDomain
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.storage.sessions import SessionTable
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall

async def refused(engine, **wishes):
    try:
        made = await engine.sessions.create(engine.owner, **wishes)
        await engine.sessions.end(engine.owner, made.id)
    except EngineError as error:
        return error.code, error.fields

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    (before,) = SessionTable(database).all_now()
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    wall.held.append(FakePlace(
        wall, TrustDomain("", None, before.record.id), "python", 512, ("python",), lambda: None,
        name=before.home.container,
    ))
    config = Config(home=home, sessions={"image": "python"})
    async with Engine(config=config, database=database, container=wall) as engine:
        found = engine.sessions.find(engine.owner, before.record.id)
        called = await engine.call("run_python", {"code": "1"}, session_id=found.id)
        tried = await engine.call("run_python", {"code": "1"}, session_id=found.id, preview=True)
        print(json.dumps({
            "state": found.state, "durable": found.durable, "runs": len(wall.runs),
            "called": [called.error.code, called.error.retryable], "tried": tried.error.code,
            "refused": await refused(engine, durable=True), "twin": await refused(engine),
        }))
    database.close()

anyio.run(main)
"""


async def use_durable(home: Path, wall: FakeWall) -> bool:
    """Call a tool in a durable session, or make the session if there is none. Return whether the
    call succeeded.
    """
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    database = open_database(home / FILE_NAME)
    async with Engine(config=config, database=database, container=wall) as engine:
        if not engine.sessions.every():
            made = await engine.sessions.create(engine.owner, durable=True)
            assert made.durable
            return False
        (session,) = [one for one in engine.sessions.list(engine.owner) if one.durable]
        answer = await engine.call("run_python", {"code": "1"}, session_id=session.id)
    database.close()
    return answer.success


def test_durable_sessions_are_kept_but_neither_made_nor_used_without_their_part(
    tree: Tree, home: Path
) -> None:
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    assert not anyio.run(use_durable, home, wall)
    saved = home / "sessions" / f"{wall.held[0].domain.session_id}.{'0' * 8}.{'0' * 64}"
    saved.parent.mkdir(mode=0o700, exist_ok=True)
    saved.touch()
    tree.delete(PARTS["durable"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_DURABLE, str(home)]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "state": "active", "durable": True, "runs": 0, "called": ["SANDBOX_UNAVAILABLE", False],
        "tried": "SANDBOX_UNAVAILABLE", "refused": ["INVALID_PARAMS", ["durable"]], "twin": None,
    }  # fmt: skip
    assert saved.exists()
    (home / "config.toml").write_text("[presets.ledger]\ndurable = true\n")
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert refused.returncode == 2, refused.stderr
    assert "ledger.durable is provided by no part of this engine" in refused.stderr
    assert anyio.run(use_durable, home, wall)  # and here it is again


END_DURABLE = """
import sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.core.identity import TrustDomain
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.storage.sessions import SessionTable
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall

async def main():
    home = Path(sys.argv[1])
    database = open_database(home / FILE_NAME)
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    for one in SessionTable(database).all_now():
        domain = TrustDomain("", None, one.record.id)
        place = FakePlace(wall, domain, "python", 512, ("python",), lambda: None, name=one.home.container)
        wall.held.append(place)
    config = Config(home=home, sessions={"image": "python"})
    async with Engine(config=config, database=database, container=wall) as engine:
        ended = await engine.sessions.end(engine.owner, sys.argv[2])
        assert ended.state == "ended"
    if len(sys.argv) > 3:  # as a day later
        await SessionTable(database).change([], [ended.id])
    database.close()

anyio.run(main)
"""


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["known", "forgotten"])
def test_files_of_a_session_that_ends_without_durable_are_deleted_with_it_again(
    is_forgotten: bool, tree: Tree, home: Path
) -> None:
    """Also if a day has passed and the ended session is forgotten. The twin has not ended."""
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})

    def saved() -> list[Path]:
        return sorted(home.glob("sessions/*"))

    async def run_engine(count: int) -> None:
        """Make as many durable sessions, or wait until a saved file is deleted."""
        database = open_database(home / FILE_NAME)
        async with Engine(config=config, database=database, container=wall) as engine:
            for _ in range(count):
                made = await engine.sessions.create(engine.owner, durable=True)
                file = home / "sessions" / f"{made.id}.{'0' * 8}.{'0' * 64}"
                file.parent.mkdir(mode=0o700, exist_ok=True)
                file.touch()
                os.utime(file, (0, 0))
            with anyio.fail_after(120):
                while not count and len(saved()) == 2:
                    await anyio.sleep(0.01)
        database.close()

    anyio.run(run_engine, 2)
    ended, twin = saved()
    tree.delete(PARTS["durable"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    session_id = ended.name.partition(".")[0]
    options = ["forgotten"] if is_forgotten else []
    command = [sys.executable, "-c", END_DURABLE, str(home), session_id, *options]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert saved() == [ended, twin]  # until the part is back
    anyio.run(run_engine, 0)
    assert saved() == [twin]


WITHOUT_CODE_MODE = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.approvals.model import ApprovalQuery, NewDecision
from fumehood.core.identity import Principal, Scope
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall

async def main():
    home = Path(sys.argv[1])
    wall, database = FakeWall(limits=CONTAINER_LIMITS), open_database(home / FILE_NAME)
    config = Config(home=home, policy_file=home / "policy.toml")
    async with Engine(
        config=config, container=wall, interpreter=FakeWall(), database=database
    ) as engine:
        approver = Principal("approver:alice", frozenset({Scope.APPROVE}))
        desk, yes = engine.approvals, NewDecision(decision="approve")
        approval = await desk.decide(sys.argv[2], yes, approver, channel="test")
        with anyio.fail_after(120):
            seen = 0
            while approval.code is None:
                seen = await desk.next_change(seen, within_s=1)
                approval = await desk.show(approval.id)
        called = [
            await engine.call("run_python", {"code": code, "tools": ["calculator"]})
            for code in ("1", "asked")
        ]
        twin = await engine.call("run_python", {"code": "twin", "tools": []})
        print(json.dumps({
            "approved": approval.code, "called": [one.error.code for one in called],
            "messages": [one.error.message for one in called],
            "retryable": [one.error.retryable for one in called], "twin": twin.success,
            "stored": len((await desk.list(ApprovalQuery())).items),
            "runs": [run.arguments["code"] for run in wall.runs],
        }))
    database.close()

anyio.run(main)
"""

ASKS = """[[rules]]
id = "look"
decision = "ask"
tools = ["run_python"]
when = [{argument = "/code", equals = "asked"}]
"""


async def ask_for_program(home: Path) -> str:
    """Call for a program with tools, and return the id of the approval that waits."""
    database = open_database(home / FILE_NAME)
    config = Config(home=home, policy_file=home / "policy.toml")
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with Engine(
        config=config, container=wall, interpreter=FakeWall(), database=database
    ) as engine:
        await add_approvers(engine)
        answer = await engine.call("run_python", {"code": "asked", "tools": ["calculator"]})
    database.close()
    assert answer.error is not None
    assert answer.error.approval_id is not None
    return answer.error.approval_id


def test_programs_with_tools_are_refused_without_code_mode_also_after_a_yes(
    tree: Tree, home: Path
) -> None:
    (home / "policy.toml").write_text(ASKS)
    (home / "policy.toml").chmod(0o600)
    approval_id = anyio.run(ask_for_program, home)
    tree.delete(PARTS["code_mode"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_CODE_MODE, str(home), approval_id]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert all("what the call needs (tools)" in message for message in found.pop("messages"))
    assert found == {
        "approved": "SANDBOX_UNAVAILABLE", "called": ["SANDBOX_UNAVAILABLE"] * 2,
        "retryable": [False] * 2, "twin": True, "stored": 1, "runs": ["twin"],
    }  # fmt: skip


WITHOUT_IMAGES = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.approvals.refusals import require_known_options
from fumehood.core.errors import InvalidParams
from fumehood.testing import CONTAINER_LIMITS, FakeWall

def refused(options):
    try:
        require_known_options(options)
    except InvalidParams as error:
        return error.fields

async def main():
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with Engine(config=Config(home=Path(sys.argv[1])), container=wall) as engine:
        asked = await engine.call("run_python", {"code": "1"}, packages=["humanize"])
        twin = await engine.call("run_python", {"code": "1"})
        print(json.dumps({
            "asked": [asked.error.code, asked.error.fields], "twin": twin.error, "runs": len(wall.runs),
            "stored": refused({"packages": ["humanize"]}), "stored twin": refused({"packages": None}),
        }))

anyio.run(main)
"""


def test_calls_with_packages_are_refused_by_name_without_images(tree: Tree, home: Path) -> None:
    tree.delete(PARTS["images"])
    known = {**CLEAN_ENVIRONMENT, "PYTHONPATH": ":".join(tree.import_path)}
    command = [sys.executable, "-c", WITHOUT_IMAGES, str(home)]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "asked": ["INVALID_PARAMS", ["options.packages"]], "twin": None, "runs": 1,
        "stored": ["options.packages"], "stored twin": None,
    }  # fmt: skip


def test_images_are_not_built_and_packages_not_allowed_without_their_part(
    tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["images"])
    (home / "config.toml").write_text('[packages]\nallow = ["*"]\n')
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert refused.returncode == 2, refused.stderr
    assert "packages: there is no such key in " in refused.stderr
    assert not (home / "state.db").exists()
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "fumehood.cli.main", "images", "build"]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 2
    assert "No such command 'images'" in ran.stderr


WITHOUT_SHELL = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine
from fumehood.core.errors import InvalidParams
from fumehood.policy.loader import version_of
from fumehood.policy.model import ExplainWish, NewPolicy, PolicyError
from fumehood.testing import CONTAINER_LIMITS, FakeWall

def engine(home, file):
    return Engine(config=Config(home=home, policy_file=file), container=FakeWall(limits=CONTAINER_LIMITS))

def explained(engine, command):
    wish = ExplainWish(tool="run_shell", arguments={"command": command})
    explanation = engine.policy.explain(wish)
    return [explanation.verdict, explanation.rule]

async def main():
    home, found = Path(sys.argv[1]), {}
    for file in sorted(home.glob("runs-*.toml")):
        try:
            async with engine(home, file) as one:
                found[file.stem] = explained(one, "sudo rm x")
        except PolicyError as refused:
            found[file.stem] = list(refused.shown)
    file = home / "twin.toml"
    async with engine(home, file) as one:
        new = NewPolicy(text=(home / "runs-rule.toml").read_text(), version=version_of(file.read_bytes()))
        try:
            await one.policy.replace(new, one.owner)
        except InvalidParams as refused:
            found["replaced"] = refused.details["faults"]
        found["twin"] = [explained(one, command) for command in ("rm x", "ls")]
    print(json.dumps(found))

anyio.run(main)
"""

POLICY = '[[rules]]\nid = "r"\ndecision = "{}"\ntools = ["run_shell"]\n{}\n'
RUNS_RULES = {
    # a policy: with the part, what it decides for `sudo rm x`; without it, the key that is unknown
    "rule": (("deny", 'runs = ["rm"]'), ["deny", "r"], "runs"),
    "when": (("ask", '[[rules.when]]\nruns = ["rm"]'), ["ask", "r"], "when[0].runs"),
    "any": (("allow", 'any = [{ runs = ["sudo", "rm"] }]'), ["allow", "r"], "any[0].runs"),
    "shadow": (("deny", 'mode = "shadow"\nruns = ["rm"]'), ["allow", HARMLESS_PASSES], "runs"),
}


def test_policy_that_reads_commands_is_refused_without_shell(
    whole: Tree, tree: Tree, home: Path
) -> None:
    twin = POLICY.format("deny", '[[rules.when]]\nargument = "/command"\nglob = "*rm*"')
    texts = {f"runs-{name}": POLICY.format(*row[0]) for name, row in RUNS_RULES.items()}
    for name, text in {**texts, "twin": twin}.items():
        (home / f"{name}.toml").write_text(text)
        (home / f"{name}.toml").chmod(0o600)

    def python(used: Tree, *arguments: str) -> subprocess.CompletedProcess[str]:
        known = {
            **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home),
            "PYTHONPATH": ":".join(used.import_path),
        }  # fmt: skip
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)

    tree.delete(PARTS["shell"])
    told = {name: f"rule 'r': {row[2]}: unknown key; " for name, row in RUNS_RULES.items()}
    ran = python(tree, "-c", WITHOUT_SHELL, str(home))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("twin") == [["deny", "r"], ["allow", HARMLESS_PASSES]]
    (replaced,) = found.pop("replaced")
    assert told["rule"] in replaced
    assert found.keys() == texts.keys()
    for name, words in told.items():
        assert found[f"runs-{name}"][0].startswith(f"runs-{name}.toml: {words}")
    for file, code in (("runs-rule", 1), ("twin", 0)):
        checked = python(
            tree, "-m", "fumehood.cli.main", "policy", "check", str(home / f"{file}.toml")
        )
        assert checked.returncode == code, checked.stderr
        assert (told["rule"] in checked.stderr) is (code == 1)
    refused = serve(tree, home, FUMEHOOD_POLICY_FILE=str(home / "runs-rule.toml"))
    assert refused.returncode != 0
    assert told["rule"] in refused.stderr

    control = python(whole, "-c", WITHOUT_SHELL, str(home))
    assert control.returncode == 0, control.stderr
    decided = json.loads(control.stdout)
    assert {name: decided[f"runs-{name}"] for name in RUNS_RULES} == {
        name: row[1] for name, row in RUNS_RULES.items()
    }
    assert "replaced" not in decided


CALL_ONCE = """
import json, sys
from pathlib import Path
import anyio
from fumehood import Config, Engine, tool
from fumehood.core.part import PartError
from fumehood.storage.audit_chain import all_rows
from fumehood.storage.database import FILE_NAME, open_database

@tool(sandboxed=False)
async def act() -> dict:
    "Act."
    return {}

async def main():
    home = Path(sys.argv[1])
    database, refused = open_database(home / FILE_NAME), None
    try:
        async with Engine([act], config=Config(home=home), database=database) as engine:
            assert (await engine.call("act")).success
    except PartError as error:
        refused = str(error)
    await database.flush()
    rows = [json.loads(row.body)["kind"] for row in database.read_now(lambda c: list(all_rows(c)))]
    print(json.dumps({"refused": refused, "rows": rows}))
    database.close()

anyio.run(main)
"""


async def verify_chain(home: Path) -> tuple[bool, int | None]:
    """Verify the chain. Return whether it is intact, and the newest row that an anchor confirms."""
    database = open_database(home / FILE_NAME)
    config = Config(home=home)
    async with Engine(config=config, database=database, interpreter=FakeWall()) as engine:
        verdict = await engine.audit.verify()
    database.close()
    return verdict.intact, verdict.anchored_to


def test_chain_goes_on_without_audit_unless_anchors_were_promised(tree: Tree, home: Path) -> None:
    tree.delete(PARTS["audit"])
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip

    def run() -> Any:
        command = [sys.executable, "-c", CALL_ONCE, str(home)]
        ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    assert run() == {"refused": None, "rows": ["call.ended"]}
    assert run() == {"refused": None, "rows": ["call.ended"] * 2}
    assert anyio.run(verify_chain, home) == (True, 3)  # the first anchor covers them
    again = run()
    assert again["rows"] == [*["call.ended"] * 2, *["audit.anchored"] * 2]
    assert again["refused"].startswith("The state needs the part 'audit', which is not installed.")
    refused = serve(tree, home)
    assert refused.returncode not in (0, 1), refused.stderr
    assert "The state needs the part 'audit'" in refused.stderr
    assert anyio.run(verify_chain, home) == (True, 5)  # and here it is again


EARLIER = Path(__file__).parent / "data" / "state-before-packages"
"""An anchored state of a version that did not record that such a state needs `audit`."""


def test_state_that_an_earlier_version_anchored_is_refused_without_audit(
    tree: Tree, home: Path
) -> None:
    """A state that was never anchored is used above."""
    tree.delete(PARTS["audit"])
    for file in EARLIER.iterdir():
        shutil.copyfile(file, home / file.name)
        (home / file.name).chmod(0o600)
    refused = serve(tree, home)
    assert refused.returncode == 4, refused.stderr
    assert "The state needs the part 'audit', which is not installed." in refused.stderr
    assert anyio.run(verify_chain, home) == (True, 16)  # nothing was added to its 15 rows


def test_anchors_are_not_configured_and_chains_not_verified_without_audit(
    tree: Tree, home: Path
) -> None:
    tree.delete(PARTS["audit"])
    (home / "config.toml").write_text("[audit]\nanchor_rows = 10\n")
    refused = serve(tree, home, FUMEHOOD_CONFIG=str(home / "config.toml"))
    assert refused.returncode == 2, refused.stderr
    assert "audit: there is no such key in " in refused.stderr
    assert not (home / "state.db").exists()
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "fumehood.cli.main", "audit", "verify"]
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 2
    assert "No such command 'audit'" in ran.stderr


def serve(
    tree: Tree, home: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Start the daemon of a copy, which ends because it is refused."""
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "PYTHONPATH": ":".join(tree.import_path),
        **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", "fumehood.cli.main", "serve", *arguments]
    return subprocess.run(
        command, env=known, capture_output=True, text=True, timeout=600, check=False
    )


# -- controls ---------------------------------------------------------------------------------


def test_kernel_that_imports_a_deletable_part_breaks(tree: Tree, importer: Importer) -> None:
    part = PARTS["console"]
    tree.append(OF_KERNEL, "\nimport fumehood.web\n")
    tree.delete(part)
    ending = importer.try_out(tree, code().modules_without(part), contract=contract())
    assert ending.broken["fumehood.core.errors"] == "there is no fumehood.web"
    assert ending.contract is None  # it was not tried


def test_contract_fails_if_the_kernel_needs_a_deleted_part_when_it_runs(
    tree: Tree, importer: Importer
) -> None:
    part = PARTS["console"]
    late = "\n\ndef discover(*found, **settings):\n    import fumehood.web.server\n"
    tree.append(f"{PACKAGE}/registry/discover.py", late)
    tree.delete(part)
    ending = importer.try_out(tree, code().modules_without(part), contract=contract())
    assert ending.broken == {}
    assert ending.contract is not None
    assert "No module named 'fumehood.web'" in ending.contract


def part_with(*lines: Line) -> Part:
    return PARTS["console"].model_copy(update={"lines": lines})


def test_copy_offers_the_entry_points_that_are_left(whole: Tree, tree: Tree) -> None:
    def offered(copy: Tree) -> set[str]:
        (own,) = distributions(path=copy.import_path)
        return {point.name for point in own.entry_points if point.group == "fumehood.tools"}

    text = 'fetch_url = "fumehood_tools.fetch_url:fetch_url"'
    tree.delete(part_with(Line(file="pyproject.toml", text=text)))
    assert offered(whole) - offered(tree) == {"fetch_url"}
    assert offered(tree) >= {"calculator", "run_python"}


@pytest.mark.parametrize("text", ["fetch_url = nothing", ""])
def test_line_that_is_not_there_exactly_once_is_a_fault(tree: Tree, text: str) -> None:
    with pytest.raises(Unfit, match="and not once"):
        tree.delete(part_with(Line(file="pyproject.toml", text=text)))


def test_part_with_a_file_that_does_not_exist_is_a_fault(tree: Tree) -> None:
    with pytest.raises(Unfit, match="does not exist"):
        tree.delete(PARTS["console"].model_copy(update={"files": ("web/", "weeb.py")}))
