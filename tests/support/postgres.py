"""A PostgreSQL server for tests, and states of tests in it instead of in SQLite's files."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
from sqlalchemy import Engine, NullPool, create_engine, make_url

from fumehood.elsewhere.postgres import Postgres
from fumehood.storage import database

from .network import Network
from .wait import wait_until

SERVER = "FUMEHOOD_TEST_POSTGRES"
"""Variable with the URL of the server, for the workers of pytest-xdist."""


def programs() -> Path | None:
    """The directory of the newest installed server, as Debian places it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


class Server:
    """A server on a private Unix socket, in a directory of its own; in a network of its own also on
    its loopback.
    """

    def __init__(self, home: Path, network: Network | None = None) -> None:
        self.home = home
        self.url = f"postgresql://fumehood@/postgres?host={home}"
        self._network = network

    def run(self, program: str, *arguments: str) -> None:
        """Run one of its programs as its user: it refuses to run as root."""
        found = programs()
        assert found is not None, "PostgreSQL is not installed"
        become: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(self.home, "postgres")
            become = ["runuser", "-u", "postgres", "--"]
        enter = self._network.enter if self._network is not None else []
        subprocess.run(
            [*enter, *become, str(found / program), "-D", str(self.home / "data"), *arguments],
            check=True, cwd=self.home, stdout=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip

    def start(self) -> None:
        addresses = "" if self._network is None else "*"
        options = f"-k {self.home} -c listen_addresses={addresses}"
        self.run("pg_ctl", "-w", "-l", str(self.home / "log"), "-o", options, "start")

    def stop(self) -> None:
        """Stop it at once, as a crash does."""
        self.run("pg_ctl", "-w", "-m", "immediate", "stop")

    def revive(self) -> None:
        """Start it again, unless it has done so itself after an error that it cannot survive."""
        time.sleep(1)
        with suppress(subprocess.CalledProcessError):
            self.stop()
        self.start()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all of its processes within the context: they accept bytes and answer nothing."""
        first = psutil.Process(int((self.home / "data" / "postmaster.pid").read_text().split()[0]))
        stopped = [first]
        first.suspend()
        for process in first.children():
            process.suspend()
            stopped.append(process)
        try:
            yield
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def state_url(self, path: Path) -> str:
        return state_url(self.url, path)


@contextmanager
def running_postgres(place: Path | None = None, network: Network | None = None) -> Iterator[Server]:
    """A server in a new directory in `place`."""
    home = Path(tempfile.mkdtemp(prefix="fh-pg-", dir=place or "/tmp"))
    server = Server(home, network)
    server.run(
        "initdb", "-A", "trust", "-U", "fumehood", "-E", "UTF8", "--no-sync", "--wal-segsize=1"
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def schema_of(path: Path) -> str:
    """The name of the schema that stands for the file at `path`."""
    return "s" + hashlib.sha256(os.fspath(path.absolute()).encode()).hexdigest()[:20]


def state_url(server: str, path: Path) -> str:
    """The URL of the state that stands for the file at `path`, which is made if it is missing."""
    schema = schema_of(path)
    engine = create_engine(
        make_url(server).set(drivername="postgresql+psycopg"), poolclass=NullPool
    )
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    engine.dispose()
    return f"{server}&options=-csearch_path%3D{schema}"


def chosen() -> dict[str, str]:
    """The variable with the server, if the tests run with `--state=postgresql`."""
    return {SERVER: os.environ[SERVER]} if SERVER in os.environ else {}


COPY = """
DO $$ DECLARE name text; BEGIN
    CREATE SCHEMA {new};
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = '{old}' LOOP
        EXECUTE format('CREATE TABLE {new}.%I (LIKE {old}.%I INCLUDING ALL)', name, name);
        EXECUTE format('INSERT INTO {new}.%I SELECT * FROM {old}.%I', name, name);
    END LOOP;
END $$"""
"""A new table goes on with the sequence of the old one."""


def copy_states(server: str, old: Path, new: Path) -> None:
    """Copy what is committed of the state of a directory: what is left of it if its engine is
    killed now.
    """
    with psycopg.connect(server, autocommit=True) as connection:
        names = {"old": schema_of(old / "state.db"), "new": schema_of(new / "state.db")}
        connection.execute(COPY.format(**names))  # type: ignore[arg-type]


def drop_state(server: str, home: Path) -> None:
    """Delete the state of a directory."""
    with psycopg.connect(server, autocommit=True) as connection:
        name = schema_of(home / "state.db")
        connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")  # type: ignore[arg-type]


@contextmanager
def raw_connection(path: Path) -> Iterator[Any]:
    """A connection to a state past the engine: to the file at `path`, or to what stands for it."""
    if server := chosen().get(SERVER):
        connection: Any = psycopg.connect(state_url(server, path))
    else:
        connection = sqlite3.connect(path)
    with closing(connection), connection:
        yield connection


def use_postgres(put: Callable[[Any, str, Any], None], server: str) -> None:
    """Keep each state of this process in PostgreSQL that would be in a file of SQLite."""

    def open_file(path: Path) -> Postgres:
        found: list[Postgres | None] = []

        def is_free() -> bool:  # the lock of a killed engine is returned a moment later
            found[:] = [Postgres.open(state_url(server, path))]
            return found != [None]

        wait_until(is_free)
        assert found[0] is not None
        return found[0]

    def open_to_read(path: Path) -> Engine:
        return Postgres.open_to_read(state_url(server, path))

    put(database, "open_file", open_file)
    put(database, "open_to_read", open_to_read)
    put(database, "SQLite", Postgres)
