"""Jupyter: a kernel whose cells run in a session. `python -m fumehood.integrations.jupyter install`

Needs the extra `jupyter`. The command `install` registers the kernel with Jupyter. Without
`install`, the command runs the kernel's process, which runs no notebook code itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from jupyter_client.kernelspec import KernelSpecManager
from traitlets import Float, Integer, Unicode

from fumehood.client.async_session import TIMEOUT_S, AsyncSession
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.returned_file import PNG

_TRACEBACK = re.compile(r'^(Traceback \(most recent|  File "<code)', re.MULTILINE)


class FumehoodKernel(Kernel):
    """A Jupyter kernel with one session. The first cell creates the session, and the session ends
    with the kernel.
    """

    implementation = "fumehood"
    implementation_version = "1"
    banner = "Python in a sandbox of fumehood"
    language_info: ClassVar[JsonObject] = {
        "name": "python", "mimetype": "text/x-python", "file_extension": ".py",
    }  # fmt: skip

    image = Unicode("", help="The image of the session.").tag(config=True)
    memory_mb = Integer(0, help="The memory of the session, in MB.").tag(config=True)
    disk_mb = Integer(0, help="The size of the session's disk, in MB.").tag(config=True)
    agent_id = Unicode("", help="The agent to make the calls for.").tag(config=True)
    wait_for_approval = Float(0.0, help="Seconds to wait for approval.").tag(config=True)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sandbox = AsyncSession(
            image=self.image or None,
            memory_mb=self.memory_mb or None,
            disk_mb=self.disk_mb or None,
            agent_id=self.agent_id or None,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cell: asyncio.Task[JsonObject | None] | None = None
        self._held, self._is_silent = "", False

    async def do_execute(self, code: str, silent: bool, **_: Any) -> JsonObject:
        """Run a cell and return Jupyter's reply. The cell's output is shown as it arrives."""
        self._loop = asyncio.get_running_loop()
        self._held, self._is_silent = "", silent
        self._cell = asyncio.create_task(self._run(code))
        try:
            error = await self._cell
        except asyncio.CancelledError:
            error = _error("KeyboardInterrupt", "The variables are those from before this cell.")
        except Exception as fault:  # without an answer the front end would wait forever
            error = _error(getattr(fault, "code", type(fault).__name__), str(fault))
        finally:
            self._cell = None
        if error is None:
            return {"status": "ok", "execution_count": self.execution_count, "payload": []}
        self._publish("error", error)
        return {"status": "error", "execution_count": self.execution_count, **error}

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Cancel the running cell. Jupyter calls this method in the thread of the control
        channel.
        """
        self._cancel()
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> JsonObject:
        """Cancel the running cell, end the session, and return Jupyter's reply. The session is
        ended in the event loop in which it was created.
        """
        if self._loop is not None:
            self._cancel()
            closing = asyncio.run_coroutine_threadsafe(self._sandbox.close(), self._loop)
            await asyncio.wrap_future(closing)
        return {"status": "ok", "restart": restart}

    def _cancel(self) -> None:
        cell = self._cell
        if cell is not None:
            cell.get_loop().call_soon_threadsafe(cell.cancel)

    async def _run(self, code: str) -> JsonObject | None:
        client: Any = await self._sandbox.client()  # with the methods of parts
        events = client.stream(
            "run_python",
            {"code": code, "return_files": False},
            session_id=await self._sandbox.start(),
            agent_id=self.agent_id or None,
            timeout_seconds=TIMEOUT_S,
            wait_for_approval=self.wait_for_approval or None,
            cancel_on_disconnect=True,
        )
        async with aclosing(events):
            async for event in events:
                match event.type:
                    case "tool_output":
                        self._show(event.stream, event.text)
                    case "tool_notice":
                        self._show("stderr", f"{event.message}\n")
                    case "tool_result" | "tool_error":
                        return await self._end(event.envelope)
        raise EOFError("The events ended without an answer.")

    def _show(self, stream: str, text: str) -> None:
        """Show output, but hold back a traceback on `stderr`.

        If the traceback turns out to be the cell's error, it is not shown as output, because
        Jupyter shows the error separately. Otherwise, it is shown later.
        """
        if stream != "stderr":
            self._write("stderr", self._held)
            self._held = ""
        text = self._held + text  # a traceback may arrive in several pieces
        found = _TRACEBACK.search(text) if stream == "stderr" else None
        end = len(text) if found is None else found.start()
        self._held = text[end:]
        self._write(stream, text[:end])

    async def _end(self, envelope: Envelope) -> JsonObject | None:
        error = None
        if envelope.error is not None:
            raised = (envelope.error.details or {}).get("exception")
            error = _error(envelope.error.code, envelope.error.message)
            if raised is not None:
                self._held = self._held.removesuffix(raised["traceback"])
                error = _error(raised["type"], raised["message"], raised["traceback"])
        lost = (one for one in envelope.metadata.warnings if one.startswith("session: "))
        self._write("stderr", self._held + "".join(f"{one}\n" for one in lost))
        for image in (one for one in envelope.images if one.content_type == PNG):
            content = image.data
            if content is None and image.url is not None:
                content = await (await self._sandbox.client()).blob(image.url)
            data = {PNG: base64.b64encode(content or b"").decode("ascii")}
            self._publish("display_data", {"data": data, "metadata": {}})
        if error is None and envelope.data["value_repr"] is not None:
            data = {"text/plain": await self._sandbox.whole(envelope, "value_repr")}
            answer = {"data": data, "metadata": {}, "execution_count": self.execution_count}
            self._publish("execute_result", answer)
        return error

    def _write(self, stream: str, text: str) -> None:
        if text:
            self._publish("stream", {"name": stream, "text": text})

    def _publish(self, kind: str, content: JsonObject) -> None:
        if not self._is_silent:
            self.send_response(self.iopub_socket, kind, content)


