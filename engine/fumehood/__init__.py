"""Fumehood: a sandboxed tool-execution engine for AI agents.

This package has the public names, each loaded on first use. This module defines and imports nothing
else, because the guest also imports the package and must not load the host's code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fumehood.call_options import CallOptions as CallOptions
    from fumehood.client import AsyncClient as AsyncClient
    from fumehood.client import AsyncControlClient as AsyncControlClient
    from fumehood.client import Client as Client
    from fumehood.client import ControlClient as ControlClient
    from fumehood.client import DaemonUnavailable as DaemonUnavailable
    from fumehood.client import Refused as Refused
    from fumehood.config import Config as Config
    from fumehood.config import ConfigError as ConfigError
    from fumehood.config import load_config as load_config
    from fumehood.core.call import CheckedResult as CheckedResult
    from fumehood.core.call import ResultCheck as ResultCheck
    from fumehood.core.call import ToolResult as ToolResult
    from fumehood.core.envelope import CallFailed as CallFailed
    from fumehood.core.envelope import Envelope as Envelope
    from fumehood.core.errors import EngineNotRunning as EngineNotRunning
    from fumehood.core.errors import FumehoodError as FumehoodError
    from fumehood.core.errors import ToolError as ToolError
    from fumehood.core.returned_file import ReturnedFile as ReturnedFile
    from fumehood.core.tool import CODE_OUTPUT as CODE_OUTPUT
    from fumehood.core.tool import PAGINATION_OUTPUT as PAGINATION_OUTPUT
    from fumehood.core.tool import SESSION_OUTPUT as SESSION_OUTPUT
    from fumehood.core.tool import SHELL_OUTPUT as SHELL_OUTPUT
    from fumehood.core.tool import ToolDefinition as ToolDefinition
    from fumehood.core.tool import ToolParameter as ToolParameter
    from fumehood.core.tool import ToolType as ToolType
    from fumehood.core.usage import TextKind as TextKind
    from fumehood.core.usage import TokenCounter as TokenCounter
    from fumehood.engine_with_parts import Engine as Engine
    from fumehood.executors.parts import progress as progress
    from fumehood.formats.model import AgentRun as AgentRun
    from fumehood.interpreter.schemas import EXPRESSION_OUTPUT as EXPRESSION_OUTPUT
    from fumehood.interpreter.schemas import PROGRAM_OUTPUT as PROGRAM_OUTPUT
    from fumehood.registry.arguments import argument_schema as argument_schema
    from fumehood.registry.declare import tool as tool
    from fumehood.registry.definitions import InvalidDefinition as InvalidDefinition
    from fumehood.registry.definitions import parse_definition as parse_definition

_HOMES = {
    "AgentRun": "fumehood.formats.model",
    "AsyncClient": "fumehood.client",
    "AsyncControlClient": "fumehood.client",
    "CODE_OUTPUT": "fumehood.core.tool",
    "CallFailed": "fumehood.core.envelope",
    "CallOptions": "fumehood.call_options",
    "CheckedResult": "fumehood.core.call",
    "Client": "fumehood.client",
    "Config": "fumehood.config",
    "ConfigError": "fumehood.config",
    "ControlClient": "fumehood.client",
    "DaemonUnavailable": "fumehood.client",
    "EXPRESSION_OUTPUT": "fumehood.interpreter.schemas",
    "Engine": "fumehood.engine_with_parts",
    "EngineNotRunning": "fumehood.core.errors",
    "Envelope": "fumehood.core.envelope",
    "FumehoodError": "fumehood.core.errors",
    "InvalidDefinition": "fumehood.registry.definitions",
    "Refused": "fumehood.client",
    "ResultCheck": "fumehood.core.call",
    "ReturnedFile": "fumehood.core.returned_file",
    "PROGRAM_OUTPUT": "fumehood.interpreter.schemas",
    "PAGINATION_OUTPUT": "fumehood.core.tool",
    "SESSION_OUTPUT": "fumehood.core.tool",
    "SHELL_OUTPUT": "fumehood.core.tool",
    "TextKind": "fumehood.core.usage",
    "TokenCounter": "fumehood.core.usage",
    "ToolDefinition": "fumehood.core.tool",
    "ToolError": "fumehood.core.errors",
    "ToolParameter": "fumehood.core.tool",
    "ToolResult": "fumehood.core.call",
    "ToolType": "fumehood.core.tool",
    "argument_schema": "fumehood.registry.arguments",
    "load_config": "fumehood.config",
    "parse_definition": "fumehood.registry.definitions",
    "progress": "fumehood.executors.parts",
    "tool": "fumehood.registry.declare",
}

__all__ = sorted(_HOMES)  # compared with the imports above by a test


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fumehood' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
