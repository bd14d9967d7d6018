"""Commands load only the modules they need, because imports would cost more than the call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import FUMEHOOD, Daemon

HEAVY = {
    "anyio", "asyncio", "docker", "httpx2", "jsonschema", "pydantic", "pydantic_settings", "rich",
    "sqlalchemy", "starlette", "structlog", "uvicorn",
}  # fmt: skip
HEAVY_OF_OURS = {"fumehood.config", "fumehood.engine", "fumehood.core.envelope"}

SCRIPT = """
import json, sys
from fumehood.cli.main import main
if sys.argv[1:2] == ["run"]:
    # A run that takes long loads the client, to say what it waits for.
    from fumehood.cli import reach
    reach.LOOK_S = 600
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""


def modules_of(
    daemon: Daemon, *arguments: str, stdin: str = "", **environment: str
) -> tuple[int, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env={**daemon.environment, **environment},
        input=stdin, capture_output=True, timeout=600, text=True,
    )  # fmt: skip
    code, names = json.loads(done.stderr.splitlines()[-1])
    return code, set(names)


CALL = ("call", "calculator", '{"expression": "1 + 1"}')
HOOKED = {
    "hook_event_name": "PreToolUse", "session_id": "s", "cwd": "/", "tool_name": "Bash",
    "tool_input": {"command": "ls"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "stdin", "codes"),
    [
        ((*CALL, "--timeout", "5"), "", (0,)),
        ((*CALL, "--agent", "nobody"), "", (1,)),
        (("hook", "claude-code"), json.dumps(HOOKED), (0,)),
        (("run", "-"), "print(1)", (0, 4)),  # here containers may be or not
        ((), "", (0,)),
    ],
    ids=["call", "refused", "hook", "run", "overview"],
)
def test_frequent_command_loads_no_models_no_engine_and_no_http_library(
    shared_daemon: Daemon, arguments: tuple[str, ...], stdin: str, codes: tuple[int, ...]
) -> None:
    code, names = modules_of(shared_daemon, *arguments, stdin=stdin)
    assert code in codes
    assert not names & (HEAVY | HEAVY_OF_OURS)


def test_call_does_not_read_the_configuration_file(shared_daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("pool_min = 0\n")
    code, names = modules_of(shared_daemon, *CALL, FUMEHOOD_CONFIG=str(file))
    assert (code, names & (HEAVY | HEAVY_OF_OURS)) == (0, set())


def test_mcp_server_loads_no_models_no_engine_and_no_http_library(shared_daemon: Daemon) -> None:
    hello = '{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
    options = ("--agent", "nobody", "--wait", "5")
    code, names = modules_of(shared_daemon, "mcp", *options, stdin=hello)
    assert code == 0
    assert "fumehood.mcp.server.stdio" in names
    assert not names & (HEAVY | HEAVY_OF_OURS | {"mcp", "fumehood.client.exchange"})


def test_help_loads_no_command(shared_daemon: Daemon) -> None:
    code, names = modules_of(shared_daemon, "--help")
    assert code == 0
    assert {name for name in names if name.startswith("fumehood.cli.")} == {
        "fumehood.cli.exits",
        "fumehood.cli.main",
        "fumehood.cli.options",
    }


def test_config_show_loads_no_schema_library(shared_daemon: Daemon) -> None:
    code, names = modules_of(shared_daemon, "config", "show")
    assert code == 0
    assert "fumehood.config" in names
    assert not names & {"jsonschema", "fumehood.registry.definitions", "fumehood.engine"}


def test_control_tools_list_loads_the_heavy_libraries(shared_daemon: Daemon) -> None:
    """Control: the module names checked above exist and are loaded by other commands."""
    assert {"pydantic", "httpx2"} <= modules_of(shared_daemon, "tools", "list")[1]


def test_bash_completion_lists_matching_commands() -> None:
    script = (
        'eval "$(fumehood --show-completion bash)"\n'
        "COMP_WORDS=(fumehood ca) COMP_CWORD=1\n_fumehood_completion fumehood\n"
        'echo "${COMPREPLY[@]}"'
    )
    environment = {"PATH": f"{FUMEHOOD.parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, timeout=600, check=True
    )
    assert done.stdout.split() == [b"call", b"calls", b"cache"]
