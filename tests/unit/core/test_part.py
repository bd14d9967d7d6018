"""Parts: their order, what is refused, and that only this distribution's are loaded."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from fumehood.core import part as module
from fumehood.core.part import Check, Command, Part, PartError, imported, ordered, parts, placed


class Fake:
    """A distribution with these parts. `load` of an entry point returns what is given."""

    def __init__(self, **given: Any) -> None:
        self.entry_points = self
        self._entries = [self._entry(name, value) for name, value in given.items()]

    def select(self, *, group: str) -> list[Any]:
        assert group == module.GROUP
        return self._entries

    @staticmethod
    def _entry(name: str, value: Any) -> Any:
        class Entry:
            pass

        entry: Any = Entry()
        entry.name, entry.value = name, f"there:{name}"

        def load() -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        entry.load = load
        return entry


def parts_of(monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[Part, ...]:
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Fake(**given))
    return parts.__wrapped__()


def test_order_is_that_of_after_and_then_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = Part(name="a", after=("c", "missing")), Part(name="b"), Part(name="c")
    for given in ({"a": a, "b": b, "c": c}, {"c": c, "b": b, "a": a}):
        assert [one.name for one in parts_of(monkeypatch, **given)] == ["b", "c", "a"]


def test_parts_that_precede_each_other_are_refused() -> None:
    with pytest.raises(PartError, match="precede"):
        ordered([Part(name="a", after=("b",)), Part(name="b", after=("a",))])


COMMAND = Command("Help.", "m:f", "serve")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": Part(name="b")}, "'a' names the part 'b'"),
        ({"a": object()}, "there:a is not a part"),
        ({"a": ImportError("No module named 'ray'")}, "'a' cannot be loaded: No module"),
        (
            {
                "a": Part(name="a", commands={"x": COMMAND}),
                "b": Part(name="b", commands={"x": COMMAND}),
            },
            "'a' and 'b' both add 'x' to commands",
        ),
        (
            {
                "a": Part(name="a", checks=(Check("y", "m:f", "policy"),)),
                "b": Part(name="b", checks=(Check("y", "m:f", "policy"),)),
            },
            "'a' and 'b' both add 'y' to checks",
        ),
    ],
)
def test_wrong_part_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(PartError, match=words):
        parts_of(monkeypatch, **given)


def test_entry_point_of_another_distribution_is_named_and_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = EntryPoint("webhook", "fumehood.webhook.part:PART", module.GROUP)
    other = EntryPoint("evil", "evil:PART", module.GROUP)
    for entry, name in ((own, "fumehood"), (other, "evil-tools")):
        vars(entry)["dist"] = type("D", (), {"name": name})()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [own, other])
    assert module.foreign() == ["evil (evil-tools)"]
    assert "evil" not in [one.name for one in parts()]


def test_placed_after_what_it_follows() -> None:
    assert placed(["a", "b"], {"x": "a", "y": "x", "z": "gone"}) == ["a", "x", "y", "b", "z"]


def test_every_place_that_a_part_names_exists() -> None:
    for part in parts():
        places = [part.settings, part.approvers, part.operations, part.control_operations]
        places += [part.in_engine, *(one.function for one in part.checks)]
        places += [one.function for one in part.commands.values()]
        for place in filter(None, places):
            assert imported(place) is not None
