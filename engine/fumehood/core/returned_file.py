"""A file in an answer: its name, its type, and its bytes if they are inline.

Values only. Files under 1 MB are in the answer itself; larger ones are fetched from their `url`.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Any

PNG = "image/png"
FILE_CONTENT = "content_base64"
"""The key under which an inline file has its bytes."""

_URL = re.compile(
    r"/v1/blobs/(?P<blob_id>blob_[0-9a-f]{32})"
    r"\?expires=(?P<expires>[0-9]{1,12})&signature=(?P<signature>[0-9a-f]{64})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ReturnedFile:
    """One file in an answer. `data` is None if the file is too large to be in the answer itself.
    Such a file must be fetched from `url`.
    """

    filename: str
    content_type: str
    size: int
    data: bytes | None = field(repr=False)
    url: str | None = None
    """The argument for a client's `blob` and `save_blob`, and for an engine's `blob`."""

    def _repr_png_(self) -> bytes | None:
        """Return the bytes that a notebook displays, or None if the file is not a PNG or its bytes
        are not in the answer.
        """
        return self.data if self.content_type == PNG else None


def returned_files(listed: Any) -> tuple[ReturnedFile, ...]:
    """Return the files in `listed`, a list of files in an answer. Items that do not describe a file
    are left out.
    """
    items = listed if isinstance(listed, list | tuple) else ()
    return tuple(_file_of(item) for item in items if _is_file(item))


def without_contents(listed: Any) -> Any:
    """Return `listed`, a list of files in an answer, with the contents of inline files replaced by
    empty texts.
    """
    if not isinstance(listed, list | tuple):
        return listed
    return [
        {**item, FILE_CONTENT: ""}
        if _is_file(item) and _decoded(item.get(FILE_CONTENT)) is not None
        else item
        for item in listed
    ]


@dataclass(frozen=True, slots=True)
class BlobUrl:
    """The parts of a blob's URL. Only the engine can verify its signature."""

    blob_id: str
    expires: str
    signature: str


def parse_blob_url(url: str) -> BlobUrl:
    """Split the URL of a blob, in the form that answers contain, into its parts.

    Raises:
        ValueError: the text is not the URL of a blob.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"{url[:80]!r} is not the address of a blob from an answer.")
    return BlobUrl(**match.groupdict())


def _is_file(item: Any) -> bool:
    return isinstance(item, dict) and all(
        isinstance(item.get(key), str) for key in ("filename", "content_type")
    )


def _file_of(item: dict[str, Any]) -> ReturnedFile:
    data, url, size = _decoded(item.get(FILE_CONTENT)), item.get("url"), item.get("size")
    return ReturnedFile(
        filename=item["filename"],
        content_type=item["content_type"],
        size=size if type(size) is int else len(data or b""),
        data=data,
        url=url if isinstance(url, str) else None,
    )


def _decoded(content: Any) -> bytes | None:
    try:
        return base64.b64decode(content, validate=True) if isinstance(content, str) else None
    except (binascii.Error, ValueError):
        return None
