"""The state in a PostgreSQL database, which one engine at a time writes.

Host side. `storage/backend` imports this module, and thereby psycopg, only if the state's URL
begins with `postgres://` or `postgresql://`. A state is one schema of a database: the first in the
connection's `search_path`. An engine that gets the advisory lock becomes the active engine.
Invariants: each commit of the active engine proves, in the same transaction, that no other engine
has become active since and that none of its own commits is missing (as after a failover); a
statement, including a commit, fails after `ANSWER_S` seconds of silence, and its connection is then
closed. The lock alone does not ensure the first invariant, because the lock ends with its
connection, and the engine may not notice. The proof is a row, the fence, with the number of the
active engine's start and the number of its last durable commit. Network timeouts alone do not
ensure the second invariant: they do not detect a stopped server process, or a proxy that only
buffers what it receives.

Raises (when it is imported): StoreError: psycopg is missing.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    NullPool,
    Table,
    bindparam,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from fumehood.storage.backend import READ_THREADS, RawBytes, RemoteBackend
from fumehood.storage.errors import (
    DamagedState,
    Fenced,
    ForeignState,
    NewerState,
    StoreError,
)
from fumehood.storage.schema import METADATA, STEPS, WORDS_INDEX

try:
    import psycopg
    from psycopg.abc import RV, PQGen
    from psycopg.errors import ConnectionTimeout
    from psycopg.pq import TransactionStatus
except ImportError:
    raise StoreError(
        "A state in PostgreSQL needs psycopg: pip install 'PATH_OF_THE_CHECKOUT[postgres]'"
    ) from None

CONNECT_S = 5
"""Time limit in seconds for opening a connection."""

SILENCE_MS = 4000
"""Milliseconds of silence after which a connection counts as lost."""

ANSWER_S = 5.0
"""Seconds of silence after which a statement fails. This time is longer than the server's limit for
waiting for a lock."""

REST_S = 1.0
"""Seconds after a timed-out connection attempt during which further attempts fail at once.
Otherwise, each waiting caller would wait for another timeout."""

LOOK_S = 0.1
"""Seconds between checks of the time limit. *Source*: psycopg's own default."""

LOCK = 0x46554D45
"""First key of the active engine's advisory lock ("FUME"). The second key is a hash of the schema's
name."""

FENCE_WAIT_MS = 4000
"""Maximum milliseconds to wait for a running commit of the previously active engine."""

FENCE = Table(
    "fence",
    MetaData(),
    Column("schema", Integer, nullable=False),
    Column("active", BigInteger, nullable=False),
    Column("commits", BigInteger, nullable=False),
)
"""The fence, a table with one row that proves which engine is active: the number of migrations that
have run, a random number for the active engine's start, and the number of that engine's last
durable commit."""

OUTCOME_S = 5.0
"""Maximum seconds for finding out whether a commit succeeded whose acknowledgement was lost."""

_SEEN = select(FENCE.c.active, FENCE.c.commits)
_SEEN_AND_HELD = _SEEN.with_for_update(read=True)  # so that no other engine can become active now
_MOVE = (
    update(FENCE)
    .where(
        FENCE.c.active == bindparam("own"), FENCE.c.commits.in_(bindparam("known", expanding=True))
    )
    .values(commits=bindparam("new"))
)


AWAY = (OperationalError, InterfaceError, InternalError)
"""Errors after which the same operation may succeed later."""

FENCED = "another engine is active on this state, or a commit is missing in it"


