"""Run attacks on all walls of a host, one after the other, in a limited time.

Host side. Invariants: walls and bait are removed however the run ends; a wall that cannot be tried
is reported as untried, with the reason, and never as held; `held` means that the attack ended
exactly as expected, every check from outside passed, and the harmless twin passed afterwards on the
same wall.

Checks from outside, during and after an attack, rely on the host, Docker and the Linux kernel, and
never on the program's own report. Programs in containers give their processes a unique name, by
which the host finds them. Programs behind process walls are found among the descendants of the
wall's guest. A check that observed nothing fails, because it proves nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import psutil

from fumehood.attack.attack import Attack, Expectation, Look, arguments_of, misses, name_of, said_in
from fumehood.attack.bait import Bait
from fumehood.attack.corpus import attacks_on
from fumehood.attack.scorecard import Line, Scorecard, Verdict, WallCard, verdict_of
from fumehood.attack.targets import Standing, Target
from fumehood.core.errors import EndedBy, EngineError
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import CONTAINER_PROCESSES, MB, Grade, Limit, Limits
from fumehood.sandbox.container.runtime import RuntimeFault
from fumehood.sandbox.container.spec import GUEST_PROCESSES, GVISOR_MEMORY_MB
from fumehood.sandbox.settings import GUEST_MB
from fumehood.sandbox.wall import RunEnding

TOTAL_S = 115.0
"""Seconds for all attacks. Attacks that have not started by then are reported as untried."""

HELLO = {"calculator": "1 + 1", "function": "out = 2", "python": "1 + 1"}
"""Maps a language to the harmless program that a wall must run before it is attacked."""

HELLO_S = 10.0
"""Time limit of the harmless first program, in seconds."""

OUT_OF_TIME = "The time for all attacks was used up."
OUT_OF_TIME_CURE = "Try one wall at a time (--wall), or when this host has less to do."

OnLine = Callable[[str, Line], None]
"""A function that receives the wall's name and the result of each attack, as soon as the result is
known."""


@dataclass
class Looked:
    """The results of the checks that the host makes from outside the wall, as text. `faults`
    describes the failed checks, and `seen` the passed checks.
    """

    faults: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def say(self, words: str, *, holds: bool) -> None:
        """Add the result of one check: to `seen` if `holds` is True, otherwise to `faults`."""
        (self.seen if holds else self.faults).append(words)


async def run_attacks(
    targets: Sequence[Target | WallCard],
    *,
    engine_version: str,
    quick: bool = False,
    choose: Callable[[Attack], bool] = lambda attack: True,
    total_s: float = TOTAL_S,
    on_line: OnLine = lambda wall, line: None,
) -> Scorecard:
    """Run the attacks on every target, and return the scorecard. A `WallCard` in `targets` stands
    for a wall that cannot be attacked, and is copied to the scorecard.

    Only attacks for which `choose` returns True are run and, if `quick` is True, only quick
    attacks. All attacks together have `total_s` seconds. `on_line` is called with the wall's name
    and the result of each attack, as soon as the result is known.

    Raises:
        BaitFailed: the bait (what attacks try to reach) could not be made, so nothing was attacked.
    """
    began = time.monotonic()
    cards = []
    with Bait() as bait:
        for target in targets:
            if isinstance(target, WallCard):
                cards.append(target)
                continue
            rows = [row.on(target.kind) for row in attacks_on(target.wall)]
            attacks = [row for row in rows if choose(row) and (not quick or row.is_quick)]
            cards.append(await _attack_wall(target, attacks, bait, began + total_s, on_line))
    return Scorecard(engine_version, quick, round(time.monotonic() - began, 1), tuple(cards))


async def _attack_wall(
    target: Target, attacks: Sequence[Attack], bait: Bait, ends_at: float, on_line: OnLine
) -> WallCard:
    began = time.monotonic()
    lines: list[Line] = []
    why = cure = ""
    grade: Grade | None = None
    try:
        async with target.open() as standing:
            await _say_hello(target.wall, standing)
            grade = standing.wall.status.grade
            for attack in attacks:
                trial = _Trial(attack, standing, bait)
                if time.monotonic() >= ends_at:
                    trial.why_untried, trial.cure = OUT_OF_TIME, OUT_OF_TIME_CURE
                line = await trial.tried()
                lines.append(line)
                on_line(target.name, line)
    except CannotTry as cannot:
        why, cure = cannot.args
    return WallCard(
        target.wall,
        target.runtime,
        verdict_of(lines),
        why,
        cure,
        round(time.monotonic() - began, 1),
        tuple(lines),
        grade,
    )


class CannotTry(Exception):
    """The wall cannot be attacked on this host. `args` are the reason and the remedy."""


async def _say_hello(name: str, standing: Standing) -> None:
    """Check that the wall runs a harmless program. Called before the attacks.

    Raises:
        CannotTry: the wall is not ready, or the harmless program did not succeed.
    """
    # A wall that refuses every program would seem to hold.
    wall, language = standing.wall, standing.hello
    status = wall.status
    cure = status.remedy or "Run `fumehood doctor` to see what is missing."
    lacking = status.lacking(name)
    if status.faults or lacking:
        why = "; ".join(status.faults)
        why = why or f"It does not enforce {', '.join(sorted(lacking))} here."
        raise CannotTry(f"It serves no calls. {why}", cure)
    limits = Limits(HELLO_S, HELLO_S, standing.memory_mb, 4096)
    try:
        with anyio.fail_after(3 * HELLO_S):
            async with wall.lease(ATTACKER, fresh=False, memory_mb=standing.memory_mb) as lease:
                ending = await lease.run(
                    language.value, arguments_of(language, HELLO[language.value]), limits
                )
    except (EngineError, RuntimeFault) as error:
        raise CannotTry(error.message, getattr(error, "remedy", cure)) from None
    except TimeoutError:
        raise CannotTry("Its first program did not end.", cure) from None
    if ending.ended_by is not EndedBy.OK:
        raise CannotTry(f"Its first program ended as {ending.ended_by.value}.", cure)


GRACE_S = 10.0
"""Seconds that a run may exceed its time limit by the host's clock, since the kill takes time."""

