"""The options of a call as callers send them: the kernel's options, and the options that parts add.

The kernel is the engine without its parts. `core/call.py` defines only the kernel's options. All
code that reads options from outside uses the models in this module. Invariant: the kernel does not
act on the value of a part's option. The kernel only refuses a value of the wrong type, runs the
part's own check, which can refuse the call, and stores the value with the call if the value can
change what the call does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, create_model

from fumehood.core import call as kernel
from fumehood.core.json_types import JsonObject
from fumehood.core.part import CallOption, Part, PartError, imported
from fumehood.parts import parts


def options_of(found: Iterable[Part]) -> Mapping[str, CallOption[Any]]:
    """Return the call options that the parts in `found` add, by name.

    Raises:
        PartError: a built-in option, or an option of another part, has the same name.
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
    """Return a model that has the built-in call options and the options in `added`."""
    fields: dict[str, Any] = {name: (one.type, one.default) for name, one in added.items()}
    own = kernel.CallOptions
    return create_model(
        own.__name__, __base__=own, __module__=__name__, __doc__=own.__doc__, **fields
    )


FORMER: Mapping[str, Any] = {"packages": None}
"""Options that an earlier version of the kernel had and that a part has now. Each is mapped to the
value that was stored for calls without the option. A call with this value runs without the part as
well."""

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


def chosen_options(options: kernel.CallOptions) -> Iterator[CallOption[Any]]:
    """Yield the options that parts add and whose value in `options` differs from their default."""
    for option in OF_PARTS.values():
        if option.of(options) != option.default:
            yield option


def inherited(options: kernel.CallOptions) -> dict[str, Any]:
    """Return the values of the options that the calls of a program inherit, by name. `options` are
    the options of the program's own call.

    Only options that parts add can be inherited. Options with their default value are left out.
    """
    chosen = chosen_options(options)
    return {option.name: option.of(options) for option in chosen if option.inherited}


def deciding(options: kernel.CallOptions) -> JsonObject:
    """Return the options that change what the call does, by name.

    An option added by a part is left out if it has its default value.
    """
    names = {option.name for option in chosen_options(options) if option.decides}
    return options.model_dump(mode="json", include={*kernel.DECIDING_OPTIONS, *names})


def is_deciding(name: str, value: object) -> bool:
    """Whether an option that was stored with a call changes what the call does.

    This is True for an option that this engine does not know, because its effect is unknown.
    """
    if name in kernel.CallOptions.model_fields:
        return name in kernel.DECIDING_OPTIONS and value not in (None, False)
    option = OF_PARTS.get(name)
    if _is_former(name, value):
        return False
    return option is None or (option.decides and value != option.default)


def stored(options: kernel.CallOptions) -> JsonObject:
    """Return a call's options in the form in which they are stored.

    Options added by parts are left out if they have their default value. So if a part is deleted
    later, only the calls that used its options need the part.
    """
    unused = OF_PARTS.keys() - {option.name for option in chosen_options(options)}
    return options.model_dump(mode="json", exclude=set(unused))


def read_stored(document: JsonObject) -> tuple[CallOptions, list[str]]:
    """Parse the stored options of a call. Return the options, and the names of the stored options
    that this engine cannot use. If there are such names, the call must not run.
    """
    document = {name: value for name, value in document.items() if not _is_former(name, value)}
    try:
        return CallOptions.model_validate(document), []
    except ValidationError as error:
        lost = sorted({str(fault["loc"][0]) for fault in error.errors()})
    known = {name: value for name, value in document.items() if name not in lost}
    return CallOptions.model_validate(known), lost


def _is_former(name: str, value: object) -> bool:
    """Whether an earlier version of the engine stored this option with this value for calls that
    did not use the option. Such a stored option has no effect.
    """
    return name in FORMER and value == FORMER[name]
