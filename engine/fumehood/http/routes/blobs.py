"""`GET /v1/blobs/{blob_id}`: what was too large for an answer, to its owner only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fumehood.core.errors import InvalidParams, ResourceNotFound
from fumehood.http.answers import engine_of
from fumehood.http.caller import require_principal
from fumehood.http.operation import Needs, Operation
from fumehood.http.transfers import attachment_headers
from fumehood.storage.blobs import Blob

CHUNK_BYTES = 64 * 1024


class BlobQuery(BaseModel):
    """What an address of a blob holds besides its id."""

    model_config = ConfigDict(extra="forbid")

    expires: str = Field(description="As it stands in the address that an answer gave.")
    signature: str = Field(description="The same.")


async def get_blob(request: Request) -> Response:
    """The bytes of a blob of the caller's own.

    Take the address from `url` or `resource_url` of an answer as it is. It works until
    `expires_at`, and only for the principal whose call it was. The answer is never shown in
    place: it is an attachment of the type that its name stands for.
    """
    principal = require_principal(request)
    given = request.query_params.multi_items()
    if sorted(name for name, _ in given) != ["expires", "signature"]:
        raise InvalidParams(
            "The address must hold expires and signature, as the answer gave it.",
            fields=["expires", "signature"],
        )
    query = dict(given)
    blob, file = await engine_of(request).open_blob(
        request.path_params["blob_id"],
        principal,
        expires=query["expires"],
        signature=query["signature"],
    )
    if request.method == "HEAD":
        file.close()
        return Response(headers=_headers(blob))
    return _Bytes(file, _headers(blob))


def _headers(blob: Blob) -> dict[str, str]:
    return attachment_headers(blob.filename, blob.content_type, blob.size)


class _Bytes(StreamingResponse):
    """A file piece by piece; it is closed even where the client left before the first one."""

    def __init__(self, file: BinaryIO, headers: dict[str, str]) -> None:
        super().__init__(_chunks(file), headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


OPERATIONS = [
    Operation(
        "GET",
        "/v1/blobs/{blob_id}",
        get_blob,
        Needs.CALLER,
        query=BlobQuery,
        parameters={"blob_id": "The blob's id, `blob_…`."},
        errors=frozenset({ResourceNotFound}),
        media="*/*",
    ),
]
