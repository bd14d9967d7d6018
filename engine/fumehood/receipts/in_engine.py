"""Receipts as a part of one engine: it records what a run depends on, or answers a run's requests
from a receipt.

Host side. Invariants: a receipt contains only what the program or the caller received, so it
contains no values of secrets; while a receipt is replayed, no request is sent.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from fumehood.core.envelope import ReceiptLink
from fumehood.core.errors import EngineError, code_of
from fumehood.core.json_types import JsonObject
from fumehood.engine_part import EnginePart
from fumehood.executors.around import Given, Ran, Share
from fumehood.executors.base import ToolRun
from fumehood.executors.outcome import CutText, Outcome
from fumehood.observe.clock import timestamp
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.plan import Plan, place_of
from fumehood.receipts.cassette import CassetteTape, Player, Recorder
from fumehood.receipts.options import RECEIPT, REPLAY
from fumehood.receipts.receipt import REPEATED_OPTIONS, SESSION_WISHES, Cassette, Exchange, Receipt
from fumehood.redaction.redactor import Redactor
from fumehood.storage.blobs import NotKept

if TYPE_CHECKING:
    from fumehood.compose import Composition


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the engine recorded of a run for its receipt.

    `network` contains the program's requests and their answers. `digests` maps the kind (`file` or
    `image`) and the path of each returned file to its SHA-256.
    """

    network: Cassette
    digests: Mapping[tuple[str, str], str]


class Receipts(EnginePart):
    """Makes receipts, which contain the inputs and results of a program's run. This part records
    runs, stores the receipts as blobs, and can answer a program's requests from a receipt.
    """

    _services: PipelineServices

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Store the engine's services when the engine starts, because `answered` needs them."""
        self._services = made.services
        yield

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        """Yield an object that records the run's network requests, answers them from a receipt, or
        both, as the call's options demand. Yield None if the call neither asks for a receipt nor
        replays a receipt. `before` is not used.
        """
        options = run.request.options
        recorder = Recorder() if RECEIPT.of(options) else None
        replayed = REPLAY.of(options)
        player = Player(replayed) if replayed is not None else None
        if recorder is None and player is None:
            yield None
            return

        def share(ran: Ran) -> Share:
            if recorder is None:
                return Share()
            return Share(kept=Recorded(recorder.cassette, ran.digests))

        yield Given(
            with_digests=recorder is not None,
            offer=CassetteTape(recorder, player),
            share=share,
        )

    async def answered(
        self, call: CallContext, outcome: Outcome, data: JsonObject
    ) -> Mapping[str, Any]:
        """Store the receipt if the call asked for it. Return the additional field `receipt` of the
        answer, which links to the receipt. If there is no receipt, return an empty mapping.
        """
        for one in outcome.kept:
            if isinstance(one, Recorded):
                link = await _keep(call, outcome, data, one, self._services)
                return {} if link is None else {"receipt": link}
        return {}


async def _keep(
    call: CallContext,
    outcome: Outcome,
    data: JsonObject,
    recorded: Recorded,
    services: PipelineServices,
) -> ReceiptLink | None:
    """Store the receipt of a call, and return a link to it. If the receipt cannot be stored, the
    link contains the reason instead.

    Return None if the call has no principal, or ended before its arguments were validated and its
    run was planned.
    """
    plan, principal = call.plan, call.request.principal
    if plan is None or principal is None or call.validated is None:
        return None
    place = None
    with suppress(EngineError):  # the image may have been deleted meanwhile
        place = await place_of(plan, services.sessions)
    now = timestamp(services.clock.now())

    def make() -> bytes:
        receipt = _receipt(call, plan, place, outcome, data, recorded, now, services.redactor)
        return receipt.model_dump_json(indent=1).encode()

    with anyio.CancelScope(shield=True):  # bounded by the disk; the program has already run
        document = await anyio.to_thread.run_sync(make)
        draft = services.stores.blobs.draft(principal.id)
        draft.feed(document)
        try:
            blob = await services.stores.blobs.keep(draft, "receipt.json", "application/json")
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
    """Return a copy of the exchange in which secrets are redacted. Only the URL, the answer's
    headers and the answer's body are searched.
    """
    shown, count = redactor.value(exchange.model_dump(include={"url", "headers"}))
    body = base64.b64decode(exchange.body_base64)
    # Latin-1 keeps every byte, but a secret with other characters can be found only in UTF-8.
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
    """Return the fields of an answer in the form that a receipt contains. The contents of files are
    replaced by hashes. Each text in `cuts` is replaced by its beginning and its end.
    """
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