class Postgres(RemoteBackend):
    """The state in a PostgreSQL database, which only one engine at a time can write: the active
    engine.
    """

    def __init__(self, writing: Engine, reading: Engine, lock: Connection, number: int) -> None:
        super().__init__(writing, reading, has_readers=True)
        self._lock = lock
        self._number = number
        self._next = 1
        self._commits = [0]
        """Possible values of the column `commits` in the fence (`FENCE`). After commits with an
        unknown outcome, there are several."""

    @classmethod
    def open(cls, url: str) -> Self | None:
        """Open the state at `url` for this process, as the active engine. Only the active engine
        can write the state. The state is first migrated to the newest schema.

        Return None if another engine is active. Raises StoreError if the state cannot be opened.
        """
        parsed = parse_url(url)
        with _opening():
            lock = _engine(parsed, poolclass=NullPool).connect()
            try:
                if not _take_lock(lock):
                    lock.close()
                    return None
                writing = _engine(parsed, pool_size=1, max_overflow=0)
                try:
                    return cls(writing, _reading_engine(parsed), lock, _activate(writing))
                except BaseException:
                    writing.dispose()
                    raise
            except BaseException:
                lock.close()
                raise

    @classmethod
    def open_to_read(cls, url: str) -> Engine:
        """Return an SQLAlchemy engine that only reads the state at `url`. It can read while a
        fumehood engine writes the state. Raises StoreError.
        """
        engine = _reading_engine(parse_url(url))
        try:
            with _opening(), engine.connect() as connection:
                if _version(connection) != len(STEPS):
                    raise StoreError("No engine of this version has started on this state yet.")
        except BaseException:
            engine.dispose()
            raise
        return engine

    @contextmanager
    def transaction(self, connection: Connection, *, flushed: bool) -> Iterator[None]:
        """Run the block in a transaction. With `flushed`, the commit is durable when the block
        exits.

        Raises:
            Fenced: another engine has become active, or the database has lost a commit.
        """
        number, is_committing = self._next, False
        try:
            with connection.begin():
                if flushed:
                    self._next += 1
                    values = {"own": self._number, "known": self._commits, "new": number}
                    is_ours = connection.execute(_MOVE, values).rowcount == 1
                else:
                    connection.exec_driver_sql("SET LOCAL synchronous_commit TO off")
                    active, commits = connection.execute(_SEEN_AND_HELD).one()
                    is_ours = active == self._number and commits in self._commits
                if not is_ours:
                    raise Fenced(FENCED)
                yield
                if flushed:
                    is_committing = True
                    self._commits = [*self._commits, number]
        except DBAPIError:
            if not (is_committing and self._took_place(number)):
                raise
        if flushed:
            self._commits = [number]

    def _took_place(self, number: int) -> bool:
        """Find out whether the commit `number`, whose acknowledgement was lost, succeeded. Return
        False if the commit failed, or if the outcome is unknown.
        """
        give_up = time.monotonic() + OUTCOME_S
        while time.monotonic() < give_up:
            try:
                with self._lock.engine.connect() as connection, connection.begin():
                    # The row lock makes this wait for a commit that is still in progress.
                    seen = connection.execute(_SEEN_AND_HELD).one()
                    return tuple(seen) == (self._number, number)
            except DBAPIError:
                time.sleep(0.2)
        return False

    def is_in_transaction(self, connection: Connection) -> bool:
        """Return whether `connection` has an open transaction that can still be committed. After an
        error outside a savepoint, a transaction can no longer be committed.
        """
        raw: Any = connection.connection.driver_connection
        return bool(raw.info.transaction_status == TransactionStatus.INTRANS)

    @staticmethod
    def in_words(error: BaseException) -> str:
        """Describe an error without values: return the first line of PostgreSQL's message or, if
        the error comes from elsewhere, the name of the error's type.
        """
        if isinstance(error, Fenced):
            return str(error)
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, psycopg.Error):
            return type(error).__name__
        if cause.diag.message_primary is not None:  # values are in quotes
            return re.sub(r'"[^"]*$|"[^"]*"', '"…"', cause.diag.message_primary)[:200]
        return str(cause).partition("\n")[0][:200]  # a connection's error, which has no values

    def is_unreachable(self, error: BaseException) -> bool:
        """Return whether `error` means that the database cannot be reached or written now, but
        perhaps later.

        This includes Fenced, which means that another engine has become active.
        """
        is_too_much = str(getattr(getattr(error, "orig", None), "sqlstate", "")).startswith("54")
        # After Fenced, the other engine may serve the request.
        return isinstance(error, (*AWAY, Fenced)) and not is_too_much

    def close(self) -> None:
        """Close all connections. Another engine can then become active."""
        super().close()
        with suppress(SQLAlchemyError):  # the server or the connection may be gone
            # The server ends the session of a closed connection only some time later.
            self._lock.exec_driver_sql("SELECT pg_advisory_unlock_all()")
        self._lock.close()
        self._lock.engine.dispose()


@compiles(RawBytes, "postgresql")
def _convert(element: RawBytes, compiler: SQLCompiler, **options: Any) -> str:
    # A cast of the text would read backslashes as escapes.
    return f"convert_to(CAST({compiler.process(element.clauses, **options)} AS TEXT), 'UTF8')"


# -- connections ---------------------------------------------------------------------------


class PatientConnection(psycopg.Connection[Any]):
    """A connection on which a statement fails if the server is silent for more than `answer_s`
    seconds.
    """

    answer_s = ANSWER_S

    def wait(self, gen: PQGen[RV], interval: float = LOOK_S, *others: Any, **more: Any) -> RV:
        """Run the steps of a statement, which `gen` yields, and return the statement's result.
        Raise OperationalError if the server is silent for `answer_s` seconds.
        """
        return super().wait(self._limited(gen), interval, *others, **more)

    def _limited(self, steps: PQGen[RV]) -> PQGen[RV]:
        give_up = time.monotonic() + self.answer_s
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if ready:
                    give_up = time.monotonic() + self.answer_s
                elif time.monotonic() > give_up:
                    self.close()
                    raise psycopg.OperationalError(f"no answer within {self.answer_s:g} s")
                wanted = steps.send(ready)
        except StopIteration as ended:
            result: RV = ended.value
            return result


