"""The options of a call as callers send them: those of the kernel, and those that parts add.

`core/call.py` defines the kernel's options, and knows no part. All code that reads options from
outside uses the models here. Invariant: the kernel does not act on the value of a part's option.
The kernel refuses a value of another type, calls the part's own check, which can refuse the call,
and stores the value with the call if it can change what the call does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, create_model

from fumehood.core import call as kernel
from fumehood.core.call import MAX_CALLS, MAX_TOOL_CHARACTERS, RawBatch
from fumehood.core.json_types import JsonObject
from fumehood.core.part import CallOption, Part, PartError, imported
from fumehood.parts import parts


def options_of(found: Iterable[Part]) -> Mapping[str, CallOption[Any]]:
    """Return the options that parts add, by name.

    Raises:
        PartError: the kernel or another part has an option with the same name.
    """
    added: dict[str, CallOption[Any]] = {}
    by: dict[str, str] = {}
    for part in found:
        for option in imported(part.call_options):
            name = option.name
            if name in kernel.CallOptions.model_fields or hasattr(kernel.CallOptions, name):
                raise PartError(f"The part {part.name!r} adds the call option {name!r}, which the "
                                "kernel has.")  # fmt: skip
            if name in by:
                raise PartError(
                    f"The parts {by[name]!r} and {part.name!r} both add the call option {name!r}."
                )
            by[name], added[name] = part.name, option
    return added


def with_options(added: Mapping[str, CallOption[Any]]) -> Any:
    """Return one model with the kernel's options and the given options of parts."""
    fields: dict[str, Any] = {name: (one.type, one.default) for name, one in added.items()}
    own = kernel.CallOptions
    return create_model(
        own.__name__, __base__=own, __module__=__name__, __doc__=own.__doc__, **fields
    )


FORMER: Mapping[str, Any] = {"packages": None}
"""Options that an earlier version of the kernel had, and a part has now → the value that was stored
for calls without the option. These calls run without the part as well."""

OF_PARTS = options_of(parts())
"""The options that parts add, by name."""

if TYPE_CHECKING:
    from fumehood.core.keyword_types import CallOptions as CallOptions
else:
    CallOptions = with_options(OF_PARTS)

_NO_OPTIONS = CallOptions()


class CallBody(kernel.CallBody):
    """The body of `POST /v1/tools/{name}/call`."""

    options: CallOptions = Field(default_factory=lambda: _NO_OPTIONS)


class BatchCall(CallBody):
    """One call of a batch."""

    tool: str = Field(max_length=MAX_TOOL_CHARACTERS)


class BatchBody(RawBatch):
    """The body of `POST /v1/calls`. The envelope of a malformed call reports the fault."""

    calls: list[BatchCall | Any] = Field(min_length=1, max_length=MAX_CALLS)


def chosen_options(options: kernel.CallOptions) -> Iterator[CallOption[Any]]:
    """Yield the options of parts whose value is not the default."""
    for option in OF_PARTS.values():
        if option.of(options) != option.default:
            yield option


def inherited(options: kernel.CallOptions) -> dict[str, Any]:
    """Return the options of parts that are passed on to the calls of the call's program."""
    chosen = chosen_options(options)
    return {option.name: option.of(options) for option in chosen if option.inherited}


def deciding(options: kernel.CallOptions) -> JsonObject:
    """Return the options that change what a call does.

    Options of parts are included only if their value is not the default.
    """
    names = {option.name for option in chosen_options(options) if option.decides}
    return options.model_dump(mode="json", include={*kernel.DECIDING_OPTIONS, *names})


def is_deciding(name: str, value: object) -> bool:
    """Whether an option of a stored call changes what the call does.

    An option that no part here adds is assumed to do so.
    """
    if name in kernel.CallOptions.model_fields:
        return name in kernel.DECIDING_OPTIONS and value not in (None, False)
    option = OF_PARTS.get(name)
    if _is_former(name, value):
        return False
    return option is None or (option.decides and value != option.default)


def stored(options: kernel.CallOptions) -> JsonObject:
    """Return options in the form in which they are stored.

    Options with default values are omitted, so that a part that is deleted later is missed only by
    calls that need it.
    """
    unused = OF_PARTS.keys() - {option.name for option in chosen_options(options)}
    return options.model_dump(mode="json", exclude=set(unused))


def read_stored(document: JsonObject) -> tuple[CallOptions, list[str]]:
    """Return stored options, and the names of those that this engine cannot use.

    The call must not run without these options.
    """
    document = {name: value for name, value in document.items() if not _is_former(name, value)}
    try:
        return CallOptions.model_validate(document), []
    except ValidationError as error:
        lost = sorted({str(fault["loc"][0]) for fault in error.errors()})
    known = {name: value for name, value in document.items() if name not in lost}
    return CallOptions.model_validate(known), lost


def _is_former(name: str, value: object) -> bool:
    """Whether this was stored for a call that does not have the option."""
    return name in FORMER and value == FORMER[name]
