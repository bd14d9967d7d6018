"""A PostgreSQL server for tests, and states of tests in it instead of in SQLite's files."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
from sqlalchemy import Engine, NullPool, create_engine, make_url

from fumehood.storage import database, postgres
from fumehood.storage.errors import Standby

SERVER = "FUMEHOOD_TEST_POSTGRES"
"""Variable with the URL of the server, for the workers of pytest-xdist."""


def programs() -> Path | None:
    """The directory of the newest installed server, as Debian places it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


class Server:
    """A server on a private Unix socket, in a directory of its own."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.url = url

    def run(self, program: str, *arguments: str) -> None:
        """Run one of its programs as its user: it refuses to run as root."""
        found = programs()
        assert found is not None, "PostgreSQL is not installed"
        user = "postgres" if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(self.home, user)
        subprocess.run(
            [str(found / program), "-D", str(self.home / "data"), *arguments],
            check=True, user=user, cwd=self.home, stdout=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip

    def start(self) -> None:
        options = f"-k {self.home} -c listen_addresses="
        self.run("pg_ctl", "-w", "-l", str(self.home / "log"), "-o", options, "start")

    def stop(self) -> None:
        """Stop it at once, as a crash does."""
        self.run("pg_ctl", "-w", "-m", "immediate", "stop")

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
def running_postgres() -> Iterator[Server]:
    home = Path(tempfile.mkdtemp(prefix="fh-pg-", dir="/tmp"))
    server = Server(home, f"postgresql://fumehood@/postgres?host={home}")
    server.run("initdb", "-A", "trust", "-U", "fumehood", "-E", "UTF8", "--no-sync")
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def state_url(server: str, path: Path) -> str:
    """The URL of the state that stands for the file at `path`, which is made if it is missing."""
    schema = "s" + hashlib.sha256(os.fspath(path.absolute()).encode()).hexdigest()[:20]
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

    def open_file(path: Path) -> postgres.Postgres:
        opened = postgres.open_postgres(state_url(server, path))
        if opened is None:
            raise Standby
        return opened

    def open_to_read(path: Path) -> Engine:
        return postgres.open_to_read(state_url(server, path))

    put(database, "open_file", open_file)
    put(database, "open_to_read", open_to_read)
    put(database, "in_words", postgres.in_words)
