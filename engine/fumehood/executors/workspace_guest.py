"""One request to the guest's program `files`, and its answer or error.

Host side, between the workspace tools, the session routes and a session's lease. The survey before
a decision and the action after it are built from the same request, so they cannot differ. The
message of a refusal is the engine's own.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from fumehood.core.errors import (
    ENDING_ERRORS,
    EndedBy,
    EngineError,
    ExecutionError,
    InvalidParams,
    ResourceNotFound,
    SandboxUnavailable,
    WorkspaceChanged,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.executors.endings import refused_by, session_lost
from fumehood.executors.workspace_claims import Fault, NotAsAgreed, read_answer, read_fault
from fumehood.sandbox.wall import Lease, RunEnding

PROGRAM = "files"

M = TypeVar("M", bound=BaseModel)

FAULT_WORDS = {
    "not_found": "There is no such file or directory in the workspace.",
    "not_a_file": "That is no plain file: a directory, a pipe or a device cannot be read or "
    "written as one.",
    "link": "The path leads over a symbolic link, and none is followed. Name what it leads to.",
    "exists": "There is one already. Replace it with mode 'replace', or choose another path.",
    "no_room": "The workspace has no room for it. Delete something, or begin a session with more "
    "memory.",
    "not_empty": "The directory is not empty. Delete what is in it, too, with recursive.",
    "changed": "The file was changed meanwhile. Begin again.",
    "invalid": "That cannot be done in a workspace.",
    "no_right": "The session's programs have no right to change that, and neither has this call.",
    "unseen": "It cannot be shown whole what that would change: something there cannot be read, or "
    "is nested too deeply.",
    "too_many": "It touches more files than can be looked at. Name fewer at a time.",
    "not_as_seen": "The workspace is not any more as it was when this was approved.",
}

_FIELD = "path"


@dataclass(frozen=True, slots=True)
class Said(Generic[M]):
    """The ending of a request: a value or an error."""

    ending: RunEnding
    value: M | None = None
    error: EngineError | None = None

    @property
    def required(self) -> M:
        """The value. Raises the error if there is none."""
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


async def ask(lease: Lease, request: JsonObject, limits: Limits, model: type[M]) -> Said[M]:
    """Send one request. The answer is parsed as `model`."""
    ending = await lease.run(PROGRAM, request, limits)
    if ending.ended_by is not EndedBy.OK:
        return Said(ending, error=_ended(ending, limits))
    fault = read_fault(ending.result)
    if fault is not None:
        return Said(ending, error=_refused(fault))
    try:
        return Said(ending, read_answer(model, ending.result))
    except NotAsAgreed:
        return Said(ending, error=not_as_agreed())


def not_as_agreed() -> SandboxUnavailable:
    """The error for an invalid answer: a program may have tampered with the guest."""
    return SandboxUnavailable(
        "The session's container gave an answer that has not the agreed form, so nothing in it "
        "can be relied on. End the session and begin another.",
        retryable=False,
    )


def _refused(fault: Fault) -> EngineError:
    words = FAULT_WORDS[fault.kind]
    if fault.kind == "not_as_seen":
        return WorkspaceChanged(
            f"{words} Nothing was changed. It has to be approved again.",
            details={"changed": ["workspace"]},
        )
    if fault.kind == "not_found":
        return ResourceNotFound(words, fields=[_FIELD])
    return InvalidParams(words, fields=[_FIELD], details={"fault": fault.kind})


def _ended(ending: RunEnding, limits: Limits) -> EngineError:
    if ending.ended_by is EndedBy.SANDBOX_LOST:
        return session_lost({})
    error_class = ENDING_ERRORS[ending.ended_by] or ExecutionError
    why: Any = " ".join(refused_by(ending.limits_hit, limits))
    return error_class(
        f"The work on the files was ended ({ending.ended_by.value}). Ask for less at a time."
        + (f" {why}" if why else "")
    )


# -- requests of the tools that change a workspace -----------------------------------------


def write_request(arguments: JsonObject) -> JsonObject:
    """The request of `write_file`."""
    return {
        "do": "write",
        "path": arguments["path"],
        "content_base64": base64.b64encode(content_of(arguments)).decode("ascii"),
        "mode": arguments.get("mode") or "create",
    }


def content_of(arguments: JsonObject) -> bytes:
    """The content for `write_file`."""
    text = arguments.get("content")
    return base64.b64decode(arguments["content_base64"]) if text is None else text.encode()


def delete_request(arguments: JsonObject) -> JsonObject:
    """The request of `delete_files`. A path that is named twice counts once."""
    paths = list(dict.fromkeys(arguments["paths"]))
    return {"do": "delete", "paths": paths, "recursive": arguments.get("recursive") or False}
