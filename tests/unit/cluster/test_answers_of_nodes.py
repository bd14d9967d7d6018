"""What answers of nodes may contain: every type of an ending is known to the engine."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from enum import Enum

from fumehood.cluster import ray_membership
from fumehood.sandbox.wall import RunEnding


def classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for one in typing.get_args(hint):
        yield from classes_in(one)


def test_engine_accepts_each_class_of_an_ending() -> None:
    hints = typing.get_type_hints(RunEnding).values()
    enums = {one for hint in hints for one in classes_in(hint) if issubclass(one, Enum)}
    assert len(enums) >= 2  # the control: EndedBy and Grade are found
    assert enums <= set(ray_membership._SENT.values())
