"""Fixtures for all tests: a real daemon, a raw HTTP client on its socket, an engine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from fumehood import Config, Engine
from fumehood.direct.cgroups import missing_controllers
from fumehood.direct.host import why_unfit
from fumehood.docker.api import Docker, DockerError, open_docker
from fumehood.image_store.store import open_store
from fumehood.images.build import build_image
from fumehood.sandbox.container.disks import Disks
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import read_recipe
from support.checked_once import check_once
from support.containers import ENGINE, remove_containers_of, remove_late_containers
from support.definition_files import DefinitionDirectory, definition_directory
from support.health import DAEMONS
from support.http import SocketClient
from support.left import Made
from support.postgres import SERVER, programs, running_postgres, use_postgres
from support.preloaded import PYTHON, commands, start_from_preloaded
from support.session_changes import raise_impossible_changes
from support.wait import wait_until
from upstream import Upstream, running_upstream

# Thousands of tests are collected, and almost nothing of that is garbage: a third of the time.
gc.set_threshold(50_000)

# Property tests never measure time, and leave no files behind. `make fuzz` gives them more examples.
settings.register_profile(
    "fumehood", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow],
    max_examples=40,
)  # fmt: skip
settings.register_profile("fuzz", settings.get_profile("fumehood"), max_examples=1000)
settings.load_profile("fumehood")

MADE = Made()
"""What is to be gone at the end."""

FUMEHOOD = Path(sys.executable).with_name("fumehood")
NPM = Path(sys.prefix) / "npm" / "node_modules" / ".bin"
CHROMIUM = Path(shutil.which("chromium-headless-shell") or "/usr/bin/chromium")
AXE = NPM.parent / "axe-core" / "axe.min.js"
FRAMEWORKS = Path(sys.executable).parents[1] / "frameworks" / "bin" / "python"
FRAMEWORKS_MCP1 = FRAMEWORKS.parents[2] / "frameworks-mcp1" / "bin" / "python"
GENERATORS = FRAMEWORKS.parents[2] / "generators" / "bin"
"""Of the environments that `make frameworks` makes."""

CLEAN_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": os.environ.get("HOME", "/"),
    "LANG": "C.UTF-8",
    # Most tests are of something else: no daemon of theirs makes a container ahead.
    "FUMEHOOD_CONTAINER__POOL_MIN": "0",
    # The smallest image, and the same for everything, unless a test asks for another.
    "FUMEHOOD_CONTAINER__IMAGES__PYTHON": "python",
    "FUMEHOOD_CONTAINER__IMAGES__SHELL": "python",
    "FUMEHOOD_CONTAINER__IMAGES__JAVASCRIPT": "python",
    "FUMEHOOD_SESSIONS__IMAGE": "python",
    # No next daemon continues most tests' sessions.
    "FUMEHOOD_SESSIONS__ORPHAN_SECONDS": "60",
}


def shell_path() -> str:
    """A `PATH` for shells and programs that start `fumehood`."""
    return f"{commands(str(FUMEHOOD))}:{FUMEHOOD.parent}:{os.environ['PATH']}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold-start",
        action="store_true",
        help="Start every command from nothing, and not from a process with its modules loaded.",
    )
    parser.addoption(
        "--soak", action="store_true", help="Also run the tests that only the soak test runs."
    )
    parser.addoption(
        "--engine",
        choices=["docker", "direct"],
        default="docker",
        help="What runs the containers of the tests' engines; without tests of Docker itself.",
    )
    parser.addoption(
        "--state",
        choices=["sqlite", "postgresql"],
        default="sqlite",
        help="Where the tests' own engines keep their state; without those marked as SQLite's.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start commands from a process that has their modules loaded."""
    raise_impossible_changes(setattr)
    if not config.getoption("--cold-start"):
        subprocess.Popen = start_from_preloaded(str(FUMEHOOD))  # type: ignore[misc]
        MADE.watch(setattr)
    if config.getoption("--engine") == "direct":
        os.environ[ENGINE] = CLEAN_ENVIRONMENT[ENGINE] = "direct"
    if config.getoption("--state") == "postgresql":
        if SERVER not in os.environ:
            server = running_postgres()
            os.environ[SERVER] = server.__enter__().url
            config.add_cleanup(lambda: server.__exit__(None, None, None))
        use_postgres(setattr, os.environ[SERVER])


