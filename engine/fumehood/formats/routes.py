"""HTTP routes of the provider formats: exported tools, and the tool calls of a model's message."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import AgentTools, ToolList
from fumehood.core.errors import ResourceNotFound, ShuttingDown, ToolNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.engine_with_parts import Engine
from fumehood.formats.message_calls import parse_message
from fumehood.formats.model import ExportedTools, FormatName, HandleBody, HandledCalls
from fumehood.http.answers import answer
from fumehood.http.endpoint import Needs, ParsedBy, endpoint
from fumehood.http.routes import tools
from fumehood.http.routes.calls import cancelled_with
from fumehood.http.routes.tools import ToolQuery

NewMessage = Annotated[HandleBody, ParsedBy(parse_message, HandleBody)]


def _at_most_last(schema: JsonObject) -> None:
    schema["properties"]["at_most"] = schema["properties"].pop("at_most")


class AnyToolQuery(ToolQuery):
    """Filters for a list of tools or, with `format`, for an export."""

    model_config = ConfigDict(json_schema_extra=_at_most_last)

    format: FormatName | None = Field(
        default=None, description="All tools in the format of this model provider, in one answer."
    )
    tools: str | None = Field(
        default=None,
        description="With `format`: only the tools with these names, separated by commas.",
    )

    @property
    def taken(self) -> frozenset[str]:
        """The names of the parameters that this query may contain. They depend on `format` and
        `agent_id`.
        """
        if self.format is not None:
            return frozenset({"agent_id", "format", "tools"})
        return super().taken | ({"format"} if self.agent_id is None else frozenset())


class AnyToolList(RootModel[ToolList | AgentTools | ExportedTools]):
    """A page of tools. With `agent_id`, the answer has all tools of this agent instead. With
    `format`, the answer is an export of tools in a provider's format.
    """


@endpoint(
    "GET",
    "/v1/tools",
    Needs.CALLER,
    data=AnyToolList,
    errors=[ResourceNotFound, ToolNotFound],
    client=None,
)
async def list_tools(
    engine: Engine, caller: Principal, query: AnyToolQuery
) -> ToolList | AgentTools | ExportedTools:
    """List the preferred version of each matching tool, one page at a time.

    The tools' sources are in a separate field, so that each item is a definition that could be
    registered unchanged in another engine. With `format`, the answer has all tools in the format of
    a model provider, and in `losses` what that format cannot express.
    """
    if query.format is None:
        listed: ToolList | AgentTools = await tools.list_tools.function(engine, caller, query)
        return listed
    query.require_taken()
    names = None if query.tools is None else set(filter(None, query.tools.split(",")))
    return engine.export_for(caller, query.format, agent_id=query.agent_id, tools=names)


@endpoint(
    "POST", "/v1/tool_calls", Needs.CALLER, errors=[ShuttingDown], data=HandledCalls, client=None
)
async def handle_message(
    request: Request, engine: Engine, body: NewMessage, caller: Principal
) -> Response:
    """Run all tool calls of an assistant message, and return the messages for the model.

    Each call has one result and one envelope, in the order of the calls, even if it is refused,
    fails or waits for approval. If the client disconnects, running calls are cancelled.
    """
    calls = engine.open_message(body, caller)
    async with cancelled_with(request, calls.cancel):
        handled = await calls.run()
    return answer(engine, handled)


OPERATIONS = [list_tools, handle_message]
