"""The arguments of the engine's own executors: one model for each executor.

Values only. Each model has three uses: it is the schema of the built-in tool, it limits the
parameters that a definition may declare for the executor, and it checks a call's arguments, because
a tool's own schema may be weaker. Invariant: paths in valid arguments stay inside the workspace.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from fumehood.core.errors import faults_of
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.core.names import MAX_NAME_CHARACTERS
from fumehood.core.value import StrictValue
from fumehood.core.workspace_path import path_fault

MAX_FILES = 100
"""Maximum number of files that one call sends or deletes."""

MAX_TOOLS = 64
"""Maximum number of other tools that one program may call."""

MAX_READ_BYTES = 256 * 1024
"""Maximum bytes of a file in one answer."""

MAX_WORDS = 4096
MAX_VARIABLES = 256
MAX_WORD_BYTES = 100 * 1024
"""Maximum bytes of one command-line argument or environment variable. *Source*: execve(2):
MAX_ARG_STRLEN is 128 KB.
"""

MAX_WORDS_BYTES = 5 << 18
"""Maximum bytes of all arguments and variables together. *Source*: execve(2): a quarter of the
stack limit, which gives 2 MB here."""


def _plain_path(path: str) -> str:
    fault = path_fault(path)
    if fault is not None:
        raise ValueError(f"({path[:MAX_NAME_CHARACTERS]!r}) {fault}")
    return path


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which UTF-8 cannot") from None
    return text


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character")
    return text


def _source(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return _without_nul(text)


def _word(text: str) -> str:
    if len(text.encode()) > MAX_WORD_BYTES:
        raise ValueError(f"has more than {MAX_WORD_BYTES} bytes")
    return _without_nul(text)


def _base64(text: str) -> str:
    try:
        base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("is not base64") from None
    return text


Path = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain_path)]
PathOrRoot = Annotated[
    str, Field(max_length=4096), AfterValidator(lambda path: path and _plain_path(path))
]
Text = Annotated[str, AfterValidator(_utf8)]
Source = Annotated[
    str, Field(min_length=1, max_length=5 << 20), AfterValidator(_utf8), AfterValidator(_source)
]
Base64 = Annotated[str, AfterValidator(_base64)]
ToolName = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(_utf8)]
Word = Annotated[str, AfterValidator(_utf8), AfterValidator(_word)]
VariableName = Annotated[str, Field(max_length=255, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


FOR_CLIENTS = "x-for-clients"
"""Marks a parameter in a tool's schema that is hidden from models. Any caller can still set the
parameter.
"""

HIDDEN: dict[str, JsonValue] = {FOR_CLIENTS: True}

COMMAND_OR_ARGV = ("command", "argv")
"""The names of two arguments, exactly one of which is required. `command` is text that bash runs;
`argv` is a program with its arguments."""

ONE_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"code:shell": COMMAND_OR_ARGV, "process:start": COMMAND_OR_ARGV}
)
"""Maps an executor to the names of arguments of which exactly one is required. Clients use this
table to make schemas for models."""


class Arguments(BaseModel):
    """Base class of the models of arguments. There is one model for each of the engine's own
    executors, which run tools.

    A tool's own schema may allow further arguments. The executor ignores them.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, json_schema_extra={"additionalProperties": False}
    )
    one_of: ClassVar[tuple[str, ...]] = ()
    """The names of arguments of which exactly one is required, or empty."""
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of arguments that exclude each other. If both are given and one is empty, the empty one
    counts as absent."""
    source: ClassVar[str] = ""
    """The name of the argument that holds the program, or an empty text if there is none."""
    is_checked_here: ClassVar[bool] = True
    """False if the program in the sandbox checks its arguments itself."""

    def further_faults(self) -> Iterator[tuple[str, str]]:
        """Yield the faults of arguments that are valid separately but not together.

        Each fault is the dotted path of an argument and a clause that describes the fault.
        """
        yield from ()


class SentFile(StrictValue):
    """A file that the caller sends. It is written into the working directory before the program
    starts.
    """

    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (("content", "content_base64"),)

    path: Path = Field(description="Relative path, such as 'data/input.csv'.")
    content: Text = Field("", description="The content as text.")
    content_base64: Base64 = Field("", description="Or the content as base64; one of the two.")

    @model_validator(mode="after")
    def _has_one_content(self) -> SentFile:
        if len(self.model_fields_set & {"content", "content_base64"}) != 1:
            raise ValueError("needs either content or content_base64")
        return self


class Variable(StrictValue):
    """One environment variable."""

    name: VariableName
    value: Word


class ProgramArguments(Arguments):
    """The arguments that all languages have in addition to the program."""

    source = "code"
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (("stdin", "stdin_base64"),)

    stdin: Text | None = Field(
        None, description="What the program reads from standard input; absent: nothing."
    )
    stdin_base64: Base64 | None = Field(
        None,
        description="Or the input as base64, if it is no text.",
        json_schema_extra=HIDDEN,
    )
    argv: list[Word] | None = Field(
        None,
        max_length=MAX_WORDS,
        description="Arguments that the program gets.",
        json_schema_extra=HIDDEN,
    )
    env: list[Variable] | None = Field(
        None,
        max_length=MAX_VARIABLES,
        description="Environment variables to set for it.",
        json_schema_extra=HIDDEN,
    )
    working_directory: PathOrRoot | None = Field(
        None,
        description="A directory of the working directory to start it in.",
        json_schema_extra=HIDDEN,
    )
    files: list[SentFile] | None = Field(
        None,
        max_length=MAX_FILES,
        description="Files to put into the working directory before it starts.",
    )

    return_files: bool | None = Field(
        None,
        description="Whether files that it writes are in the answer; absent: true.",
        json_schema_extra=HIDDEN,
    )

    def further_faults(self) -> Iterator[tuple[str, str]]:
        sent = self.files or []
        paths: set[str] = set()
        for index, file in enumerate(sent):
            if file.path in paths:
                yield f"files.{index}.path", f"({file.path[:MAX_NAME_CHARACTERS]!r}) is given twice"
            paths.add(file.path)
        if self.stdin is not None and self.stdin_base64 is not None:
            yield "stdin", "and stdin_base64 cannot both be given"
        source = self.source
        texts = [getattr(self, source) or "", self.stdin or self.stdin_base64 or ""]
        texts += [file.content or file.content_base64 for file in sent]
        if sum(len(text.encode()) for text in texts) > MAX_BODY_BYTES:
            yield "files", f"and {source} and stdin have more than {MAX_BODY_BYTES} bytes together"
        words = [*(self.argv or []), *(one.name + one.value for one in self.env or [])]
        if sum(len(word.encode()) for word in words) > MAX_WORDS_BYTES:
            yield "argv", f"and env have more than {MAX_WORDS_BYTES} bytes together"


class CodeArguments(ProgramArguments):
    code: Source = Field(description="The program. Print results, or end with an expression.")


class PythonArguments(CodeArguments):
    tools: list[ToolName] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description=(
            "Other tools that the program may call, as functions of the module 'tools': with "
            "['calculator'], tools.calculator('2 * 3')['value'] is 6."
        ),
    )


class CommandArguments(ProgramArguments):
    source = "command"
    one_of: ClassVar[tuple[str, ...]] = COMMAND_OR_ARGV
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = (
        ("command", "argv"),
        *ProgramArguments.exclusive,
    )

    command: Source | None = Field(
        None, description="What bash is to run; several lines are a script."
    )
    argv: list[Word] | None = Field(
        None,
        max_length=MAX_WORDS,
        description="Or a program and its arguments, which run without a shell; one of the two.",
        json_schema_extra=HIDDEN,
    )

    def further_faults(self) -> Iterator[tuple[str, str]]:
        if (self.command is None) == (self.argv is None):
            yield "command", "or argv is needed, one of the two"
        if self.argv is not None and not (self.argv and self.argv[0]):
            yield "argv", "names no program"
        yield from super().further_faults()


class NoArguments(Arguments):
    """No arguments."""


_BY_SOURCE: Mapping[str, type[ProgramArguments]] = {
    model.source: model for model in (CodeArguments, CommandArguments)
}

ARGUMENTS: Mapping[str, type[Arguments]] = MappingProxyType(
    {
        **{language.executor: _BY_SOURCE[language.source] for language in LANGUAGES.values()},
        "code:python": PythonArguments,
    }
)
"""Maps each executor of the engine itself to the model of its arguments. A tool's schema may narrow
the arguments, but not add any. `registry/arguments.py` also has the models of executors that parts
add."""


def faults_of_arguments(model: type[Arguments], arguments: JsonObject) -> list[tuple[str, str]]:
    """Return all faults of a call's arguments according to their model, each as the dotted path of
    an argument and a clause that describes the fault. The list is empty if the arguments are valid.
    """
    try:
        return list(model.model_validate(arguments).further_faults())
    except ValidationError as error:
        return [(path, _clause(said)) for path, said in faults_of(error)]


def _clause(message: str) -> str:
    """Convert an error message of pydantic to a clause that can follow the argument's name."""
    clause = message.removeprefix("Input ")
    return clause[0].lower() + clause[1:]