TOGETHER = {
    "tests/acceptance/test_approval*.py": "site",
    "tests/acceptance/test_audit.py": "site",
    "tests/acceptance/test_decisions.py": "site",
    "tests/acceptance/test_repeats.py": "site",
    "tests/integration/test_*image*.py": "images",
}
"""Files that share what is expensive to make, or would disturb each other."""

APART = ("tests/integration/test_frameworks.py", "tests/integration/test_deleted_parts.py")
"""Each of their tests makes what it needs, and takes as long as a file of others."""

LONGEST = (
    *APART,
    "tests/integration/test_cluster.py",
    "tests/integration/test_image_contents.py",  # with all that are of images
    "tests/integration/test_crash_approval.py",
    "tests/acceptance/test_documentation.py",
    "tests/integration/test_container_wall.py",
    "tests/integration/test_mcp_servers.py",
    "tests/integration/test_sessions.py",
    "tests/integration/test_packaging.py",
    "tests/integration/test_resumed_streams.py",
    "tests/acceptance/test_approval.py",  # with all that share its site
    "tests/acceptance/test_workshop.py",
)
"""They begin first: else a worker would be left alone with one of them at the end."""


class FilesOnWorkers(LoadScopeScheduling):
    """A worker takes whole files, in the order of the command line, so that each module's fixtures
    are made once. (`--dist=loadgroup` does nothing with pytest 9.2: pytest-xdist #1386.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in APART:
            return nodeid
        return next((name for glob, name in TOGETHER.items() if fnmatch(file, glob)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesOnWorkers:
    return FilesOnWorkers(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, and else as they were given."""
    if config.getoption("--state") == "postgresql":
        items[:] = [item for item in items if item.get_closest_marker("sqlite") is None]
    if not config.getoption("--soak"):
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collection_finish() -> None:
    """Let no garbage collection look at all tests again: each would take a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs something this host lacks; in CI it fails."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if not AVAILABLE[name]():
                skip_or_fail(f"this host has no {name}")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test with the reason. With CI=true in the environment it fails instead."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true", pytrace=False)
    pytest.skip(reason)


@cache
def has_landlock() -> bool:
    """Whether the running kernel restricts who asks for it."""
    create_ruleset, ask_for_version = 444, 1
    version = ctypes.CDLL(None, use_errno=True).syscall(create_ruleset, 0, 0, ask_for_version)
    return version > 0


def is_root_with_users() -> bool:
    """Whether users can be made, and become somebody else."""
    return os.geteuid() == 0 and all(map(shutil.which, ("useradd", "groupadd")))


def has_disks() -> bool:
    """Whether this host can make disks for sessions."""
    return Disks(Path(tempfile.gettempdir()), Docker({})).why_none() is None


def has_systemd_analyze() -> bool:
    """Whether unit files can be checked; systemd need not run."""
    return shutil.which("systemd-analyze") is not None


def has_node() -> bool:
    """Whether JavaScript can be run on the host."""
    return shutil.which("node") is not None


@cache
def docker_runtimes() -> frozenset[str]:
    """What a usable engine can run containers with; empty where none answers."""
    try:
        client = open_docker()
    except DockerError:
        return frozenset()
    with contextlib.closing(client):
        return frozenset(client.info()["Runtimes"])


def has_docker() -> bool:
    """Whether an engine answers; a `docker` program in the path would say nothing."""
    return bool(docker_runtimes())


def has_runsc() -> bool:
    """Whether gVisor is registered with the engine that answers."""
    return "runsc" in docker_runtimes()


def has_npm_programs() -> bool:
    """Whether `scripts/npm-programs` has installed the programs of others that tests talk to."""
    return (NPM / "mcp-inspector").exists() and (NPM / "openapi-typescript").exists()


def has_browser() -> bool:
    """Whether pages can be driven in Chromium, and looked at by axe."""
    return CHROMIUM.exists() and AXE.exists()


def has_ipv6() -> bool:
    """Whether somebody can listen on `::1`."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def has_direct() -> bool:
    """Whether sandboxes with all limits can be started without Docker, and images for them be
    built.
    """
    is_fit = os.geteuid() == 0 and why_unfit(None) is None and not missing_controllers()
    return is_fit and shutil.which("mmdebstrap") is not None


