"""Parts: their order, what is refused, and that only this distribution's are loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, nullcontext
from importlib.metadata import EntryPoint
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from fumehood import Config, ConfigError, Engine, engine_parts, load_config
from fumehood import parts as module
from fumehood.cli import doctor, main
from fumehood.cli.findings import Finding
from fumehood.core.errors import EngineError
from fumehood.core.part import (
    Check,
    Command,
    Options,
    Part,
    PartError,
    imported,
    ordered,
    part_among,
    placed,
)
from fumehood.core.session import SessionRecord
from fumehood.engine_part import EnginePart, Kernel
from fumehood.parts import parts, with_methods
from fumehood.storage.audit_chain import all_rows
from fumehood.storage.database import FILE_NAME, open_database


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
    found: tuple[Part, ...] = parts.__wrapped__()
    return found


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
        (
            {"a": Part(name="a", mounts={"/z": "m:f"}), "b": Part(name="b", mounts={"/z": "m:f"})},
            "'a' and 'b' both add '/z' to mounts",
        ),
        (
            {"a": Part(name="a", states={"s": "m:f"}), "b": Part(name="b", states={"s": "m:f"})},
            "'a' and 'b' both add 's' to states",
        ),
        (
            {
                "a": Part(name="a", session_fields={"project": "m:f"}),
                "b": Part(name="b", session_fields={"project": "m:f"}),
            },
            "'a' and 'b' both add 'project' to session_fields",
        ),
    ],
)
def test_wrong_part_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(PartError, match=words):
        parts_of(monkeypatch, **given)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution has a part, whose module does not exist."""
    own = EntryPoint("webhook", "fumehood.webhook.part:PART", module.GROUP)
    evil = EntryPoint("evil", "evil:PART", module.GROUP)
    for entry, name in ((own, "fumehood"), (evil, "evil-tools")):
        vars(entry)["dist"] = type("D", (), {"name": name})()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [own, evil])


@pytest.mark.usefixtures("other")
def test_part_of_another_distribution_is_loaded_only_if_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [entry.name for entry in module.foreign()] == ["evil"]
    assert "evil" not in [one.name for one in parts.__wrapped__()]
    monkeypatch.setenv("FUMEHOOD_PARTS", "evil, ")
    with pytest.raises(PartError, match="'evil' cannot be loaded: No module named 'evil'"):
        parts.__wrapped__()
    monkeypatch.setenv("FUMEHOOD_PARTS", "webhook")  # the product's own needs no name
    with pytest.raises(PartError, match="No installed package has the part 'webhook'"):
        parts.__wrapped__()
    monkeypatch.delenv("FUMEHOOD_PARTS")
    file = tmp_path / "config.toml"
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(file))
    for text in ('parts = ["evil"]', 'parts = "evil, "', "parts = [}", "parts = 3"):
        file.write_text(text)
        assert module.named() == (("evil",) if "evil" in text else ())
    for name in ("FUMEHOOD_CONFIG", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: pytest.fail("the jail ends for this"))
    assert module.named() == ()


def test_configuration_refuses_a_part_that_is_not_loaded() -> None:
    with pytest.raises(
        ConfigError, match=r"parts: .*'slack' was not loaded: name it in FUMEHOOD_PARTS"
    ):
        load_config(parts=("slack",))


def test_others_part_comes_last_and_cannot_have_a_name_of_the_products_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUMEHOOD_PARTS", "a")
    monkeypatch.setattr(module, "foreign", lambda: [Fake._entry("a", Part(name="a"))])
    assert [one.name for one in parts_of(monkeypatch, b=Part(name="b"))] == ["b", "a"]
    with pytest.raises(PartError, match="name of one of the product's own"):
        parts_of(monkeypatch, a=Part(name="a"))


def test_placed_after_what_it_follows() -> None:
    assert placed(["a", "b"], {"x": "a", "y": "x", "z": "gone"}) == ["a", "x", "y", "b", "z"]


