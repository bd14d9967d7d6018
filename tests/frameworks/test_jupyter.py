"""Jupyter: the kernel, installed and used through Jupyter's own front ends."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from fumehood import Client

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "use-from-jupyter.md"
INSTALL = [sys.executable, "-m", "fumehood.integrations.jupyter", "install"]


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which Jupyter searches for kernels."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


@pytest.fixture
def kernel(
    prefix: Path, sessions: Callable[[], set[str]]
) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    install(prefix, "--image", "python")
    manager, client = start_new_kernel(kernel_name="fumehood")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel()


def install(prefix: Path, *options: str) -> None:
    subprocess.run([*INSTALL, "--prefix", str(prefix), *options], check=True, timeout=60)


def notebook(*cells: str) -> Any:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def execute(*cells: str, **options: Any) -> list[Any]:
    made = notebook(*cells)
    NotebookClient(made, kernel_name="fumehood", timeout=120, **options).execute()
    return [cell.outputs for cell in made.cells]


def run(client: BlockingKernelClient, code: str, **options: Any) -> tuple[Any, list[Any]]:
    """Execute a cell; return its reply and its published messages."""
    published: list[Any] = []

    def keep(message: Any) -> None:
        if message["msg_type"] not in ("status", "execute_input"):
            published.append(message["content"])

    reply = client.execute_interactive(code, output_hook=keep, timeout=60, **options)
    return reply["content"], published


def test_howto_page_example_runs_unchanged(
    page: Callable[[str], Any], prefix: Path, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook calculates and draws a figure; its session ends with it."""
    (command,) = PAGE.read_text(encoding="utf-8").split("```sh\n")[1].split("```")[:1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "JUPYTER_PREFIX": str(prefix)}
    subprocess.run(["sh", "-euc", command], env=environment, check=True, timeout=60)
    figure = "import matplotlib.pyplot as p\n_ = p.plot([n, 2])"
    done = page("use-from-jupyter")["run"]("n = 6\nprint('half')", "n * 7", figure)
    printed, value, drawn = (cell.outputs for cell in done.cells)
    assert [(one.name, one.text) for one in printed] == [("stdout", "half\n")]
    assert [one.data for one in value] == [{"text/plain": "42"}]
    assert base64.b64decode(drawn[0].data["image/png"]).startswith(b"\x89PNG")


def test_exception_prints_one_traceback_and_stops_the_notebook(prefix: Path, sessions: Any) -> None:
    install(prefix, "--image", "python")
    cells = ("import sys\nprint('w', file=sys.stderr)\n1 / 0", "'after'", "def f(:", "exit(3)")
    failed, after, syntax, ended = execute(*cells, allow_errors=True)
    assert [one.output_type for one in failed] == ["stream", "error"]
    assert (failed[0].name, failed[0].text) == ("stderr", "w\n")
    assert (failed[1].ename, failed[1].evalue) == ("ZeroDivisionError", "division by zero")
    assert failed[1].traceback[0] == "Traceback (most recent call last):"
    assert after[0].data == {"text/plain": "'after'"}
    assert [one.ename for one in syntax] == ["SyntaxError"]
    assert (ended[0].ename, ended[0].evalue[:28]) == (
        "EXECUTION_ERROR",
        "The program exited with stat",
    )
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute("1 / 0", "print('never')")


