"""Classes that a program makes: from which bases, with which methods, and which they are.

Guest side. Invariant: a class of a program has `type` as its metaclass and only `object`,
exceptions and other classes of the program as bases; nothing in it takes part in attribute
access, class creation or copying.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Iterable
from typing import Any

from fumehood.guest.interpreter.programs.modules import named
from fumehood.guest.interpreter.programs.nodes import MAGIC_METHODS
from fumehood.guest.interpreter.programs.refusal import Refused, Uncopied

_MADE_BY_THE_COMPILER = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__classcell__", "__firstlineno__",
        "__static_attributes__", "__orig_bases__",
    }
)  # fmt: skip


class ProgramClasses(Uncopied):
    """The classes of one program."""

    def __init__(self) -> None:
        self._made: set[type] = set()

    def __contains__(self, kind: type) -> bool:
        return kind in self._made

    def make(self, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        """What `class` statements call instead of a metaclass.

        Raises:
            Refused: a base or a member that no class here may have.
        """
        for base in bases:
            if not self._may_be_base(base):
                raise Refused(f"{_name(base)} cannot be a base class here")
        for member in namespace:
            if member.startswith("_") and member not in MAGIC_METHODS | _MADE_BY_THE_COMPILER:
                if member == "_":
                    continue
                raise Refused(f"a class here cannot define {member[:40]!a}")
        if not bases or bases == (object,):
            # The stock one shows where in memory the object lies.
            namespace.setdefault("__repr__", _plain_repr)
        made = type(name, bases, namespace)
        self._made.add(made)
        return made

    def named_tuple(self, *values: Any, **keywords: Any) -> type:
        """`collections.namedtuple` without the `eval` and the frames of the library's own.

        Raises:
            ValueError: a field that is no identifier, begins with an underscore or is repeated.
        """
        name, fields, defaults = _name_and_fields(*values, **keywords)
        names = tuple(fields.replace(",", " ").split() if type(fields) is str else map(str, fields))
        given = tuple(defaults or ())
        name = str(name)  # once: a program's own object may answer otherwise the next time
        _check_fields((name, *names))
        if len(set(names)) < len(names) or len(given) > len(names):
            raise ValueError("field names must differ, and defaults be no more than fields")
        filled = dict(zip(names[len(names) - len(given) :], given, strict=True))

        def make(cls: type, /, *values: Any, **keywords: Any) -> Any:
            rest = names[len(values) :]
            if len(values) > len(names) or not keywords.keys() <= set(rest):
                raise TypeError(f"{name}() takes {', '.join(names)}, each once")
            given_now = {**filled, **keywords}
            missing = [field for field in rest if field not in given_now]
            if missing:
                raise TypeError(f"{name}() lacks {', '.join(missing)}")
            return tuple.__new__(cls, (*values, *(given_now[field] for field in rest)))

        def represent(self: Any) -> str:
            pairs = zip(names, tuple.__iter__(self), strict=True)
            return f"{name}({', '.join(f'{field}={value!r}' for field, value in pairs)})"

        made = type(
            name,
            (tuple,),
            {
                "__slots__": (),
                "__new__": make,
                "__repr__": represent,
                "__getnewargs__": lambda self: tuple(self),  # for copies
                **{
                    field: property(operator.itemgetter(place)) for place, field in enumerate(names)
                },
            },
        )
        self._made.add(made)
        return made

    def defines(self, order: Iterable[type], name: str) -> bool | None:
        """Whether the first of these classes that has this member is the program's.

        None where no class has it. `order` is that in which Python looks for it: a member of
        a library's class that comes first is what Python would take.
        """
        for kind in order:
            if name in vars(kind):
                return kind in self._made
        return None

    def _may_be_base(self, base: Any) -> bool:
        if not isinstance(base, type):
            return False
        if issubclass(base, BaseExceptionGroup):
            return False
        return base is object or base in self._made or issubclass(base, Exception)


def _name_and_fields(typename: Any, field_names: Any, *, defaults: Any = None) -> Any:
    return typename, field_names, defaults


named(namedtuple=_name_and_fields)


def _plain_repr(self: Any) -> str:
    return f"<{type(self).__name__} object>"


def _check_fields(names: tuple[str, ...]) -> None:
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise ValueError(f"{name[:40]!a} cannot be the name of a field or a type here")


def _name(base: Any) -> str:
    return base.__name__[:40] if isinstance(base, type) else "this"
