"""Execute: run the tool in its place, once.

Seventh stage. Takes an `AdmittedCall` (which only `admit` makes), returns an `Outcome`,
also where the program failed: what it used and how it ended stands in the envelope either
way. Retries and fallbacks do not exist yet; definitions that ask for them are refused.
"""

from __future__ import annotations

from fumehood.core.errors import InternalError
from fumehood.executors.code import run_code
from fumehood.executors.expression import run_expression, run_program
from fumehood.executors.function import run_function, run_in_worker, run_jailed
from fumehood.executors.live import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.executors.workspace import run_workspace
from fumehood.pipeline.admit import AdmittedCall
from fumehood.protocol.cursors import Cursors
from fumehood.storage.blobs import BlobStore


async def execute(
    admitted: AdmittedCall, *, blobs: BlobStore, cursors: Cursors, handle: CallHandle
) -> Outcome:
    """Hand the call to the executor that its tool names; `handle` hears of it while it runs."""
    permitted = admitted.permitted
    tool, arguments = permitted.tool, permitted.arguments
    limits, lease = admitted.plan.limits, admitted.lease
    definition = tool.definition
    if definition.executor == "expression":
        return await run_expression(definition, arguments, limits, lease)
    if definition.executor == "restricted_python":
        return await run_program(definition, arguments, limits, lease)
    if definition.executor.startswith("code:"):
        owner, session_id = permitted.principal.id, permitted.request.options.session_id
        return await run_code(
            definition, arguments, limits, lease, blobs, owner, handle, session_id
        )
    if definition.executor.startswith("workspace:"):
        domain = permitted.trust_domain
        return await run_workspace(
            definition, arguments, limits, lease, domain, cursors, expected=admitted.expected
        )
    if definition.executor == "function" and tool.address is not None:
        run = run_jailed if definition.sandboxed else run_in_worker
        return await run(definition, tool.address, arguments, limits, lease, handle)
    if definition.executor == "function" and tool.function is not None:
        return await run_function(tool.function, arguments, limits, handle)
    raise InternalError("This tool was registered without anything to run it.")
