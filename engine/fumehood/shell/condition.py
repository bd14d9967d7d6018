"""The policy condition `runs`, which tests the programs that a call's shell command runs.

Host side. The parser of commands is imported only if a rule has this condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from pydantic import ConfigDict, RootModel, field_validator

from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Answer, Names, PartCondition

PROGRAM_PATTERN = re.compile(r"[A-Za-z0-9_.+:@%-]+( +[A-Za-z0-9_.,+:@%=/^-]+)*", re.ASCII)
"""A program's name and the words after it, without characters that a shell would interpret."""


class Runs(RootModel[Names], PartCondition):
    """A list of programs, each with optional words after its name. The condition holds if the
    call's `command` or `argv` runs one of them.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    subject: ClassVar[str] = "shell command"
    arguments: ClassVar[tuple[str, ...]] = ("command", "argv")

    @field_validator("root")
    @classmethod
    def _check_programs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if not PROGRAM_PATTERN.fullmatch(pattern) or pattern.startswith("-"):
                raise ValueError(
                    f"{pattern[:80]!a} is not the name of a program, without a path, and plain "
                    "words that follow it, such as 'git push'"
                )
        return value

    def compiled(self, *, for_every: bool) -> Callable[[JsonObject], Answer]:
        """Return a function that tests a call's arguments. It returns True if the command certainly
        runs a program in the list, False if it certainly does not, and None if in doubt.

        If `for_every` is True, the function instead tests whether the command runs only programs in
        the list.
        """
        from fumehood.shell.reading import runs

        return partial(runs, [pattern.split() for pattern in self.root], for_every=for_every)

    def why_in_doubt(self, arguments: JsonObject) -> str:
        """Return the reason why the command may also run other programs."""
        from fumehood.shell.reading import read_call

        return read_call(arguments).doubt or "an argument of the command is not literal"