def test_every_place_that_a_part_names_exists() -> None:
    for part in parts():
        places = [part.settings, part.approvers, part.operations, part.control_operations]
        places += [part.in_engine, part.runtime, *(one.function for one in part.checks)]
        places += [one.function for one in part.commands.values()]
        places += [*part.mounts.values(), part.coming, part.call_options]
        places += [*part.states.values(), *part.files.values(), *part.policy.values()]
        places += [kind.executor for kind in part.executors.values()]
        places += [*part.session_fields.values()]
        assert part.session_fields.keys() <= SessionRecord.model_fields.keys()
        for place in filter(None, places):
            assert imported(place) is not None


class Unmade(EnginePart):
    def __init__(self, kernel: Kernel) -> None:
        raise LookupError("no")


class Unstarted(EnginePart):
    @asynccontextmanager
    async def running(self, made: Any) -> AsyncIterator[None]:
        raise LookupError("no")
        yield


class Unrecovered(EnginePart):
    async def recovered(self) -> None:
        raise LookupError("no")


class Well(EnginePart):
    stopped = 0
    took_calls: ClassVar[list[bool]] = []
    """Whether the engine took calls when the part was started, recovered and stopped."""

    @asynccontextmanager
    async def running(self, made: Any) -> AsyncIterator[None]:
        self.made = made
        Well.took_calls.append(made.calls.intake.is_open)
        yield
        Well.took_calls.append(made.calls.intake.is_open)
        Well.stopped += 1

    async def recovered(self) -> None:
        Well.took_calls.append(self.made.calls.intake.is_open)


@pytest.mark.anyio
async def test_part_that_cannot_start_is_named_and_the_engine_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = "test_product_parts"
    monkeypatch.setitem(sys.modules, here, sys.modules[__name__])

    def use(*names: str) -> None:
        made = tuple(Part(name=one, in_engine=f"{here}:{one}") for one in names)
        monkeypatch.setattr(engine_parts, "parts", lambda: made)

    use("Unmade")
    with pytest.raises(PartError, match="part 'Unmade' could not be made: no"):
        Engine()
    use("Well", "Unstarted")
    with pytest.raises(PartError, match="Unstarted could not be started: no"):
        async with Engine():
            pytest.fail("it has started")
    assert Well.stopped == 1
    use("Well", "Unrecovered")
    with pytest.raises(PartError, match="Unrecovered could not be started: no"):
        async with Engine():
            pytest.fail("it has started")
    assert Well.stopped == 2
    use("Well")
    Well.took_calls.clear()
    async with Engine():
        assert Well.took_calls == [False, True]
    assert Well.took_calls == [False, True, False]


class Watching(EnginePart):
    """Writes down what it can do while the database is open."""

    seen: ClassVar[list[str]] = []

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        await self.kernel.record("watching.began", {"by": "part"})
        self.seen.append("open")
        try:
            yield
        finally:
            await self.kernel.record("watching.ended", {})
            self.seen.append("closing")

    @asynccontextmanager
    async def running(self, made: Any) -> AsyncIterator[None]:
        self.seen.append("running")
        yield
        self.seen.append("stopped")