def _error(name: str, message: str, traceback: str = "") -> JsonObject:
    lines = (traceback or f"{name}: {message}").rstrip().split("\n")
    return {"ename": name, "evalue": message, "traceback": lines}


def install(arguments: list[str]) -> str:
    """Register the kernel with Jupyter. Return the directory of the kernel's specification.
    `arguments` are the command-line arguments after `install`.
    """
    parser = argparse.ArgumentParser(prog="python -m fumehood.integrations.jupyter install")
    parser.add_argument("--prefix", help="the environment to install into")
    parser.add_argument("--user", action="store_true", help="for this user only")
    parser.add_argument("--image", help="the image of the sessions")
    parser.add_argument("--memory-mb", type=int, help="the memory of the session")
    parser.add_argument("--disk-mb", type=int, help="the size of the session's disk")
    parser.add_argument("--agent-id", help="the agent to make the calls for")
    parser.add_argument("--wait-for-approval", type=float, help="seconds to wait for approval")
    given = vars(parser.parse_args(arguments))
    places = {name: given.pop(name) for name in ("prefix", "user")}
    options = [f"--FumehoodKernel.{name}={value}" for name, value in given.items() if value]
    module = "fumehood.integrations.jupyter"
    spec = {
        # -P: Jupyter starts a kernel in the directory of the notebook, which may hold any file.
        "argv": [sys.executable, "-P", "-m", module, "-f", "{connection_file}", *options],
        "display_name": "Python (fumehood)",
        "language": "python",
        "interrupt_mode": "message",
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        return str(KernelSpecManager().install_kernel_spec(directory, "fumehood", **places))


def main() -> None:
    """Register the kernel if the first argument is `install`. Otherwise, run the kernel's
    process.
    """
    if sys.argv[1:2] == ["install"]:
        print(f"Installed in {install(sys.argv[2:])}")
    else:
        IPKernelApp.launch_instance(kernel_class=FumehoodKernel, ignore_cwd=True)


if __name__ == "__main__":
    main()
