"""The host's table of languages for programs in containers: one row each.

Values only. The guest has its own table (`programs` in `guest/container/child.py`), because it
cannot import code of the host. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Language:
    """A programming language for programs in containers: its names in tools, images and messages,
    and its properties.
    """

    name: str
    image: str
    """Name of the default image."""
    suffixes: tuple[str, ...]
    """File suffixes by which `fumehood run` recognizes the language."""
    source: str = "code"
    """The argument that holds the program."""
    noun: str = "program"
    """The word for one program in messages."""
    has_value: bool = True
    """Whether a program has a value, an exception and images in addition to its output."""

    @property
    def executor(self) -> str:
        """The `executor` of tools that run programs in this language."""
        return f"code:{self.name}"

    @property
    def tool(self) -> str:
        """The built-in tool that runs programs in this language."""
        return f"run_{self.name}"


LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {
        language.name: language
        for language in (
            Language("python", image="python-data", suffixes=(".py",)),
            Language(
                "shell",
                image="shell",
                suffixes=(".sh", ".bash"),
                source="command",
                noun="command",
                has_value=False,
            ),
            Language("javascript", image="node", suffixes=(".js", ".cjs")),
        )
    }
)
"""Maps the name of a language to the language."""