PATIENCE_S = 20.0
"""Seconds after a run's time limit until the run is abandoned, so that it cannot delay other
attacks."""

ATTACKER = TrustDomain("attack")


async def try_one(attack: Attack, standing: Standing, bait: Bait, kind: str | None) -> Line:
    """Try one attack on one wall, and return its line of the scorecard. If the attack could not be
    run, the line gives the reason.
    """
    return await _Trial(attack.on(kind), standing, bait).tried()


@dataclass
class _Trial:
    """The trial of one attack on one wall, and its results so far."""

    attack: Attack
    standing: Standing
    bait: Bait
    looked: Looked = field(default_factory=Looked)
    ended: str | None = None
    twin: str | None = None
    why_untried: str = ""
    cure: str = ""

    async def tried(self) -> Line:
        """Run the attack, and return its line of the scorecard. If `why_untried` already gives a
        reason against running the attack, only return the line.
        """
        began = time.monotonic()
        try:
            if not self.why_untried:
                await self._run()
        except (EngineError, RuntimeFault) as error:
            if self.ended is not None:
                self.looked.faults.append(f"nothing ran after it: {error.message}")
            else:
                self.why_untried = error.message
                self.cure = "" if isinstance(error, EngineError) else error.remedy
        return self._line(round((time.monotonic() - began) * 1e3))

    def _line(self, ms: int) -> Line:
        attack, faults = self.attack, self.looked.faults
        verdict = Verdict.FAILED if faults else Verdict.HELD
        if self.why_untried and not faults:
            verdict = Verdict.UNTRIED
        return Line(
            id=attack.id,
            topic=attack.topic.value,
            harm=attack.harm.value,
            tries=attack.tries,
            verdict=verdict,
            expected=attack.expected.ends,
            ended=self.ended,
            twin=self.twin,
            seen=tuple(self.looked.seen),
            why="; ".join(faults) or self.why_untried,
            cure=self.cure,
            differs=attack.differs.why if attack.differs is not None else "",
            ms=ms,
        )

    async def _run(self) -> None:
        """Run the attack with its checks, and then its twin, the harmless program that must
        succeed. Store the results in this object.

        Raises:
            EngineError: the wall refused to run a program.
            RuntimeFault: Docker could not be queried.
        """
        attack, bait = self.attack, self.bait
        if attack.before is not None:
            prepared = await self._send(attack.before, ATTACKER)
            if prepared is None or name_of(prepared) != "ok":
                self.why_untried = "Its preparation failed."
                return
        stranger = TrustDomain(f"attack:{secrets.token_hex(8)}")
        containers = self.standing.containers
        if attack.looks and containers is not None and not await containers.names():
            # The previous attack may have ended the last container.
            await self._send(attack.twin, ATTACKER)
        async with looking(attack.looks, self.standing, bait) as self.looked:
            began = time.monotonic()
            ending = await self._send(attack.code, stranger if attack.by_stranger else ATTACKER)
            took_s = time.monotonic() - began
        faults = self.looked.faults
        self.ended, missing = self._compare(ending, attack.expected)
        faults += missing
        if took_s > attack.wall_s + GRACE_S:
            faults.append(f"it took {took_s:.1f} s by the host's clock")
        lost = bait.losses("" if ending is None else said_in(ending)) + self.standing.losses()
        faults += lost
        if not lost:
            self.looked.seen.append("the bait is untouched")
        twin = Expectation(("ok",), attack.twin_gives)
        self.twin, missing = self._compare(await self._send(attack.twin, ATTACKER), twin)
        if missing:
            faults.append(f"it also refuses harmless programs: of the twin, {'; '.join(missing)}")

    async def _send(self, code: str, domain: TrustDomain) -> RunEnding | None:
        """Run one program for a trust domain. Return its ending, or None if the program did not end
        in time.
        """
        attack, standing = self.attack, self.standing
        limits = Limits(attack.wall_s, 60.0, standing.memory_mb, attack.output_bytes)
        arguments = arguments_of(attack.language, self.bait.fill(code))
        if standing.environment:
            variables = standing.environment.items()
            arguments["env"] = [{"name": name, "value": value} for name, value in variables]
        async with standing.wall.lease(domain, fresh=False, memory_mb=standing.memory_mb) as lease:
            with anyio.move_on_after(attack.wall_s + PATIENCE_S):
                return await lease.run(attack.language.value, arguments, limits, standing.sinks)
        return None

    def _compare(self, ending: RunEnding | None, expected: Expectation) -> tuple[str, list[str]]:
        """Return the name of an ending, and a description of each difference from the expected
        ending. An `ending` of None means that the program did not end.
        """
        if ending is None:
            return "never", ["it did not end"]
        return name_of(ending), misses(expected, self.attack.language, ending)


