"""Execute: run the tool in its place, once.

Seventh stage. Takes an `AdmittedCall` (which only `admit` makes), returns an `Outcome`, also of a
failed program: the envelope says what it used and how it ended either way. Retries and fallbacks do
not exist yet; definitions that ask for them are refused.
"""

from __future__ import annotations

from fumehood.executors.base import ToolRun
from fumehood.executors.handle import CallHandle
from fumehood.executors.kinds import executor_of
from fumehood.executors.outcome import Outcome
from fumehood.executors.upstreams import Upstreams
from fumehood.pipeline.admit import AdmittedCall
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.storage.blobs import BlobStore


async def execute(
    admitted: AdmittedCall,
    *,
    blobs: BlobStore,
    cursors: Cursors,
    redactor: Redactor,
    upstreams: Upstreams,
    handle: CallHandle,
) -> Outcome:
    """Hand the call to the executor that its tool names; `handle` reports its events."""
    permitted = admitted.permitted
    run = ToolRun(
        tool=permitted.tool,
        arguments=permitted.arguments,
        limits=admitted.plan.limits,
        lease=admitted.lease,
        domain=permitted.trust_domain,
        handle=handle,
        blobs=blobs,
        cursors=cursors,
        redactor=redactor,
        upstreams=upstreams,
        trace_id=permitted.request.trace_id,
        call_id=permitted.request.call_id,
        expected=admitted.expected,
    )
    return await executor_of(permitted.tool.definition).run(run)
