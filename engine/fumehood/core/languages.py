"""The languages of programs in containers, on the host's side: one row each.

Values only. The guest has its own table (`programs` in `guest/container/child.py`), because it
imports nothing of the host; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Language:
    """A language, as tools, images and messages name it."""

    name: str
    image: str
    """The default image."""
    suffixes: tuple[str, ...]
    """The suffixes of files that `fumehood run` takes for programs of this language."""
    source: str = "code"
    """The argument that holds the program."""
    noun: str = "program"
    """The word for one program in messages."""
    has_value: bool = True
    """Whether a program has a value, an exception and images in addition to its output."""

    @property
    def executor(self) -> str:
        """The `executor` of its tools."""
        return f"code:{self.name}"

    @property
    def tool(self) -> str:
        """The built-in tool that runs it."""
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
"""Name → language."""