def test_kernel_imports_nothing_from_the_notebooks_directory(prefix: Path, sessions: Any) -> None:
    install(prefix, "--image", "python")
    canary, planted = prefix / "canary", prefix / "planted"
    planted.mkdir()
    for name in ("fumehood", "ipykernel", "json", "sitecustomize", "zmq"):
        (planted / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write(__name__)")
    subprocess.run([*INSTALL, "--help"], cwd=planted, capture_output=True, timeout=60, check=False)
    assert "fumehood" in canary.read_text()  # control: without `-P`
    canary.unlink()
    manager, client = start_new_kernel(kernel_name="fumehood", cwd=str(planted))
    try:
        assert run(client, "import sys")[0]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert not canary.exists()


def test_traceback_printed_by_the_program_is_shown(prefix: Path, sessions: Any) -> None:
    install(prefix, "--image", "python")
    program = "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
    first, second = execute(program, f"{program}print('x')")
    shown = "".join(one.text for one in first)
    again = "".join(one.text for one in second if one.name == "stderr")
    assert "ZeroDivisionError" in shown
    assert again == shown.replace("<code>", "<code 2>")


def test_cell_output_is_streamed_and_interrupt_keeps_the_variables(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    manager, client = kernel
    assert run(client, "x = 41")[0]["status"] == "ok"
    sent = client.execute("x = 0\nprint('on', flush=True)\nwhile True: pass")
    while client.get_iopub_msg(timeout=60)["content"].get("text") != "on\n":
        pass
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != sent:
        pass
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
    assert run(client, "x + 1")[1] == [
        {"data": {"text/plain": "42"}, "metadata": {}, "execution_count": 3}
    ]


def test_long_output_is_complete_and_a_silent_cell_publishes_nothing(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    _, client = kernel
    shown = run(client, "print('a' * 50_000)\n'b' * 50_000")[1]
    assert "".join(one.get("text", "") for one in shown) == f"{'a' * 50_000}\n"
    assert shown[-1]["data"]["text/plain"].startswith("'bbb")
    reply, shown = run(client, "y = 1\nprint('no')\ny", silent=True)
    assert (reply["status"], shown) == ("ok", [])
    assert run(client, "y")[1][0]["data"] == {"text/plain": "1"}


def test_kernel_restart_ends_its_session_and_starts_another(
    kernel: tuple[KernelManager, BlockingKernelClient], sessions: Callable[[], set[str]]
) -> None:
    manager, client = kernel
    run(client, "x = 1")
    before = sessions()
    manager.restart_kernel()
    client.wait_for_ready(timeout=60)
    assert run(client, "x")[0]["ename"] == "NameError"
    assert len(sessions() & before) == len(before) - 1


def test_ended_session_is_a_cell_error(
    kernel: tuple[KernelManager, BlockingKernelClient],
    sessions: Callable[[], set[str]],
    client: Client,
) -> None:
    before = sessions()
    _, front = kernel
    run(front, "x = 1")
    (made,) = sessions() - before
    client.end_session(made)
    reply, shown = run(front, "x")
    assert reply["status"] == "error"
    assert "has ended" in reply["evalue"]
    assert [one["ename"] for one in shown] == [reply["ename"]]


def test_kernel_process_never_runs_notebook_code(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    """Neither cells nor user expressions; control: this process."""
    _, client = kernel
    look = "import os\nprint(os.getuid(), os.path.exists('/workspace'), 'HOME' in os.environ)"
    shown = run(client, look, user_expressions={"a": "open('/tmp/escaped', 'w')"})[1]
    assert shown[0]["text"].startswith("10001 True")
    assert os.getuid() != 10001
    assert not Path("/tmp/escaped").exists()
    assert run(client, "!id")[0]["ename"] == "SyntaxError"


def test_files_on_a_disk_remain_and_the_loss_of_variables_is_reported(
    prefix: Path, sessions: Any, client: Client, disk_mb: int
) -> None:
    install(prefix, "--image", "python", "--disk-mb", str(disk_mb), "--memory-mb", "256")
    manager, front = start_new_kernel(kernel_name="fumehood")
    try:
        run(front, "x = 1\nopen('run', 'w').write('#!/bin/sh\\necho ran')")
        (record,) = (one for one in client.sessions() if one.disk_mb and one.state == "active")
        assert record.memory_mb == 256
        client.stop_session(record.id)
        code = "import os, subprocess\nos.chmod('run', 0o700)\nsubprocess.check_output('./run')"
        warning, value = run(front, code)[1]
        assert value["data"]["text/plain"] == "b'ran\\n'"
        assert warning["name"] == "stderr"
        assert "variables from before are gone" in warning["text"]
        assert run(front, "x")[0]["ename"] == "NameError"
    finally:
        front.stop_channels()
        manager.shutdown_kernel()


def test_install_options_are_stored_in_the_kernel_spec_and_used(
    prefix: Path, sessions: Any
) -> None:
    install(prefix, "--image", "no-such-image", "--agent-id", "nobody", "--wait-for-approval", "5")
    spec = json.loads((prefix / "share/jupyter/kernels/fumehood/kernel.json").read_text())
    assert spec["argv"][-3:] == [
        "--FumehoodKernel.image=no-such-image", "--FumehoodKernel.agent_id=nobody",
        "--FumehoodKernel.wait_for_approval=5.0",
    ]  # fmt: skip
    (refused,) = execute("1", allow_errors=True)
    assert refused[0].output_type == "error"
    assert "no-such-image" in refused[0].evalue or "nobody" in refused[0].evalue
