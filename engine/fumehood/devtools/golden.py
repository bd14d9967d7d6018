"""Golden sequences: files that contain calls with their arguments and recorded answers.

Client side. With `record` and `check`, users test whether recorded calls still work after the
registry has changed. With `Cassette`, an agent's tests get recorded answers and need no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from pydantic import Field, ValidationError, field_validator

from fumehood.client.files import new_file
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import CallKeywords
from fumehood.core.value import Value
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.client import Client


class GoldenCall(Value):
    """One call of a golden sequence, with its recorded answer. The answer is None if it has not
    been recorded.
    """

    tool: str
    arguments: JsonObject = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    answer: Envelope | None = None

    @field_validator("options")
    @classmethod
    def _are_known(cls, options: dict[str, Any]) -> dict[str, Any]:
        if unknown := options.keys() - CallKeywords.__annotations__.keys():
            raise ValueError(f"no options of a call: {ascii(sorted(unknown))[:200]}")
        return options


class GoldenFile(Value):
    """The contents of a golden file: a sequence of calls."""

    golden: int = Field(default=1, ge=1, le=1)
    """The version of the file format."""

    calls: tuple[GoldenCall, ...] = ()


def read_golden(path: Path) -> GoldenFile:
    """Read a golden sequence from a file.

    Raises:
        ValueError: the file cannot be read, or is not a golden sequence.
    """
    try:
        return GoldenFile.model_validate(strict_json.loads(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"{path} is not a golden sequence: {where}: {first['msg']}.") from None
    except strict_json.StrictJsonError as error:
        raise ValueError(f"{path} is {error}.") from None


def write_golden(path: Path, calls: list[GoldenCall]) -> None:
    """Write a golden sequence to a file. Other processes see either the old or the new content."""
    text = GoldenFile(calls=tuple(calls)).model_dump_json(indent=2) + "\n"
    with new_file(path, replace=True, mode=0o600) as file:
        file.write(text.encode())


def record(client: Client, calls: tuple[GoldenCall, ...]) -> list[GoldenCall]:
    """Make the calls, and return copies of them with the recorded answers."""
    return [
        each.model_copy(
            update={"answer": client.call(each.tool, each.arguments, **_keywords(each))}
        )
        for each in calls
    ]


def check(client: Client, calls: tuple[GoldenCall, ...], *, run: bool) -> Iterator[str]:
    """Make recorded calls again, and yield a text for each difference between the recorded and the
    new answers.

    If `run` is True, the calls run. A difference is then another error code, or other data.

    If `run` is False, each call is only a dry run. A difference is then a refusal that was not
    recorded.
    """
    for number, each in enumerate(calls, 1):
        options = _keywords(each)
        if not run:
            options["dry_run"] = True
        now = client.call(each.tool, each.arguments, **options)
        place, before = f"call {number} ({each.tool})", each.answer
        code, code_before = (e.error.code if e and e.error else "OK" for e in (now, before))
        refused = code if now.error is not None else now.data.get("refused_with")
        if not run and refused is not None and refused != code_before:
            yield f"{place}: {refused}: {now.error.message if now.error else 'it would be refused'}"
        elif run and code != code_before:
            yield f"{place}: was {code_before}, is {code}"
        elif run and before is not None and now.data != before.data:
            fields = {*now.data, *before.data}
            differing = sorted(f for f in fields if now.data.get(f) != before.data.get(f))
            yield f"{place}: data differs in {', '.join(differing)}"


def _keywords(call: GoldenCall) -> CallKeywords:
    return CallKeywords(**call.options)  # type: ignore[typeddict-item,no-any-return]  # the client checks


class UnexpectedCall(AssertionError):
    """An agent made a call that differs from the recorded call, or did not make all recorded
    calls.
    """


class Cassette:
    """Replaces a client in tests. `call` returns the answers that are recorded in a golden file, in
    order.

    If a client is given, its calls are recorded instead: `call` makes each call with this client,
    and `finish` writes the file. Options are not compared: a call matches a recorded call if the
    tool and the arguments are equal.
    """

    def __init__(self, path: Path | str, client: Client | None = None) -> None:
        self._path = Path(path)
        self._client = client
        self._recorded: list[GoldenCall] = []
        self._left = [] if client is not None else list(read_golden(self._path).calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.finish()

    def call(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> Envelope:
        """Return the recorded answer to the next call. While recording, make the call and record
        its answer.

        Raises:
            UnexpectedCall: the call differs from the recorded call at this position.
        """
        if self._client is None:
            return self._replay(tool, arguments or {})
        answer = self._client.call(tool, arguments, **options)
        call = GoldenCall(
            tool=tool, arguments=arguments or {}, options=dict(options), answer=answer
        )
        self._recorded.append(call)
        return answer

    def finish(self) -> None:
        """While recording, write the file. Otherwise, check that every recorded call was made.

        Raises:
            UnexpectedCall: some recorded calls were not made.
        """
        if self._recorded:
            write_golden(self._path, self._recorded)
        if self._left:
            names = ", ".join(each.tool for each in self._left[:5])
            raise UnexpectedCall(f"{len(self._left)} recorded calls were not made: {names}")

    def _replay(self, tool: str, arguments: JsonObject) -> Envelope:
        wanted = self._left[0] if self._left else None
        made = f"{tool} {arguments}"[:500]
        if wanted is None:
            raise UnexpectedCall(f"no more calls are recorded, but {made} was made")
        if (wanted.tool, wanted.arguments) != (tool, arguments):
            recorded = f"{wanted.tool} {wanted.arguments}"[:500]
            raise UnexpectedCall(f"recorded is {recorded}, but {made} was made")
        if wanted.answer is None:
            raise UnexpectedCall(f"{made} has no recorded answer; run `tools golden record`")
        self._left.pop(0)
        return wanted.answer