@pytest.mark.anyio
async def test_part_works_from_the_first_row_of_an_engine_to_its_last(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    here = "test_product_parts"
    monkeypatch.setitem(sys.modules, here, sys.modules[__name__])
    monkeypatch.setattr(Watching, "seen", [])
    made = tuple(Part(name=one, in_engine=f"{here}:{one}") for one in ("Unstarted", "Watching"))
    monkeypatch.setattr(engine_parts, "parts", lambda: made[1:])
    with closing(open_database(home / FILE_NAME)) as database:
        config = Config(home=home)
        async with Engine(config=config, database=database):
            assert Watching.seen == ["open", "running"]
        assert Watching.seen == ["open", "running", "stopped", "closing"]
        monkeypatch.setattr(engine_parts, "parts", lambda: made)
        with pytest.raises(PartError, match="Unstarted could not be started: no"):
            async with Engine(config=config, database=database):
                pytest.fail("it has started")
        assert Watching.seen[4:] == ["open", "closing"]
        rows = database.read_now(lambda connection: list(all_rows(connection)))
    bodies = [json.loads(row.body) for row in rows]
    assert [body["kind"] for body in bodies] == ["watching.began", "watching.ended"] * 2
    assert bodies[0]["by"] == "part"


class Knowing(EnginePart):
    """Knows how one call ended."""

    async def outcomes(self) -> Mapping[str, EngineError | None]:
        return {"call_1": None}


class KnowingToo(Knowing):
    pass


@pytest.mark.anyio
async def test_two_parts_that_know_the_outcome_of_one_call_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = "test_product_parts"
    monkeypatch.setitem(sys.modules, here, sys.modules[__name__])
    made = [Part(name=n, in_engine=f"{here}:{n}") for n in ("Knowing", "KnowingToo")]
    monkeypatch.setattr(engine_parts, "parts", lambda: (made[0],))
    async with Engine():
        pass
    monkeypatch.setattr(engine_parts, "parts", lambda: tuple(made))
    with pytest.raises(PartError, match="Two parts know how the call call_1 ended"):
        async with Engine():
            pytest.fail("it has started")


class Plain:
    def __init__(self) -> None:
        self.calls = 0

    def call(self) -> str:
        return "kernel"


class Louder(Plain):
    """What a part adds."""

    def shout(self) -> str:
        return self.call().upper()


class Quieter(Plain):
    def whisper(self) -> str:
        return "…"


class Rival(Plain):
    def shout(self) -> str:
        return ""


class Thief(Plain):
    def call(self) -> str:
        return "unchecked"


class Intruder(Plain):
    def __init__(self) -> None:
        self.call = lambda: "unchecked"  # type: ignore[method-assign]


def joined(monkeypatch: pytest.MonkeyPatch, *classes: type[Plain]) -> Any:
    found = [Part(name=one.__name__, methods={"Plain": one.__name__}) for one in classes]
    monkeypatch.setattr(module, "own_parts", lambda: (Part(name="a"), *found))
    monkeypatch.setattr(module, "imported", globals().__getitem__)
    return with_methods(Plain)


def test_class_has_the_methods_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = joined(monkeypatch, Louder, Quieter)()
    assert (made.call(), made.shout(), made.whisper()) == ("kernel", "KERNEL", "…")
    assert joined(monkeypatch) is Plain


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ((Louder, Thief), "Plain.call of the part 'Thief' exists"),
        ((Louder, Intruder), "Plain.__init__ of the part 'Intruder' exists"),
        ((Louder, Rival), "Plain.shout of the part 'Rival' exists"),
    ],
)
def test_part_cannot_replace_a_method(
    monkeypatch: pytest.MonkeyPatch, classes: tuple[type[Plain], ...], words: str
) -> None:
    with pytest.raises(PartError, match=words):
        joined(monkeypatch, *classes)


class Closed(EnginePart):
    fails: ClassVar = False
    closed: ClassVar[list[str]] = []

    @asynccontextmanager
    async def running(self, made: Any) -> AsyncIterator[None]:
        yield
        if self.fails:
            raise LookupError("at its end")

    def close(self) -> None:
        self.closed.append(type(self).__name__)


class Unclosed(EnginePart):
    def close(self) -> None:
        raise LookupError("no")


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["normal", "cancelled", "failing"])
async def test_parts_are_closed_however_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    here = "test_product_parts"
    monkeypatch.setitem(sys.modules, here, sys.modules[__name__])
    monkeypatch.setattr(Closed, "fails", way == "failing")
    monkeypatch.setattr(Closed, "closed", [])
    made = tuple(Part(name=n, in_engine=f"{here}:{n}") for n in ("Closed", "Unclosed"))
    monkeypatch.setattr(engine_parts, "parts", lambda: made)
    with nullcontext() if way != "failing" else pytest.raises(ExceptionGroup):
        with anyio.CancelScope() as scope:
            async with Engine():
                if way == "cancelled":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
    assert Closed.closed == ["Closed"]


def test_metadata_that_names_no_parts_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PartError, match="Install it again"):
        parts_of(monkeypatch)


