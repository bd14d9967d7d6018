"""smolagents: the Python executor of a `CodeAgent`.

Needs the extra `smolagents`. All values are passed as JSON, so nothing is unpickled. Tools are sent
into the sandbox as source code and run there, as with smolagents' own remote executors.
"""

from __future__ import annotations

import io
import json
from typing import Any, Self

import PIL.Image
from smolagents.local_python_executor import CodeOutput, ExecutionTimeoutError, PythonExecutor
from smolagents.tools import Tool, get_tools_definition_code

from fumehood.client import Client
from fumehood.client.finished import Finished
from fumehood.client.sync.session import Session
from fumehood.core.envelope import Envelope

ANSWER = ".final_answer.json"
"""The file in the workspace to which `final_answer` writes its result. In a file, the result may
have any length."""

_FINAL_ANSWER = f"""
def _finally(tool):
    def final_answer(*args, **kwargs):
        import json
        answer = tool(*args, **kwargs)
        with open("/workspace/{ANSWER}", "w") as file:
            json.dump(answer, file, default=lambda value: value.tolist())  # of NumPy
        raise SystemExit(0)
    return final_answer
final_answer = _finally(final_answer)
"""


class FumehoodExecutor(PythonExecutor):
    """Runs an agent's code in one session: `CodeAgent(…, executor=FumehoodExecutor())`."""

    def __init__(self, client: Client | None = None, **options: Any) -> None:
        """`options` are passed to `Session`. The session is created on first use."""
        self._session = Session(client, **options)
        self.state: dict[str, Any] = {"_print_outputs": ""}
        """`_print_outputs` is the output of the last code that ran. If the code failed, agents show
        this output."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """End the session if this object created it. Agents call this method when they end."""
        self._session.close()

    def send_tools(self, tools: dict[str, Tool]) -> None:
        """Define tools in the session.

        Raises:
            TypeError: a value in `tools` is not a `Tool`, for example an agent.
        """
        for name, tool in tools.items():
            if not isinstance(tool, Tool):
                raise TypeError(f"{name} cannot be sent into the sandbox: it is no Tool.")
        code = get_tools_definition_code(tools)
        self._run(code + (_FINAL_ANSWER if "final_answer" in tools else ""))

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Define variables in the session. Raises TypeError if a value cannot be encoded as
        JSON.
        """
        if variables:
            sent = json.dumps(json.dumps(variables))
            self._run(f"import json as _json\nglobals().update(_json.loads({sent}))\ndel _json")

    def __call__(self, code_action: str) -> CodeOutput:
        """Run code. Return its value, its output, and True in `is_final_answer` if the code called
        `final_answer`.

        Raises:
            ExecutionTimeoutError: the code took too long.
            RuntimeError: the code failed; the message is for the model.
            CallFailed: the engine refused the call.
        """
        ran = self._run(code_action)
        envelope = ran.envelope
        if any(file.filename == ANSWER for file in envelope.files):
            answer = json.loads(self._session.get(ANSWER))
            self._session.delete(ANSWER)
            return CodeOutput(output=answer, logs=ran.stdout, is_final_answer=True)
        return CodeOutput(output=self._value(envelope), logs=ran.stdout, is_final_answer=False)

    def _run(self, code: str) -> Finished:
        self.state["_print_outputs"] = ""  # otherwise a refused program shows the previous output
        ran = self._session.finish(self._session.call("run_python", {"code": code}))
        self.state["_print_outputs"] = ran.stdout
        if ran.is_timeout:
            raise ExecutionTimeoutError(ran.message)
        if ran.exit_code:
            raise RuntimeError(f"{ran.message}\n{ran.stderr}")
        return ran

    def _value(self, envelope: Envelope) -> Any:
        if envelope.data["value_repr"] is None and envelope.images:
            picture = envelope.images[0]
            content = picture.data
            if content is None and picture.url is not None:
                content = self._session.client().blob(picture.url)
            return PIL.Image.open(io.BytesIO(content or b""))
        value = self._session.whole(envelope, "value")
        return envelope.data["value_repr"] if value is None else value