class Connector:
    """Opens the connections of one pool."""

    def __init__(self) -> None:
        self._rests_until = 0.0

    def connect(
        self, _dialect: Any, _record: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> PatientConnection:
        """Handle SQLAlchemy's event `do_connect`: open a connection, with the `arguments` and
        `options` for psycopg. If opening a connection timed out less than `REST_S` seconds ago,
        raise ConnectionTimeout at once.
        """
        if time.monotonic() < self._rests_until:
            raise ConnectionTimeout("no answer to the last attempt to connect")
        try:
            return PatientConnection.connect(*arguments, **options)
        except ConnectionTimeout:
            self._rests_until = time.monotonic() + REST_S
            raise


# -- opening -------------------------------------------------------------------------------


def parse_url(url: str) -> URL:
    """Parse the URL of the PostgreSQL database that contains the engine's state. Raises StoreError
    if `url` has the wrong form; the error's message contains no part of `url`.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: an invalid port
        parsed = make_url("invalid://")
    is_known = parsed.drivername in ("postgresql", "postgres") and parsed.database
    if not is_known or "@" in f"{parsed.host}{parsed.database}":
        raise StoreError(
            "The URL of the state has the form postgresql://USER@HOST:PORT/DATABASE. Write an @ of "
            "the user or the password as %40."
        )
    return parsed.set(drivername="postgresql+psycopg")


def _engine(url: URL, **pool: Any) -> Engine:
    """Return an SQLAlchemy engine for the database at `url`. `pool` are the arguments of
    `create_engine` that configure the connection pool.

    If one end of a connection disappears, the other end notices this after a few seconds.
    """
    silence_s = SILENCE_MS // 1000
    options = {
        "tcp_user_timeout": SILENCE_MS,
        "tcp_keepalives_idle": silence_s // 2,
        "tcp_keepalives_interval": 1,
        "tcp_keepalives_count": silence_s // 2,
        "idle_in_transaction_session_timeout": SILENCE_MS,
        # Ends an abandoned statement. Unlike statement_timeout, it does not end slow statements.
        "client_connection_check_interval": SILENCE_MS,
        "lock_timeout": FENCE_WAIT_MS,
        "synchronous_commit": "on",
    }
    given = url.query.get("options", "")
    words = [*([given] if isinstance(given, str) else given)]
    words += [f"-c {name}={value}" for name, value in options.items()]
    engine = create_engine(
        url.difference_update_query(["options"]),
        connect_args={
            "connect_timeout": CONNECT_S,
            "application_name": "fumehood",
            "options": " ".join(words),
            "tcp_user_timeout": SILENCE_MS,
            "keepalives_idle": silence_s // 2,
            "keepalives_interval": 1,
            "keepalives_count": silence_s // 2,
        },
        **pool,
    )
    event.listen(engine, "do_connect", Connector().connect)
    return engine


def _reading_engine(url: URL) -> Engine:
    return _engine(
        url,
        pool_size=READ_THREADS,
        max_overflow=0,
        pool_pre_ping=True,  # readers do not know when the server was restarted
        execution_options={"postgresql_readonly": True},
    )


def _take_lock(connection: Connection) -> bool:
    """Try to take the lock that only the active engine of a state holds. The server releases the
    lock when `connection` ends. Return whether the lock was free.
    """
    taken = connection.exec_driver_sql(
        f"SELECT pg_try_advisory_lock({LOCK}, hashtext(current_schema()))"
    ).scalar_one()
    connection.commit()
    if taken is None:
        raise StoreError("The schema that the state's URL names does not exist. Create it.")
    return bool(taken)


def _activate(engine: Engine) -> int:
    """Create or migrate the tables, and make this engine the active one, which alone can write the
    state. Return a new random number that identifies this start of the engine.
    """
    with engine.connect() as connection, connection.begin():
        version = _version(connection)
        if version is None:
            METADATA.create_all(connection)
            connection.exec_driver_sql(WORDS_INDEX)
            FENCE.create(connection)
            version = len(STEPS)
            connection.execute(FENCE.insert().values(schema=version, active=0, commits=0))
        for step in STEPS[version:]:
            step(connection)
        # Random: after a failover that lost this start, a counter would reuse its number.
        number = secrets.randbits(62)
        new = {"schema": len(STEPS), "active": number, "commits": 0}
        connection.execute(update(FENCE).values(new))
    return number


def _version(connection: Connection) -> int | None:
    """Return the schema version of a state, or None if there is no state. Raises NewerState,
    ForeignState or DamagedState if this engine cannot use the state.
    """
    if not inspect(connection).has_table(FENCE.name):
        if inspect(connection).get_table_names():
            raise ForeignState(
                "The database has tables that are not fumehood's. Use an empty database."
            )
        return None
    version: int | None = connection.execute(select(FENCE.c.schema)).scalar()
    if version is None:
        raise DamagedState("The table fence of the state is empty. Restore a copy of it.")
    if version > len(STEPS):
        raise NewerState(
            f"A newer engine wrote this state (schema {version}, this one knows {len(STEPS)}). "
            "Start that one."
        )
    return version


@contextmanager
def _opening() -> Iterator[None]:
    """Convert database errors that are raised in the block to StoreError."""
    try:
        yield
    except DBAPIError as error:
        why = Postgres.in_words(error)
        raise StoreError(f"The state in PostgreSQL cannot be opened: {why}.") from None
