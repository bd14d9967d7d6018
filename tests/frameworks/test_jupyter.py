"""Jupyter: the kernel, installed and used through Jupyter's own front ends."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from fumehood import Client

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "use-from-jupyter.md"
Kernel = tuple[KernelManager, BlockingKernelClient]
INSTALL = [sys.executable, "-m", "fumehood.integrations.jupyter", "install"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory in which Jupyter searches for kernels; it has one of the image python."""
    made = tmp_path_factory.mktemp("prefix")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(made / "share" / "jupyter"))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
        patch.setenv("JUPYTER_RUNTIME_DIR", str(made / "runtime"))
        patch.setenv("IPYTHONDIR", str(made / "ipython"))
        install(made, "--image", "python")
        yield made


@contextmanager
def started(**options: Any) -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name="fumehood", **options)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


@pytest.fixture(scope="module")
def kernel(prefix: Path) -> Iterator[Kernel]:
    """One shared kernel, because a start takes longer than most tests."""
    with started() as kernel:
        yield kernel


def install(prefix: Path, *options: str) -> None:
    subprocess.run([*INSTALL, "--prefix", str(prefix), *options], check=True, timeout=600)


def run(client: BlockingKernelClient, code: str, **options: Any) -> tuple[Any, list[Any]]:
    """Execute a cell; return its reply and its published messages."""
    published: list[Any] = []

    def keep(message: Any) -> None:
        if message["msg_type"] not in ("status", "execute_input"):
            published.append(message["content"])

    reply = client.execute_interactive(code, output_hook=keep, timeout=600, **options)
    return reply["content"], published


@pytest.fixture
def other_prefix(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one in its place."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    return tmp_path


def test_howto_page_example_runs_unchanged(
    page: Callable[[str], Any], other_prefix: Path, sessions: Any
) -> None:
    """A notebook calculates and draws a figure; its session ends with it."""
    (command,) = PAGE.read_text(encoding="utf-8").split("```sh\n")[1].split("```")[:1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "JUPYTER_PREFIX": str(other_prefix)}
    subprocess.run(["sh", "-euc", command], env=environment, check=True, timeout=600)
    figure = "import matplotlib.pyplot as p\n_ = p.plot([n, 2])"
    done = page("use-from-jupyter")["run"]("n = 6\nprint('half')", "n * 7", figure)
    printed, value, drawn = (cell.outputs for cell in done.cells)
    assert [(one.name, one.text) for one in printed] == [("stdout", "half\n")]
    assert [one.data for one in value] == [{"text/plain": "42"}]
    assert base64.b64decode(drawn[0].data["image/png"]).startswith(b"\x89PNG")


def test_exception_prints_one_traceback_and_is_a_cell_error(kernel: Kernel) -> None:
    """A front end stops at such a reply."""
    _, client = kernel
    reply, shown = run(client, "import sys\nprint('w', file=sys.stderr)\n1 / 0")
    assert (reply["status"], reply["ename"]) == ("error", "ZeroDivisionError")
    printed, error = shown
    assert (printed["name"], printed["text"]) == ("stderr", "w\n")
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert error["traceback"][0] == "Traceback (most recent call last):"
    assert run(client, "'after'")[1][0]["data"] == {"text/plain": "'after'"}
    assert [one["ename"] for one in run(client, "def f(:")[1]] == ["SyntaxError"]
    (ended,) = run(client, "exit(3)")[1]
    assert (ended["ename"], ended["evalue"][:28]) == (
        "EXECUTION_ERROR",
        "The program exited with stat",
    )


def test_kernel_imports_nothing_from_the_notebooks_directory(prefix: Path, sessions: Any) -> None:
    canary, planted = prefix / "canary", prefix / "planted"
    planted.mkdir()
    for name in ("fumehood", "ipykernel", "json", "sitecustomize", "zmq"):
        (planted / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write(__name__)")
    subprocess.run([*INSTALL, "--help"], cwd=planted, capture_output=True, timeout=600, check=False)
    assert "fumehood" in canary.read_text()  # control: without `-P`
    canary.unlink()
    with started(cwd=str(planted)) as (_, client):
        assert run(client, "import sys")[0]["status"] == "ok"
    assert not canary.exists()


def test_traceback_printed_by_the_program_is_shown(kernel: Kernel) -> None:
    program = "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
    first, second = (run(kernel[1], code)[1] for code in (program, f"{program}print('x')"))
    shown = "".join(one["text"] for one in first)
    again = "".join(one["text"] for one in second if one["name"] == "stderr")
    assert "ZeroDivisionError" in shown
    number = re.compile(r"<code( \d+)?>")
    assert number.sub("<code>", again) == number.sub("<code>", shown)


def test_cell_output_is_streamed_and_interrupt_keeps_the_variables(
    kernel: Kernel,
) -> None:
    manager, client = kernel
    assert run(client, "x = 41")[0]["status"] == "ok"
    sent = client.execute("x = 0\nprint('on', flush=True)\nwhile True: pass")
    while client.get_iopub_msg(timeout=600)["content"].get("text") != "on\n":
        pass
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=600))["parent_header"]["msg_id"] != sent:
        pass
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
    (shown,) = run(client, "x + 1")[1]
    assert (shown["data"], shown["metadata"]) == ({"text/plain": "42"}, {})


