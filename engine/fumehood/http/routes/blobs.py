"""`GET /v1/blobs/{blob_id}`: content that was too large for an answer, for its owner only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, BinaryIO

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.endpoint import ANY_MEDIA, Needs, endpoint
from fumehood.http.transfers import attachment_headers
from fumehood.storage.blobs import Blob

CHUNK_BYTES = 64 * 1024


class BlobQuery(BaseModel):
    """The query parameters of a blob's address."""

    model_config = ConfigDict(extra="forbid")

    expires: str = Field(description="As in the address that an answer gave.")
    signature: str = Field(description="The same.")


@endpoint(
    "GET",
    "/v1/blobs/{blob_id}",
    Needs.CALLER,
    errors=[ResourceNotFound],
    media=ANY_MEDIA,
    client=None,
)
async def get_blob(
    request: Request,
    engine: Engine,
    caller: Principal,
    blob_id: Annotated[str, "The blob's id, `blob_…`."],
    query: BlobQuery,
) -> Response:
    """Download one of the caller's own blobs.

    Use the address from `url` or `resource_url` of an answer unchanged. It is valid until
    `expires_at`, and only for the principal that made the call. The response is always an
    attachment, of the media type that the file name implies.
    """
    blob, file = await engine.open_blob(
        blob_id, caller, expires=query.expires, signature=query.signature
    )
    return sent_blob(request, blob, file)


def sent_blob(request: Request, blob: Blob, file: BinaryIO) -> Response:
    """A blob as a download."""
    if request.method == "HEAD":
        file.close()
        return Response(headers=_headers(blob))
    return _Bytes(file, _headers(blob))


def _headers(blob: Blob) -> dict[str, str]:
    return attachment_headers(blob.filename, blob.content_type, blob.size)


class _Bytes(StreamingResponse):
    """A file, sent in pieces and always closed, even if the client leaves before the first."""

    def __init__(self, file: BinaryIO, headers: dict[str, str]) -> None:
        super().__init__(_chunks(file), headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


OPERATIONS = [get_blob]
