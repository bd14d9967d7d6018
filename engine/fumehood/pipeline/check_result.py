"""Check result: run the operator's checkers on a successful result.

Runs after `result` and before the envelope is built. The tool has already acted, so a checker can
add to the answer but cannot change the result. A checker that fails, times out, or returns
something other than a `ResultCheck` or None is named in a warning. Checkers come from an embedding
program or from an installed package that the configuration names, and run in the engine's process.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import anyio

from fumehood.core.call import CheckedResult, ResultCheck, ResultChecker
from fumehood.core.envelope import Metacognition
from fumehood.observe.log import Logger, log_fault
from fumehood.protocol.engine_paths import ConfigError

GROUP = "fumehood.result_checkers"
"""The entry point group in which packages offer checkers."""

CHECK_S = 5.0
"""Time limit in seconds for all checkers of one call together."""


@dataclass(frozen=True, slots=True)
class CheckedData:
    """The combined findings of all result checkers for one call. A result checker is the operator's
    function that comments on the result of a tool.
    """

    metacognition: Metacognition | None = None
    warnings: tuple[str, ...] = ()


class ResultCheckers:
    """Runs the result checkers of one engine. These are functions of the operator that comment on
    the successful results of tools.
    """

    def __init__(self, checkers: Sequence[ResultChecker], log: Logger) -> None:
        """`checkers` run in the given order.

        Raises:
            TypeError: a checker is not an asynchronous function.
        """
        for checker in checkers:
            if not inspect.iscoroutinefunction(checker):
                raise TypeError(
                    f"the result checker {_name(checker)} is not an asynchronous function"
                )
        self._checkers = tuple(checkers)
        self._log = log

    def __bool__(self) -> bool:
        return bool(self._checkers)

    async def check(self, result: CheckedResult) -> CheckedData:
        """Run the checkers one after the other, and return their combined findings. If the task is
        cancelled, the cancellation takes effect only after all checkers have ended.
        """
        opinions: list[ResultCheck] = []
        warnings: list[str] = []
        with anyio.CancelScope(shield=True), anyio.move_on_after(CHECK_S):
            for checker in self._checkers:
                warnings.append(f"result check: {_name(checker)} took too long")
                opinion = await self._ask(checker, result)
                warnings.pop()
                if isinstance(opinion, ResultCheck):
                    opinions.append(opinion)
                elif opinion is not None:
                    warnings.append(f"result check: {_name(checker)} failed")
        return CheckedData(_together(opinions, is_whole=not warnings), tuple(warnings))

    async def _ask(self, checker: ResultChecker, result: CheckedResult) -> Any:
        try:
            return await checker(result)
        except Exception as error:  # the operator's own code may raise anything
            log_fault(self._log, "call.result_check_failed", error, checker=_name(checker))
            return error


def load_checkers(
    names: Sequence[str], found: Iterable[EntryPoint] | None = None
) -> list[ResultChecker]:
    """Load the checkers that installed packages offer under these names.

    If `found` is given, its entry points are used instead of those of the installed packages.

    Raises:
        ConfigError: a name is not offered by any package, or its checker cannot be loaded.
    """
    if not names:
        return []  # searching all installed packages is slow
    offered = {e.name: e for e in (entry_points(group=GROUP) if found is None else found)}
    checkers: list[ResultChecker] = []
    for name in names:
        if name not in offered:
            known = ", ".join(sorted(offered)) or "none"
            raise ConfigError(
                f"result_checkers: no installed package offers {name!r}; there are: {known}"
            )
        try:
            checkers.append(offered[name].load())
        except Exception as error:  # a package's own code may raise anything
            raise ConfigError(f"result_checkers: {name!r} cannot be loaded: {error}") from None
    return checkers


def _together(opinions: Sequence[ResultCheck], *, is_whole: bool) -> Metacognition | None:
    """Combine the checkers' findings, or return None if there is nothing to report.

    The combined report requests correction if any checker does. `is_whole` means that all checkers
    succeeded.
    """
    if not opinions and is_whole:
        return None
    corrections = [o.correction for o in opinions if o.needs_correction and o.correction]
    return Metacognition(
        checked=is_whole,
        needs_correction=any(opinion.needs_correction for opinion in opinions),
        correction="\n".join(corrections) or None,
    )


def _name(checker: Any) -> str:
    return str(getattr(checker, "__name__", type(checker).__name__))[:80]
