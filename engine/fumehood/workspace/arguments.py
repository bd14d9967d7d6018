"""The arguments of the tools that work on session files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from fumehood.core.arguments import (
    MAX_FILES,
    MAX_READ_BYTES,
    Arguments,
    Base64,
    Path,
    PathOrRoot,
    SentFile,
    Text,
)
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.core.pages import MAX_PAGE

_MAX_OFFSET = 1 << 50


def _offset(value: int) -> int:
    if value > _MAX_OFFSET:
        raise ValueError("is larger than any file")
    return value


class ReadArguments(Arguments):
    path: Path = Field(description="Relative path, such as 'data/output.csv'.")
    offset: Annotated[int, Field(ge=0), AfterValidator(_offset)] | None = Field(
        None, description="First byte to read; absent: 0."
    )
    limit: int | None = Field(
        None, ge=1, le=MAX_READ_BYTES, description="Bytes to read at most; absent: 10240."
    )
    encoding: Literal["text", "base64"] | None = Field(
        None, description="Absent: text, or base64 if it is not text."
    )


class WriteArguments(Arguments):
    exclusive: ClassVar[tuple[tuple[str, str], ...]] = SentFile.exclusive

    path: Path = Field(description="Relative path, such as 'data/input.csv'.")
    content: Text | None = Field(None, description="The content as text.")
    content_base64: Base64 | None = Field(
        None, description="Or the content as base64; one of the two."
    )
    mode: Literal["create", "replace", "append"] | None = Field(
        None, description="create (the default) fails if the file exists."
    )

    def further_faults(self) -> Iterator[tuple[str, str]]:
        if (self.content is None) == (self.content_base64 is None):
            yield "content", "or content_base64 is needed, one of the two"
            return
        size = len(self.content_base64 or "") * 3 // 4 or len((self.content or "").encode())
        if size > MAX_BODY_BYTES:
            yield "content", f"has more than {MAX_BODY_BYTES} bytes"


class ListArguments(Arguments):
    path: PathOrRoot | None = Field(
        None, description="A relative path; absent: the working directory itself."
    )
    recursive: bool | None = Field(
        None, description="Whether to include subdirectories' contents; absent: false."
    )
    limit: int | None = Field(
        None, ge=1, le=MAX_PAGE, description="Entries of this page; absent: 10."
    )
    cursor: str | None = Field(
        None, description="next_cursor of the previous page; absent: the first page."
    )


class DeleteArguments(Arguments):
    paths: list[Path] = Field(min_length=1, max_length=MAX_FILES, description="Relative paths.")
    recursive: bool | None = Field(
        None, description="Whether to delete directories with their contents; absent: false."
    )
