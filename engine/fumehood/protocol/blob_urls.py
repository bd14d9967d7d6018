"""Parse the URLs of blobs, for clients."""

from __future__ import annotations

import re
from dataclasses import dataclass

_URL = re.compile(
    r"/v1/blobs/(?P<blob_id>blob_[0-9a-f]{32})"
    r"\?expires=(?P<expires>[0-9]{1,12})&signature=(?P<signature>[0-9a-f]{64})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class BlobUrl:
    """The parts of a blob's URL. Only the engine can verify its signature."""

    blob_id: str
    expires: str
    signature: str


def parse_blob_url(url: str) -> BlobUrl:
    """Split a blob's `url` from an answer.

    Raises:
        ValueError: it is not the address of a blob.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"{url[:80]!r} is not the address of a blob from an answer.")
    return BlobUrl(**match.groupdict())
