"""What stands in an envelope's `data` where it is no tool's: one value for each kind of answer.

The daemon makes its answers from these, its document describes them, and the clients read
them, so that the three cannot differ.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from fumehood.model.agent import Agent, Binding
from fumehood.model.authority import ApproverInfo, Change, TokenInfo
from fumehood.model.tool import ToolDefinition


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pagination(_Data):
    """Whether there is more of a list, and how to go on (mission E5)."""

    has_more: bool
    next_cursor: str | None
    total_count: int


class ToolList(_Data):
    """Definitions."""

    items: tuple[ToolDefinition, ...]
    pagination: Pagination


class ToolDetails(_Data):
    """One version of a tool, and all the versions that there are, newest first."""

    tool: ToolDefinition
    versions: tuple[str, ...]


class AgentList(_Data):
    """Every agent by id."""

    items: tuple[Agent, ...]


class AgentAnswer(_Data):
    """An agent as it is now."""

    agent: Agent


class AgentDetails(_Data):
    """An agent with its tools in its order."""

    agent: Agent
    tools: tuple[Binding, ...]


class BindingList(_Data):
    """An agent's tools in its order, those that are switched off included."""

    items: tuple[Binding, ...]


class BindingAnswer(_Data):
    """A binding as it is now."""

    binding: Binding


class Deleted(_Data):
    """What is gone."""

    deleted: str


class TokenList(_Data):
    """Every token, oldest first."""

    items: tuple[TokenInfo, ...]


class TokenAnswer(_Data):
    """A token as it is now."""

    token: TokenInfo


class ApproverList(_Data):
    """Those who have authority now, oldest first."""

    items: tuple[ApproverInfo, ...]


class ApproverAnswer(_Data):
    """An approver as it is now."""

    approver: ApproverInfo


class ChangeList(_Data):
    """The newest changes first."""

    items: tuple[Change, ...]