def has_subordinate_ids() -> bool:
    """Whether users can be made who have subordinate ids."""
    return is_root_with_users() and all(map(shutil.which, ("newuidmap", "newgidmap")))


AVAILABLE = {
    "curl": lambda: shutil.which("curl") is not None,
    "direct": has_direct,
    "docker": has_docker,
    "ipv6": has_ipv6,
    "runsc": has_runsc,
    "landlock": has_landlock,
    "postgresql": lambda: programs() is not None,
    "root": is_root_with_users,
    "subids": has_subordinate_ids,
    "python-of-images": lambda: sys.version_info[:2] == (3, 11),
    "systemd": has_systemd_analyze,
    "disks": has_disks,
    "node": has_node,
    "npm": has_npm_programs,
    "browser": has_browser,
    "generators": lambda: (GENERATORS / "openapi-python-client").exists(),
    "frameworks": lambda: FRAMEWORKS.exists() and FRAMEWORKS_MCP1.exists(),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open_by_module() -> Iterator[None]:
    """Collect all garbage at the end of a module: what its fixtures left open is reported there.
    What survives is the session's, and no later collection looks at it again.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_open(nothing_left_open_by_module: None) -> Iterator[None]:
    """Collect a test's garbage at its end. A socket or a file that it did not close fails this test
    and not another one, which runs when the collector happens to come. Only young objects: a full
    collection would take as long as many a test. Pytest keeps the frames of a test that failed, and
    what they hold, until the next one runs.
    """
    yield
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # anyio's own task waits for the next test: to clear its frame would end it.
            if not str(frame.f_globals.get("__name__")).startswith("anyio."):
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()
            frame.f_locals  # noqa: B018  # a copy, which is brought up to date
        error = error.__cause__ or error.__context__
    gc.collect(1)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_on_the_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test that kills an engine, or leaves a session to the next one, sweeps: `home` and
    `tmp_path` do. All other engines leave nothing.
    """
    MADE.directories.append(str(tmp_path_factory.getbasetemp()))
    yield
    remove_containers_of(tmp_path_factory.getbasetemp())
    remove_late_containers()
    left = [*MADE.left()]
    assert not left, left


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def checked_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        check_once(patch.setattr)
        yield


@pytest.fixture
def collected() -> Iterator[None]:
    """What the collector warns of is collected within the test that it belongs to."""
    yield
    gc.collect()


@pytest.fixture
def home() -> Iterator[Path]:
    """A private state directory with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    yield directory
    remove_containers_of(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def definitions() -> Iterator[DefinitionDirectory]:
    """A directory that an engine's `tools_directory` can name."""
    with definition_directory() as directory:
        yield directory


@dataclass
class Daemon:
    """A running `fumehood serve`."""

    process: subprocess.Popen[bytes]
    home: Path
    environment: dict[str, str]
    credential: str = ""
    """The first approver's, where one was made."""
    clients: list[SocketClient] = field(default_factory=list)

    @property
    def control(self) -> Path:
        return self.home / "control.sock"

    @property
    def socket(self) -> Path:
        return self.home / "engine.sock"

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(encoding="utf-8")

    def client(self) -> SocketClient:
        """A connection of its own, which is closed with the daemon."""
        self.clients.append(SocketClient(self.socket))
        return self.clients[-1]

    def close_clients(self) -> None:
        for client in self.clients:
            client.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=600)
        self.close_clients()
        return self.process.returncode