def test_long_output_is_complete_and_a_silent_cell_publishes_nothing(
    kernel: Kernel,
) -> None:
    _, client = kernel
    shown = run(client, "print('a' * 50_000)\n'b' * 50_000")[1]
    assert "".join(one.get("text", "") for one in shown) == f"{'a' * 50_000}\n"
    assert shown[-1]["data"]["text/plain"].startswith("'bbb")
    reply, shown = run(client, "y = 1\nprint('no')\ny", silent=True)
    assert (reply["status"], shown) == ("ok", [])
    assert run(client, "y")[1][0]["data"] == {"text/plain": "1"}


def test_kernel_process_never_runs_notebook_code(
    kernel: Kernel,
) -> None:
    """Neither cells nor user expressions; control: this process."""
    _, client = kernel
    look = "import os\nprint(os.getuid(), os.path.exists('/workspace'), 'HOME' in os.environ)"
    shown = run(client, look, user_expressions={"a": "open('/tmp/escaped', 'w')"})[1]
    assert shown[0]["text"].startswith("10001 True")
    assert os.getuid() != 10001
    assert not Path("/tmp/escaped").exists()
    assert run(client, "!id")[0]["ename"] == "SyntaxError"


def test_kernel_restart_ends_its_session_and_starts_another(kernel: Kernel, client: Client) -> None:
    manager, front = kernel
    run(front, "x = 1")
    before = active(client)
    manager.restart_kernel()
    front.wait_for_ready(timeout=600)
    left = active(client)
    assert len(before - left) == 1
    assert run(front, "x")[0]["ename"] == "NameError"
    (made,) = active(client) - left
    client.end_session(made)
    reply, shown = run(front, "x")
    assert reply["status"] == "error"
    assert "has ended" in reply["evalue"]
    assert [one["ename"] for one in shown] == [reply["ename"]]


def active(client: Client) -> set[str]:
    return {one.id for one in client.sessions() if one.state == "active"}


def test_files_on_a_disk_remain_and_the_loss_of_variables_is_reported(
    prefix: Path, sessions: Any, client: Client, disk_mb: int
) -> None:
    options = [f"--FumehoodKernel.disk_mb={disk_mb}", "--FumehoodKernel.memory_mb=256"]
    with started(extra_arguments=options) as (_, front):
        run(front, "x = 1\nopen('run', 'w').write('#!/bin/sh\\necho ran')")
        (record,) = (one for one in client.sessions() if one.disk_mb and one.state == "active")
        assert record.memory_mb == 256
        client.stop_session(record.id)
        code = "import os, subprocess\nos.chmod('run', 0o700)\nsubprocess.check_output('./run')"
        warning, value = run(front, code)[1]
        assert value["data"]["text/plain"] == "b'ran\\n'"
        assert warning["name"] == "stderr"
        assert "earlier variables are gone" in warning["text"]
        assert run(front, "x")[0]["ename"] == "NameError"


def test_install_options_are_stored_in_the_kernel_spec_and_used(
    other_prefix: Path, sessions: Any
) -> None:
    options = {"image": "no-such-image", "agent-id": "nobody", "wait-for-approval": "5"}
    options |= {"disk-mb": "64", "memory-mb": "256"}
    install(other_prefix, *(word for name in options for word in (f"--{name}", options[name])))
    spec = json.loads((other_prefix / "share/jupyter/kernels/fumehood/kernel.json").read_text())
    assert {*spec["argv"]} >= {
        "--FumehoodKernel.image=no-such-image", "--FumehoodKernel.agent_id=nobody",
        "--FumehoodKernel.wait_for_approval=5.0", "--FumehoodKernel.disk_mb=64",
        "--FumehoodKernel.memory_mb=256",
    }  # fmt: skip
    with started() as (_, client):
        reply, _ = run(client, "1")
    assert reply["status"] == "error"
    assert "no-such-image" in reply["evalue"] or "nobody" in reply["evalue"]
