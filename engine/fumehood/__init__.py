"""Fumehood: a sandboxed tool-execution engine for AI agents.

The public names, loaded when first used. This module defines and imports nothing else: the
guest imports this package too, and must not load the host with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fumehood.client import AsyncClient as AsyncClient
    from fumehood.client import AsyncControlClient as AsyncControlClient
    from fumehood.client import Client as Client
    from fumehood.client import ControlClient as ControlClient
    from fumehood.client import DaemonUnavailable as DaemonUnavailable
    from fumehood.client import Refused as Refused
    from fumehood.config import Config as Config
    from fumehood.config import ConfigError as ConfigError
    from fumehood.config import load_config as load_config
    from fumehood.engine import Engine as Engine
    from fumehood.engine_life import EngineNotRunning as EngineNotRunning
    from fumehood.executors.progress import progress as progress
    from fumehood.model.call import CallOptions as CallOptions
    from fumehood.model.call import ToolResult as ToolResult
    from fumehood.model.envelope import CallFailed as CallFailed
    from fumehood.model.envelope import Envelope as Envelope
    from fumehood.model.errors import FumehoodError as FumehoodError
    from fumehood.model.errors import ToolError as ToolError
    from fumehood.model.parameters import ToolParameter as ToolParameter
    from fumehood.model.returned_file import ReturnedFile as ReturnedFile
    from fumehood.model.tool import CODE_OUTPUT as CODE_OUTPUT
    from fumehood.model.tool import EXPRESSION_OUTPUT as EXPRESSION_OUTPUT
    from fumehood.model.tool import PROGRAM_OUTPUT as PROGRAM_OUTPUT
    from fumehood.model.tool import SESSION_OUTPUT as SESSION_OUTPUT
    from fumehood.model.tool import SHELL_OUTPUT as SHELL_OUTPUT
    from fumehood.model.tool import ToolDefinition as ToolDefinition
    from fumehood.model.tool import ToolType as ToolType
    from fumehood.model.usage import TextKind as TextKind
    from fumehood.model.usage import TokenCounter as TokenCounter
    from fumehood.registry.declare import tool as tool
    from fumehood.registry.definitions import InvalidDefinition as InvalidDefinition
    from fumehood.registry.definitions import parse_definition as parse_definition

_HOMES = {
    "AsyncClient": "fumehood.client",
    "AsyncControlClient": "fumehood.client",
    "CODE_OUTPUT": "fumehood.model.tool",
    "CallFailed": "fumehood.model.envelope",
    "CallOptions": "fumehood.model.call",
    "Client": "fumehood.client",
    "Config": "fumehood.config",
    "ConfigError": "fumehood.config",
    "ControlClient": "fumehood.client",
    "DaemonUnavailable": "fumehood.client",
    "EXPRESSION_OUTPUT": "fumehood.model.tool",
    "Engine": "fumehood.engine",
    "EngineNotRunning": "fumehood.engine_life",
    "Envelope": "fumehood.model.envelope",
    "FumehoodError": "fumehood.model.errors",
    "InvalidDefinition": "fumehood.registry.definitions",
    "Refused": "fumehood.client",
    "ReturnedFile": "fumehood.model.returned_file",
    "PROGRAM_OUTPUT": "fumehood.model.tool",
    "SESSION_OUTPUT": "fumehood.model.tool",
    "SHELL_OUTPUT": "fumehood.model.tool",
    "TextKind": "fumehood.model.usage",
    "TokenCounter": "fumehood.model.usage",
    "ToolDefinition": "fumehood.model.tool",
    "ToolError": "fumehood.model.errors",
    "ToolParameter": "fumehood.model.parameters",
    "ToolResult": "fumehood.model.call",
    "ToolType": "fumehood.model.tool",
    "load_config": "fumehood.config",
    "parse_definition": "fumehood.registry.definitions",
    "progress": "fumehood.executors.progress",
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