StartDaemon = Callable[..., Daemon]


def launch(
    directory: Path,
    variables: Mapping[str, str] | None = None,
    *,
    module: str | None = None,
    **settings: str,
) -> Daemon:
    """Start a daemon in a private directory, or a module of `tests` that serves as one. It may not
    answer yet.
    """
    environment = {**CLEAN_ENVIRONMENT, **(variables or {}), "FUMEHOOD_HOME": str(directory)}
    environment |= {f"FUMEHOOD_{key.upper()}": value for key, value in settings.items()}
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(FUMEHOOD), "serve"] if module is None else [PYTHON, "-m", module],
            env=environment
            if module is None
            else {**environment, "PYTHONPATH": str(Path(__file__).parent)},
            cwd=None if module is None else directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    daemon = Daemon(process, directory, environment)
    DAEMONS[:] = [one for one in DAEMONS if one[0].poll() is None]
    DAEMONS.append((process, daemon.socket))
    return daemon


def wait_until_ready(daemon: Daemon) -> Daemon:
    """The daemon, once it answers."""
    process = daemon.process
    wait_until(lambda: process.poll() is not None or SocketClient.answers(daemon.socket))
    assert process.poll() is None, daemon.log
    return daemon


def make_first_approver(directory: Path) -> str:
    """The credential of the first approver of a new state directory."""
    made = subprocess.run(
        [str(FUMEHOOD), "approvers", "init"],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(directory)},
        capture_output=True, timeout=600, check=True,
    )  # fmt: skip
    return made.stdout.decode().strip()


@pytest.fixture
def start_daemon(home: Path) -> Iterator[StartDaemon]:
    """Start daemons; all are stopped at the end of the test."""
    started: list[Daemon] = []

    def start(
        directory: Path = home,
        *,
        ready: bool = True,
        variables: Mapping[str, str] | None = None,
        **settings: str,
    ) -> Daemon:
        daemon = launch(directory, variables, **settings)
        started.append(daemon)
        if ready:
            wait_until_ready(daemon)
        return daemon

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait(timeout=600)
        daemon.close_clients()


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon for tests that do not change it."""
    with running_daemon() as daemon:
        yield daemon


@contextlib.contextmanager
def running_daemon(
    variables: Mapping[str, str] | None = None, *, approver: bool = False, **settings: str
) -> Iterator[Daemon]:
    """A daemon in a directory of its own, for the tests of a module."""
    directory = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    credential = make_first_approver(directory) if approver else ""
    daemon = wait_until_ready(launch(directory, variables, **settings))
    daemon.credential = credential
    try:
        yield daemon
    finally:
        status = daemon.stop()
    assert status == 0, daemon.log
    remove_containers_of(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def administered_daemon() -> Iterator[Daemon]:
    """One daemon with an approver; tests give what they make names of their own."""
    with running_daemon(approver=True) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def python_image() -> Image:
    """The image `python` as this engine builds it; built now where it is not there."""
    return ready_image("python")


@cache
def ready_image(name: str) -> Image:
    """An image of ours as this engine builds it; built now where it is not there."""
    with contextlib.closing(open_store(Config())) as store:
        return build_image(store, read_recipe(name), print).image


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    """A service for REST tools, which answers as it is told."""
    with running_upstream() as running:
        yield running


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[SocketClient]:
    connected = shared_daemon.client()
    yield connected
    connected.close()


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[Engine]:
    """An embedded engine with the real interpreter."""
    async with Engine(config=Config(home=home)) as running:
        yield running
