"""deepagents: a backend that makes a session the agent's sandbox.

Needs the extra `deepagents`. The agent uses deepagents' own file tools, which run shell commands.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from deepagents.backends.protocol import (
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from fumehood.client import Client
from fumehood.client.api_request import Refused
from fumehood.client.finished import Finished, refused
from fumehood.client.sync.session import Session
from fumehood.core.envelope import CallFailed

WORKSPACE = "/workspace/"
"""The session's working directory. Files in it are transferred without shell commands."""

_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = 'base64 < "$1"'
_ERRORS = (
    ("No such file", "file_not_found"),
    ("Is a directory", "is_directory"),
    ("denied", "permission_denied"),
    ("Read-only", "permission_denied"),
)
"""Maps a part of a shell's error message to deepagents' error code."""

_FAULTS = {"RESOURCE_NOT_FOUND": "file_not_found", "INVALID_PARAMS": "invalid_path"}
"""Maps an error code of the engine to deepagents' error code."""


class FumehoodBackend(BaseSandbox):
    """A session as an agent's sandbox: `create_deep_agent(…, backend=FumehoodBackend())`.

    Commands start in `/workspace`. Only `/workspace` and `/tmp` are writable.
    """

    def __init__(self, client: Client | None = None, **options: Any) -> None:
        """`options` are passed to `Session`. The session is created on first use."""
        self._session = Session(client, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session if this object created it."""
        self._session.close()

    @property
    def id(self) -> str:
        """The id of the session, which is created on first use."""
        return self._session.start()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command. If the engine refuses the command, the reason is returned as output, so
        that the model can continue.
        """
        try:
            ran = self._session.run(command, timeout_s=timeout)
        except CallFailed as failed:
            ran = refused(failed)
        is_cut = ran.code == "OUTPUT_LIMIT_EXCEEDED"
        return ExecuteResponse(output=ran.output, exit_code=ran.exit_code, truncated=is_cut)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files. Each file has its own result, so that a failure does not affect the other
        files.
        """
        answers = []
        for path, content in files:
            _, error = self._tried(partial(self._put, path, content))
            answers.append(FileUploadResponse(path=path, error=error))
        return answers

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files. Each file has its own result, so that a failure does not affect the other
        files.
        """
        answers = []
        for path in paths:
            content, error = self._tried(partial(self._get, path))
            answers.append(FileDownloadResponse(path=path, content=content, error=error))
        return answers

    def _tried(self, act: Callable[[], Any]) -> tuple[Any, str | None]:
        try:
            return act(), None
        except (CallFailed, Refused) as failed:
            return None, _FAULTS.get(failed.code, failed.message)
        except ValueError:
            return None, "invalid_path"
        except OSError as failed:
            return None, str(failed)

    def _put(self, path: str, content: bytes) -> None:
        if path.startswith(WORKSPACE):
            self._session.put(path.removeprefix(WORKSPACE), content)
        else:
            self._done(self._session.run(["sh", "-c", _WRITE, "sh", path], stdin=content))

    def _get(self, path: str) -> bytes:
        if path.startswith(WORKSPACE):
            return self._session.get(path.removeprefix(WORKSPACE))
        return base64.b64decode(self._done(self._session.run(["sh", "-c", _READ, "sh", path])))

    def _done(self, ran: Finished) -> str:
        """Return a command's standard output. If the command failed, raise OSError with deepagents'
        error code.
        """
        if ran.exit_code:
            said = (word for part, word in _ERRORS if part in ran.stderr)
            raise OSError(next(said, ran.output[:200]))
        return ran.stdout
