"""Kept answers: an envelope as it is stored, and as whoever repeats its call gets it.

Host side. Above it `pipeline/claim` and approvals. Invariants: a kept answer is bounded; it holds
no `debug_info`, which belongs to the one who asked for it; and what is given out again says so.
"""

from __future__ import annotations

from fumehood.core.envelope import Envelope, ErrorInfo
from fumehood.core.idempotency import MAX_ANSWER_BYTES
from fumehood.core.json_types import JsonObject
from fumehood.protocol.messages import decode_envelope

MAX_NOTES = 20
"""Warnings and fields that stay of an answer that is too long: they name what callers sent."""

NOT_KEPT = (
    "The call has ended, but its answer was too long to be kept. Do not repeat the call to see it."
)


def pack_answer(envelope: Envelope) -> str:
    """The envelope as it is stored; of one that is too long the data is left out, with a note."""
    text = envelope.model_copy(update={"debug_info": None}).model_dump_json()
    if _size(text) <= MAX_ANSWER_BYTES:
        return text
    return _without_data(envelope, len(text)).model_dump_json()


def replay_of(answer: str) -> Envelope:
    """A stored answer for one who repeats the call: it is marked, and never retryable.

    Raises:
        ValueError: it is no envelope of this version's.
    """
    envelope = decode_envelope(answer.encode())
    metadata = envelope.metadata.model_copy(update={"idempotent_replay": True})
    error = envelope.error
    if error is not None:  # the same key gives the same answer, whatever the tool thinks of it
        error = error.model_copy(update={"retryable": False, "retry_after_ms": None})
    return envelope.model_copy(update={"metadata": metadata, "error": error})


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _without_data(envelope: Envelope, length: int) -> Envelope:
    note: JsonObject = {
        "truncated": True,
        "truncation_info": {
            "original_length": length,
            "returned_length": 0,
            "summary": NOT_KEPT,
        },
    }
    error = envelope.error
    warnings = envelope.metadata.warnings[:MAX_NOTES]
    return envelope.model_copy(
        update={
            "data": note if error is None else {},
            "error": _short(error, note) if error is not None else None,
            "metadata": envelope.metadata.model_copy(update={"warnings": warnings}),
            "debug_info": None,
        }
    )


def _short(error: ErrorInfo, note: JsonObject) -> ErrorInfo:
    fields = error.fields[:MAX_NOTES] if error.fields is not None else None
    return error.model_copy(update={"details": note, "fields": fields})
