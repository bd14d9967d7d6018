"""Receipt: keep what a program's call depended on, and what came of it, as a blob of its caller."""

from __future__ import annotations

import base64
from contextlib import suppress

import anyio

from fumehood.core.envelope import ReceiptLink
from fumehood.core.errors import EngineError, code_of
from fumehood.core.json_types import JsonObject
from fumehood.core.receipt import (
    REPEATED_OPTIONS,
    SESSION_WISHES,
    Exchange,
    Receipt,
)
from fumehood.executors.outcome import CutText, Outcome, Recorded
from fumehood.observe.clock import timestamp
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.plan import Plan, place_of
from fumehood.redaction.redactor import Redactor
from fumehood.storage.blobs import NotKept


async def keep_receipt(
    call: CallContext, outcome: Outcome, data: JsonObject, services: PipelineServices
) -> ReceiptLink | None:
    """Keep the receipt of a call that asked for one, or None. `data` is not shortened yet."""
    recorded, plan, principal = outcome.recorded, call.plan, call.request.principal
    if recorded is None or plan is None or principal is None or call.validated is None:
        return None
    place = None
    with suppress(EngineError):  # its image may be gone by now
        place = await place_of(plan, services.sessions)
    now = timestamp(services.clock.now())
    receipt = _receipt(call, plan, place, outcome, data, recorded, now, services.redactor)
    with anyio.CancelScope(shield=True):  # bounded by the disk; the program has already run
        draft = services.blobs.draft(principal.id)
        draft.feed(receipt.model_dump_json(indent=1).encode())
        try:
            blob = await services.blobs.keep(draft, "receipt.json", "application/json")
        except NotKept as reason:
            return ReceiptLink(not_kept=f"{reason}, so it is lost")
    return ReceiptLink(url=blob.url, expires_at=timestamp(blob.expires_at))


def _receipt(
    call: CallContext,
    plan: Plan,
    place: JsonObject | None,
    outcome: Outcome,
    data: JsonObject,
    recorded: Recorded,
    now: str,
    redactor: Redactor,
) -> Receipt:
    assert call.validated is not None
    tool, error = call.validated.tool.definition, outcome.error
    fields = data if error is None else error.details or {}
    options = call.request.options.model_dump(mode="json", include=set(REPEATED_OPTIONS))
    return Receipt(
        format="fumehood.receipt.1",
        call_id=call.request.call_id,
        timestamp=now,
        tool=tool.name,
        tool_version=tool.version,
        arguments=call.validated.shown_arguments,
        options={
            **{name: value for name, value in options.items() if value is not None},
            **({"network": list(plan.network)} if plan.network else {}),
        },
        session=plan.session.model_dump(mode="json", include={"id", *SESSION_WISHES})
        if plan.session is not None
        else None,
        place=place,
        network=recorded.network.model_copy(
            update={"exchanges": [_redacted(one, redactor) for one in recorded.network.exchanges]}
        ),
        ended_by=outcome.ended_by.value,
        error=code_of(error) if error is not None else None,
        fields=_with_digests(fields, recorded, outcome.cuts),
    )


def _redacted(exchange: Exchange, redactor: Redactor) -> Exchange:
    """Return an exchange without secrets that its server sent unasked."""
    shown, count = redactor.value(exchange.model_dump(include={"url", "headers"}))
    body = base64.b64decode(exchange.body_base64)
    # Latin-1 keeps every byte, but a secret with other characters is found in UTF-8 only.
    encoding = "utf-8" if _is_utf8(body) else "latin-1"
    text, in_body = redactor.text(body.decode(encoding))
    if not count and not in_body:
        return exchange
    packed = base64.b64encode(text.encode(encoding)).decode("ascii")
    return exchange.model_copy(update={**shown, "body_base64": packed})


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _with_digests(fields: JsonObject, recorded: Recorded, cuts: tuple[CutText, ...]) -> JsonObject:
    """Return an answer's fields with the hashes of files in place of their content."""
    return {
        **fields,
        **{cut.field: f"{cut.head}\n… {cut.length} characters …\n{cut.tail}" for cut in cuts},
        **{
            name: [
                {
                    "filename": file["filename"],
                    "size": file["size"],
                    "sha256": recorded.digests.get((kind, file["filename"])),
                }
                for file in fields[name]
            ]
            for name, kind in (("files", "file"), ("images", "image"))
            if name in fields
        },
    }
