"""The arguments of the tools for a session's processes, which are also the requests to the guest.

Invariant: a request that is sent to a guest is valid.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field

from fumehood.core.arguments import (
    COMMAND_OR_ARGV,
    HIDDEN,
    MAX_VARIABLES,
    MAX_WORDS,
    Arguments,
    Base64,
    NoArguments,
    PathOrRoot,
    Source,
    Text,
    Variable,
    Word,
    faults_of_arguments,
)
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.protocol.framing import MAX_INPUT_BYTES

DEFAULT_GRACE_S = 5.0
"""Default number of seconds between SIGTERM and SIGKILL when a process is stopped."""

ProcessName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
_NAME = Field(description="The process's name in its session.")


class StartArguments(Arguments):
    source = "command"
    one_of: ClassVar[tuple[str, ...]] = COMMAND_OR_ARGV
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (COMMAND_OR_ARGV,)

    name: ProcessName = Field(description="A name for it, such as 'server'.")
    command: Source | None = Field(None, description="A command for bash.")
    argv: list[Word] | None = Field(
        None,
        max_length=MAX_WORDS,
        description="Or a program and its arguments, run without a shell; give one of the two.",
        json_schema_extra=HIDDEN,
    )
    env: list[Variable] | None = Field(
        None, max_length=MAX_VARIABLES, description="Its environment variables."
    )
    working_directory: PathOrRoot | None = Field(
        None, description="The directory to start it in, relative to the workspace."
    )
    restart: bool | None = Field(
        None,
        description="Whether to restart it whenever a stopped session is started again; absent: "
        "false.",
    )

    def further_faults(self) -> Iterator[tuple[str, str]]:
        if (self.command is None) == (self.argv is None):
            yield "command", "or argv is needed, one of the two"
        if self.argv is not None and not (self.argv and self.argv[0]):
            yield "argv", "names no program"


class ReadArguments(Arguments):
    name: ProcessName = _NAME
    after: int | None = Field(
        None, ge=0, description="The offset of the previous answer; absent: from the beginning."
    )


class WriteArguments(Arguments):
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (("text", "text_base64"),)

    name: ProcessName = _NAME
    text: Text | None = Field(None, description="The text to write to its standard input.")
    text_base64: Base64 | None = Field(
        None, description="Or the input as base64.", json_schema_extra=HIDDEN
    )
    close: bool | None = Field(
        None, description="Whether to close its standard input afterwards; absent: false."
    )

    def further_faults(self) -> Iterator[tuple[str, str]]:
        if self.text is not None and self.text_base64 is not None:
            yield "text", "and text_base64 cannot both be given"


class StopArguments(Arguments):
    name: ProcessName = _NAME
    grace_s: float | None = Field(
        None, ge=0, le=30, description="Seconds that it has to end by itself; absent: 5."
    )


ACTIONS: Mapping[str, type[Arguments]] = MappingProxyType(
    {
        "start": StartArguments,
        "list": NoArguments,
        "read": ReadArguments,
        "write": WriteArguments,
        "stop": StopArguments,
    }
)
"""The value of a request's field `do` → the model of the request's other fields."""


def checked(request: JsonObject) -> JsonObject:
    """Validate a request about a session's processes. Return it in the form that guests expect,
    with defaults filled in. The field `do` of the request names the action, such as `start`.

    Raises:
        InvalidParams: the request is invalid.
    """
    given = {name: value for name, value in request.items() if value is not None}
    do = given.pop("do")
    model = ACTIONS[do]
    faults = faults_of_arguments(model, given)
    if faults:
        words = "; ".join(f"{path}: {why}" for path, why in faults)
        raise InvalidParams(
            f"The request about processes is invalid: {words}.",
            fields=[path for path, _ in faults],
        )
    given = model.model_validate(given).model_dump(exclude_none=True)
    match do:
        case "read":
            given = {"after": 0, **given}
        case "stop":
            given = {"grace_s": DEFAULT_GRACE_S, **given}
        case "write":
            text, encoded = given.pop("text", ""), given.pop("text_base64", "")
            data = text.encode() or base64.b64decode(encoded)
            if len(data) > MAX_INPUT_BYTES:
                raise InvalidParams(f"One write can have at most {MAX_INPUT_BYTES} bytes.")
            given |= {
                "data": base64.b64encode(data).decode("ascii"), "close": given.get("close", False),
            }  # fmt: skip
    return {"do": do, **given}
