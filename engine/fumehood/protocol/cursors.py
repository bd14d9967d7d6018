"""Cursors: positions in lists, encoded so that only the engine can create them.

Host side. A cursor is bound to one list, to the filters of this list, and to one principal. It is
valid until the engine stops. Invariant: `read` returns exactly the position that was given to
`make`, and only for the same list and principal.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from fumehood.core.errors import InvalidParams

MAC_BYTES = 16


class Cursors:
    """Creates and reads cursors, which are positions in lists that clients can send back but not
    forge. Each object signs its cursors with its own secret key, and accepts only such cursors.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make(self, listing: str, principal_id: str, position: str) -> str:
        """Return a cursor that continues a list after `position`. `listing` identifies the list and
        its filters. Only the principal with this id can use the cursor.
        """
        signed = self._mac(listing, principal_id, position) + position.encode()
        return base64.urlsafe_b64encode(signed).decode("ascii").rstrip("=")

    def read(self, cursor: str, listing: str, principal_id: str) -> str:
        """Return the position in a cursor. `listing` and `principal_id` must be those given to
        `make`.

        Raises:
            InvalidParams: this engine did not make the cursor, or made it for another list or
                principal.
        """
        try:
            padded = cursor + "=" * (-len(cursor) % 4)
            signed = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
            position = signed[MAC_BYTES:].decode()
        except (ValueError, binascii.Error):
            raise _unknown() from None
        expected = self._mac(listing, principal_id, position)
        if not hmac.compare_digest(signed[:MAC_BYTES], expected):
            raise _unknown()
        return position

    def _mac(self, *parts: str) -> bytes:
        # Each part is prefixed with its length, so that no two lists of parts share a signature.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.digest(self._key, text.encode(), hashlib.sha256)[:MAC_BYTES]


def _unknown() -> InvalidParams:
    return InvalidParams(
        "The cursor is not one of this list: it was altered, is for other filters or another "
        "caller, or the engine was restarted. Start the list again without it.",
        fields=["cursor"],
    )