# -- checks from outside --------------------------------------------------------------------


@asynccontextmanager
async def looking(
    wanted: tuple[Look, ...], standing: Standing, bait: Bait
) -> AsyncIterator[Looked]:
    """Check a wall before, during and after the `async with` block, which runs the attack. Yield
    the results, which are complete after the block. `wanted` are the checks to make.

    Raises:
        RuntimeFault: Docker could not be queried.
    """
    looked = Looked()
    async with AsyncExitStack() as stack:
        for look in wanted:
            if look in (Look.PROCESSES, Look.SEALED) and not standing.sees_processes:
                looked.seen.append("its processes cannot be seen from here")
            else:
                await stack.enter_async_context(_LOOKS[look](standing, bait, looked))
        yield looked


def _pids(standing: Standing, bait: Bait) -> list[int]:
    if standing.containers is not None:
        return named(bait.mark)
    return below(standing.guest_pid())


@asynccontextmanager
async def _processes(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    with Watch(partial(_pids, standing, bait)) as watch:
        yield
    left = await anyio.to_thread.run_sync(watch.settled, standing.standing_processes)
    left -= standing.standing_processes
    within = 0 < watch.most <= CONTAINER_PROCESSES + GUEST_PROCESSES
    looked.say(f"at most {watch.most} of its processes were seen at once", holds=within)
    looked.say("none was left" if left <= 0 else f"{left} were left after it", holds=left <= 0)


@asynccontextmanager
async def _sealed(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    with Watch(partial(_pids, standing, bait)) as watch:
        yield
    seals = watch.seals
    sealed = [seal for seal in seals if is_sealed(seal)]
    if standing.standing_processes:  # one of them is the zygote, which runs no program
        words = f"of {len(seals)} processes below the guest, {len(sealed)} were seen sealed"
        looked.say(words, holds=bool(sealed) and len(seals) - len(sealed) <= 1)
        return
    words = f"{len(sealed)} of {len(seals)} processes were seen without rights, behind a filter"
    looked.say(words, holds=bool(seals) and sealed == seals)
    if any("0" in seal["Uid"].split() for seal in seals):
        looked.faults.append("a program ran as root")


@asynccontextmanager
async def _unbroken(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    if standing.containers is None:
        pid = standing.guest_pid()
        yield
        kept = standing.guest_pid() == pid is not None
        looked.say("the guest is the same process" if kept else "the guest was ended", holds=kept)
        return
    before = await standing.containers.names()
    yield
    kept = bool(before) and before <= await standing.containers.names()
    looked.say("its container continues" if kept else "its container was ended", holds=kept)


@asynccontextmanager
async def _other_container(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    before = await standing.containers.names()
    yield
    other = bool(await standing.containers.names() - before)
    words = "another container served it" if other else "the same container served it"
    looked.say(words, holds=other)


@asynccontextmanager
async def _layer(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    before = await standing.containers.changes()
    yield
    new = {
        path
        for name, paths in (await standing.containers.changes()).items()
        for path in paths - before.get(name, paths)
    }
    words = f"the container's layer was changed: {', '.join(sorted(new)[:5])}"
    looked.say(words if new else "the container's layer is unchanged", holds=not new)


@asynccontextmanager
async def _memory_limit(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    most = (standing.memory_mb + GUEST_MB + GVISOR_MEMORY_MB) * MB
    grade = standing.wall.status.grade
    is_watched = grade is not None and not grade.is_at_least(Grade.NAMESPACES)
    for config in await standing.containers.configs() or [{}]:
        if is_watched and "Memory" not in config:
            looked.say("its guest watches the memory", holds=True)
            continue
        memory, swap = int(config.get("Memory") or 0), int(config.get("MemorySwap") or 0)
        holds = 0 < memory <= most and swap == memory
        looked.say(f"its container is limited to {memory // MB} MB", holds=holds)
    yield


@asynccontextmanager
async def _no_network(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    status = standing.wall.status
    for config in await standing.containers.configs() or [{}]:
        if status.grade is Grade.PROCESS and "NetworkMode" not in config:
            looked.say("its guest was refused every socket", holds=Limit.NETWORK in status.seen)
            continue
        mode = str(config.get("NetworkMode"))
        looked.say(f"its container has the network {mode!r}", holds=mode == "none")
    yield


_LOOKS = {
    Look.PROCESSES: _processes,
    Look.SEALED: _sealed,
    Look.UNBROKEN: _unbroken,
    Look.LAYER: _layer,
    Look.MEMORY_LIMIT: _memory_limit,
    Look.NO_NETWORK: _no_network,
    Look.OTHER_CONTAINER: _other_container,
}


PAUSE_S = 0.03
"""Seconds between two observations of the processes."""

GONE_PATIENCE_S = 3.0
"""Seconds to wait for processes to end after an attack."""

SEAL = ("CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Groups")
"""Fields of `/proc/PID/status` that show a process's rights."""


class Watch:
    """Observes processes in a background thread while its `with` block runs.

    `find` returns the ids of the processes to observe.
    """

    def __init__(self, find: Callable[[], list[int]]) -> None:
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most = 0
        """The largest number of processes seen at once."""
        self._sightings: dict[int, list[dict[str, str]]] = {}

    @property
    def seals(self) -> list[dict[str, str]]:
        """The last observed rights of each process: the fields of `/proc/PID/status` that the
        constant `SEAL` names. A process that was seen only once is left out, because it may have
        just started.
        """
        return [seen[-1] for seen in self._sightings.values() if len(seen) > 1]

    def settled(self, most: int) -> int:
        """Wait until at most `most` processes are left, but no longer than `GONE_PATIENCE_S`
        seconds.

        Return the number of processes left. Blocks the thread.
        """
        deadline = time.monotonic() + GONE_PATIENCE_S
        while (count := len(self._find())) > most and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return count

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(PAUSE_S):
            found = self._find()
            self.most = max(self.most, len(found))
            for pid in found:
                status = status_of(pid)
                if status:
                    sealed = {name: status.get(name, "") for name in SEAL}
                    self._sightings.setdefault(pid, []).append(sealed)


def named(mark: str) -> list[int]:
    """Return the ids of the processes whose name is `mark`, without zombies. Attacking programs
    give their processes this name so that the host can find them.
    """
    found = [one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == mark]
    return [pid for pid in found if not _is_zombie(pid)]


def below(pid: int | None) -> list[int]:
    """Return the ids of a process's descendants, without zombies. Return an empty list if the
    process does not exist.
    """
    if pid is None:
        return []
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in children if not _is_zombie(child.pid)]


def is_sealed(seal: dict[str, str]) -> bool:
    """Return whether a process has no capabilities, `no_new_privs` and a seccomp filter. `seal`
    contains those fields of its `/proc/PID/status` that the constant `SEAL` names.
    """
    nothing = all(set(seal[name]) <= {"0"} for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"))
    return nothing and seal["NoNewPrivs"] == "1" and seal["Seccomp"] == "2"


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of a process's `/proc/PID/status`, or an empty dictionary if the process
    has ended.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def _is_zombie(pid: int) -> bool:
    return status_of(pid).get("State", "Z").startswith(("Z", "X"))
