"""The pattern of a tool's name. It loads nothing, so that a command can look at a name cheaply."""

from __future__ import annotations

NAME_PATTERN = r"^[a-zA-Z_][a-zA-Z0-9_-]{0,63}$"
