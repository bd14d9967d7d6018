"""Messages: conversion between typed values and the dictionaries that processes exchange.

Host side, used by the daemon, the client, and the host's part of each wall. Guests are hostile, so
their frames are parsed only by strict models, such as those in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fumehood.core.envelope import Envelope
from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.protocol import framing
from fumehood.protocol.framing import FrameError

Frame = TypeVar("Frame", bound=BaseModel)

_ENVELOPE = TypeAdapter(Envelope).serializer


class StrictFrame(BaseModel):
    """A message from a guest. Unknown fields are refused. A value of a wrong type is refused and
    not converted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GuestReady(StrictFrame):
    """The guest's report that it is ready. `enforces` says for each limit that the guest has tested
    whether the limit holds.
    """

    op: str
    enforces: dict[str, bool]
    faults: tuple[str, ...] = Field(strict=False)
    watched: tuple[str, ...] = Field(default=(), strict=False)
    """The limits that the guest enforces by looking at them from time to time, because the
    operating system does not enforce them.
    """
    streams: tuple[str, ...] = Field(default=(), strict=False)
    """The kinds of streams that the guest supports."""

    @property
    def enforced(self) -> frozenset[Limit]:
        """The limits that the guest has tried to break without success."""
        return frozenset(limit for limit in Limit if self.enforces.get(limit, False))


class GuestEnding(StrictFrame):
    """How one run ended. All values except `claim` were decided or measured outside the child
    process that ran the program.
    """

    op: str
    id: int
    ended_by: EndedBy = Field(strict=False)
    cpu_ms: float | None = Field(ge=0)
    peak_memory_bytes: int | None = Field(ge=0)
    output_bytes: int = Field(ge=0)
    exit_code: int | None
    signal: int | None
    claim: dict[str, Any] | None


class GuestProgress(StrictFrame):
    """A progress report of a run's program. It is an unverified claim."""

    op: str
    id: int
    percent: float = Field(ge=0, le=100, allow_inf_nan=False)
    message: str = Field(max_length=framing.MAX_REPORT_CHARACTERS)


class GuestPart(StrictFrame):
    """The next piece of text in a streaming function's result."""

    op: str
    id: int
    text: str


GuestFrame = GuestReady | GuestEnding | GuestProgress | GuestPart

_KINDS: dict[str, type[GuestFrame]] = {
    "ready": GuestReady,
    "ended": GuestEnding,
    "progress": GuestProgress,
    "part": GuestPart,
}


def parse_guest_frame(message: dict[str, Any]) -> GuestFrame:
    """Parse a frame from the guest of a process wall, and return it.

    Raises:
        FrameError: the message is not one of the guest's messages.
    """
    return parse_frame(message, _KINDS)


def parse_frame(message: dict[str, Any], kinds: Mapping[str, type[Frame]]) -> Frame:
    """Parse a frame as one of the models in `kinds`, and return it as an object of this model.
    `kinds` maps each value that the frame's field `op` can have to a model.

    Raises:
        FrameError: the message is of an unknown kind, or is invalid.
    """
    kind = kinds.get(str(message.get("op")))
    if kind is None:
        raise FrameError("a guest sent a message of an unknown kind")
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        raise FrameError(f"a guest's message is wrong in {error.error_count()} places") from None


def run_frame(run_id: int, program: str, arguments: JsonObject, limits: Limits) -> JsonObject:
    """Return the frame that starts a run. `limits` must include a memory limit."""
    return {
        "op": "run",
        "id": run_id,
        "program": program,
        "arguments": arguments,
        "limits": limits_in_frame(limits),
    }


def limits_in_frame(limits: Limits) -> JsonObject:
    """Return the limits of a run in the form in which frames contain them.

    Raises:
        ValueError: there is no memory limit, which the guest needs.
    """
    if limits.memory_mb is None:
        raise ValueError("a run in a guest needs a memory limit")
    return {
        "wall_s": limits.wall_s,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_mb << 20,
        "output_bytes": limits.output_bytes,
    }


def lend_frame(loan_id: int, memory_bytes: int, cpu_s: float) -> JsonObject:
    """Return the frame with which the host asks the guest for a child process, with which the host
    then communicates directly. `loan_id` identifies the request. The limits apply to the child
    process.
    """
    return {"op": "lend", "id": loan_id, "memory_bytes": memory_bytes, "cpu_s": cpu_s}


def program_request(program: str, arguments: JsonObject, limits: Limits) -> JsonObject:
    """Return the request that makes a child process of the guest run a program. The host or the
    guest's supervisor sends it to the child process.
    """
    return {"program": program, "output_bytes": limits.output_bytes, "arguments": arguments}


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode an envelope as JSON."""
    return _ENVELOPE.to_json(envelope)


def decode_envelope(body: bytes) -> Envelope:
    """Decode an envelope from JSON.

    Raises:
        ValueError: the bytes are not a valid envelope.
    """
    return Envelope.model_validate_json(body)