def test_part_cannot_take_a_command_or_a_check_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = Part(name="a", commands={"serve": COMMAND}, checks=(Check("policy", "m:f", "x"),))
    monkeypatch.setattr(main, "parts", lambda: (part,))
    with pytest.raises(PartError, match="'serve', which is the kernel's"):
        main.all_commands()
    monkeypatch.setattr(doctor, "parts", lambda: (part,))
    with pytest.raises(PartError, match="'policy', which is the kernel's"):
        doctor.authority_checks()
    part = Part(name="a", checks=(Check("mine", "m:f", "Limits", group="Tools"),))
    with pytest.raises(PartError, match="'Tools', which is the kernel's"):
        doctor.authority_checks()


def test_checks_and_libraries_of_parts_join_the_groups_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check("cloud:", "m:f", after="Authority", group="Limits")
    needed = {"pytest": "1.0", "anyio": "999.1", "there-is-no-such": "1"}
    part = Part(name="a", checks=(check,), libraries=needed)
    lax = Part(name="b", libraries={"anyio": "99.2"})  # which permits what the other does not
    monkeypatch.setattr(doctor, "parts", lambda: (part, lax))
    assert doctor.libraries() == needed
    found = {name: doctor._library(name, oldest) for name, oldest in doctor.libraries().items()}
    assert (found["pytest"].verdict, found["anyio"].verdict) == ("ok", "missing")
    absent = found["there-is-no-such"]
    assert (absent.verdict, absent.found) == ("missing", "not installed")
    assert found["anyio"].cure == "Install anyio 999.1 or newer."
    limits = [Finding(f"{wall}: memory", "ok", "enforced") for wall in ("cloud", "jail")]
    doctor.show_findings([*found.values(), *limits], verbose=False)
    shown = capsys.readouterr().out
    assert "Host: 1 of 3 ok: pytest" in shown
    assert "Limits: 2 of 2 enforced" in shown


def test_option_before_one_that_is_not_there_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "imported", lambda _: lambda loud=False: None)
    made = main.with_options(lambda name="x": None, [Options("own", "m:f", before="gone")])
    assert list(signature(made).parameters) == ["name", "loud"]


@pytest.mark.parametrize(
    "part",
    [
        Part(name="a", options=(Options("call", "m:f", before="x"),)),
        Part(name="a", commands={"calls more": COMMAND}),
    ],
)
def test_part_cannot_change_a_command_that_is_not_open(
    monkeypatch: pytest.MonkeyPatch, part: Part
) -> None:
    monkeypatch.setattr(main, "parts", lambda: (part,))
    with pytest.raises(PartError, match=r"'calls?', which is not open to parts"):
        main.all_commands()


def test_two_packages_with_one_part_and_a_part_with_methods_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUMEHOOD_PARTS", "a")
    twice = [Fake._entry("a", Part(name="a")), Fake._entry("a", Part(name="a"))]
    monkeypatch.setattr(module, "foreign", lambda: twice)
    with pytest.raises(PartError, match="names the part 'a'"):
        parts_of(monkeypatch, b=Part(name="b"))
    monkeypatch.setattr(
        module, "foreign", lambda: [Fake._entry("a", Part(name="a", methods={"Engine": "m:E"}))]
    )
    with pytest.raises(PartError, match="own parts can add methods"):
        parts_of(monkeypatch, b=Part(name="b"))
    filler = Part(name="a", session_fields={"project": "m:f"})
    monkeypatch.setattr(module, "foreign", lambda: [Fake._entry("a", filler)])
    with pytest.raises(PartError, match="own parts can fill fields of sessions"):
        parts_of(monkeypatch, b=Part(name="b"))


def test_two_parts_with_one_key_of_the_policy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for field, key in (
        ({"policy": {"k": "m:f"}}, "policy"), ({"excesses": {"k"}}, "excesses"),
        ({"conditions": {"k": "m:f"}}, "conditions"),
    ):  # fmt: skip
        a, b = Part(name="a", **field), Part(name="b", **field)  # type: ignore[arg-type]
        with pytest.raises(PartError, match=f"'a' and 'b' both add 'k' to {key}"):
            parts_of(monkeypatch, a=a, b=b)
        assert len(parts_of(monkeypatch, a=a, b=Part(name="b"))) == 2  # twin


def test_part_that_another_needs_and_that_is_missing_is_named() -> None:
    assert part_among(("other", 1), int) == 1  # twin
    with pytest.raises(PartError, match="the part int, which is not there"):
        part_among(("other",), int)
