"""The state in PostgreSQL: one engine at a time writes it, and a standby takes over.

`pytest --state=postgresql` runs the tests of stores on PostgreSQL; here is what SQLite has not.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import anyio
import psycopg
import pytest
from sqlalchemy import (
    Connection,
    TypeDecorator,
    create_engine,
    delete,
    insert,
    make_url,
    select,
    text,
    update,
)

from fumehood import Client, Config, Engine
from fumehood.budgets.settings import BudgetRule
from fumehood.client import ControlClient
from fumehood.core.errors import ResourceNotFound
from fumehood.elsewhere import copying as copying_module
from fumehood.elsewhere import postgres as postgres_module
from fumehood.elsewhere.copying import TABLES, copy_state
from fumehood.elsewhere.postgres import FENCE, PatientConnection, Postgres
from fumehood.http.server import STANDBY_PAUSE_S, STANDBY_RETRY_MS
from fumehood.storage.database import Database, open_database, reading
from fumehood.storage.errors import (
    AuditKeyLost,
    DamagedState,
    ForeignState,
    NewerState,
    ReadUnavailable,
    Standby,
    StoreError,
    WriteFailed,
    WriteUnavailable,
)
from fumehood.storage.schema import CHANGES, META, SESSIONS, STEPS
from fumehood.storage.settings import FileSettings
from support.authority import make_first_approver
from support.network import own_network
from support.postgres import Server, running_postgres, schema_of
from support.s3 import running_s3
from support.wait import DEADLINE_S, wait_until
from tests.conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon, StartDaemon, wait_until_ready

pytestmark = [pytest.mark.needs("postgresql"), pytest.mark.row("B10")]

ROW = {
    "at": "2026-01-01T00:00:00+00:00", "principal_id": "uid:1", "action": "a", "subject": "s",
    "details": {"n": [1, None, "\\x41"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(server: Server, home: Path) -> str:
    """An empty state."""
    return server.state_url(home)


@pytest.fixture
def opened(home: Path, url: str) -> Iterator[Callable[[], Database]]:
    """Open the state as another engine would, with the same keys."""
    all_opened: list[Database] = []

    def open_it() -> Database:
        all_opened.append(open_database(home / "state.db", url=url))
        return all_opened[-1]

    yield open_it
    for database in all_opened:
        database.close()


def add(connection: Connection) -> None:
    connection.execute(insert(CHANGES), ROW)


def subjects(database: Database) -> list[str]:
    return list(database.read_now(lambda c: c.execute(select(CHANGES.c.subject)).scalars().all()))


def sql(url: str, statement: Any) -> Any:
    """Run a statement as another program would; return the first row's first value, if any."""
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        done = connection.execute(statement)
        found = done.scalar() if done.returns_rows else None
    engine.dispose()
    return found


def cut_locks(url: str) -> None:
    """End the connections that hold an advisory lock, as a failover or a timeout would."""
    sql(url, text(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = "
        "(SELECT hashtext(current_schema())::bigint & 4294967295)"
    ))  # fmt: skip


# -- one active engine ----------------------------------------------------------------------


def is_ready(daemon: Daemon) -> bool:
    """Whether it serves. A standby resets the last connections that it took as one."""
    with suppress(OSError, HTTPException):
        return daemon.client().get("/v1/ready").status == 200
    return False


def test_attack_engine_that_lost_its_lock_cannot_write_once_another_is_active(
    opened: Any, url: str
) -> None:
    old = opened()
    old.write_now(add)
    cut_locks(url)
    new = opened()
    for _ in range(2):
        with pytest.raises(WriteUnavailable, match="another engine is active on this state"):
            old.write_now(add)
    assert old.is_fenced
    old.post(lambda connection, rows: add(connection), {})
    old.close()
    new.write_now(add)
    assert subjects(new) == ["s", "s"]


def test_twin_engine_that_lost_its_lock_goes_on_while_no_other_is_active(
    opened: Any, url: str
) -> None:
    database = opened()
    cut_locks(url)
    database.write_now(add)
    assert not database.is_fenced


@pytest.mark.anyio
async def test_fenced_engine_refuses_for_now_what_the_active_one_answers(
    opened: Any, home: Path, url: str
) -> None:
    """Whatever has to be written first: a key, a budget, a change."""
    config = Config(home=home, budgets=(BudgetRule(name="few", calls=1000),))
    old = opened()
    async with Engine(config=config, database=old) as engine:
        cut_locks(url)
        new = opened()
        six = {"expression": "2 * 3"}
        answers = [await engine.call("calculator", six, idempotency_key="k") for _ in range(2)]
        answers.append(await engine.call("calculator", six))
        assert [answer.error and answer.error.code for answer in answers] == [
            "STATE_UNAVAILABLE"
        ] * 3
        assert all(answer.error and answer.error.retryable for answer in answers)
        for refused in (old.check(), old.repeat(lambda c: 0), old.delete(CHANGES.c.seq, [1])):
            with pytest.raises(WriteUnavailable):
                await refused
        assert subjects(old) == []
        async with Engine(config=config, database=new) as active:
            answer = await active.call("calculator", six, idempotency_key="k")
            assert answer.success, answer.error


def test_standby_without_the_audit_key_does_not_start(opened: Any, url: str, home: Path) -> None:
    first = opened()
    first.write_now(lambda c: first.audit.append(c, "made", ROW["at"], {}))
    other = home / "other"
    other.mkdir()
    with pytest.raises(AuditKeyLost):
        open_database(other / "state.db", url=url)
    shutil.copy(home / "audit.key", other)
    with pytest.raises(Standby):
        open_database(other / "state.db", url=url)


def test_server_that_came_back_without_the_last_commit_is_refused(home: Path) -> None:
    """Its data are those of a moment before, as on a replica that is promoted."""
    with running_postgres() as server:
        database = open_database(home / "state.db", url=server.state_url(home))
        database.write_now(add)
        data, before = server.home / "data", server.home / "before"
        server.stop()
        for _ in range(2):
            with pytest.raises(WriteUnavailable, match="connection"):
                database.write_now(add)
        with pytest.raises(ReadUnavailable):
            subjects(database)
        subprocess.run(["cp", "-a", data, before], check=True)
        server.start()
        database.write_now(add)  # a restarted server is used again
        assert subjects(database) == ["s", "s"]
        server.stop()
        shutil.rmtree(data)
        before.rename(data)
        server.start()
        with suppress(WriteUnavailable):
            database.write_now(add)  # it still had the old connection
        with pytest.raises(WriteUnavailable, match="or a commit is missing in it"):
            database.write_now(add)
        assert database.is_fenced
        database.close()


def test_write_whose_connection_is_lost_fails_and_the_next_one_succeeds(
    home: Path, url: str
) -> None:
    """Whether the commit that was cut off took place is not known: both is possible."""
    cut_at = {"before": False, "after": False}

    def hook(moment: str, number: int) -> None:
        if cut_at.pop(moment, False):
            sql(url, text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                          "application_name = 'fumehood' AND state LIKE 'idle%'"))  # fmt: skip

    database = open_database(home / "state.db", commit_hook=hook, url=url)
    try:
        for moment in ("before", "after"):
            cut_at[moment] = True
            if moment == "before":
                with pytest.raises(WriteFailed, match="connection"):
                    database.write_now(add)
            else:
                database.write_now(add)
        with pytest.raises(WriteFailed):
            database.write_now(add)
        database.write_now(add)
        wait_until(lambda: len(_or_none(subjects, database)) == 2)
    finally:
        database.close()


def _or_none(query: Callable[[Database], list[str]], database: Database) -> list[str]:
    try:
        return query(database)
    except StoreError:
        return []


def test_commit_whose_answer_was_lost_is_looked_up(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = opened()
    database.write_now(add)
    commit, lost = psycopg.Connection.commit, []

    def lose_answer(connection: psycopg.Connection) -> None:
        commit(connection)
        if not lost:
            lost.append(True)
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(psycopg.Connection, "commit", lose_answer)
    database.write_now(add)
    assert lost
    database.write_now(add)
    assert subjects(database) == ["s", "s", "s"]


@contextmanager
def read_only(server: Server) -> Iterator[None]:
    """Let all transactions only read, as on a replica."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        connection.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")


def test_database_that_can_only_be_read_refuses_changes_until_it_can_be_written(
    server: Server, opened: Any, home: Path
) -> None:
    database, another = opened(), server.state_url(home / "another")
    database.write_now(add)
    with read_only(server):
        wait_until(lambda: not _is_written(database))
        with pytest.raises(WriteUnavailable, match="read-only transaction"):
            database.write_now(add)
        seen = subjects(database)
        with pytest.raises(StoreError, match=r"cannot be opened: .* read-only transaction"):
            Postgres.open(another)
    wait_until(lambda: _is_written(database))
    assert subjects(database) == [*seen, "s"]


def _is_written(database: Database) -> bool:
    with suppress(WriteUnavailable):
        database.write_now(add)
        return True
    return False


def test_full_database_refuses_changes(opened: Any, url: str) -> None:
    database = opened()
    sql(url, text("""
        CREATE FUNCTION suffer() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
        CREATE CONSTRAINT TRIGGER suffer AFTER INSERT ON changes
            FOR EACH ROW EXECUTE FUNCTION suffer()"""))  # fmt: skip
    with pytest.raises(WriteUnavailable, match="could not extend file"):
        database.write_now(add)
    sql(url, text("DROP TRIGGER suffer ON changes"))
    database.write_now(add)
    assert subjects(database) == ["s"]


@pytest.mark.needs("root")
def test_server_without_room_refuses_changes_and_keeps_what_it_acknowledged(home: Path) -> None:
    """Its directory is a small file system of its own, which other files fill."""

    def add_large(connection: Connection) -> None:
        large = {"subject": str(len(kept)), "details": {"n": secrets.token_hex(10_000)}}
        connection.execute(insert(CHANGES), {**ROW, **large})

    kept: list[str] = []
    with mounted(megabytes=80) as place, running_postgres(place) as server:
        database = open_database(home / "state.db", url=server.state_url(home))
        try:
            with (place / "filler").open("wb") as filler:
                filler.write(bytes(shutil.disk_usage(place).free - (4 << 20)))
            with suppress(WriteUnavailable):
                while len(kept) < 1000:
                    database.write_now(add_large)
                    kept.append(str(len(kept)))
            assert 10 < len(kept) < 1000
            (place / "filler").unlink()
            server.revive()
            wait_until(lambda: _is_written(database))
            found = subjects(database)
            assert set(found) - {"s"} in ({*kept}, {*kept, str(len(kept))})
        finally:
            database.close()


@contextmanager
def mounted(megabytes: int) -> Iterator[Path]:
    """A file system in memory."""
    place = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    options = f"size={megabytes}m,mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


@pytest.mark.anyio
async def test_slow_commits_delay_only_calls_whose_answer_must_be_stored(
    server: Server, home: Path, url: str
) -> None:
    with closing(open_database(home / "state.db", url=url)) as database:
        sql(url, text(SLOW_COMMITS))
        async with Engine(config=Config(home=home), database=database) as engine:
            begun, committed = time.monotonic(), sql(url, select(FENCE.c.commits))
            assert (await engine.call("calculator", {"expression": "6 * 7"})).success
            assert sql(url, select(FENCE.c.commits)) == committed
            for is_repeated in (False, True):
                answer = await engine.call(
                    "calculator", {"expression": "6 * 7"}, idempotency_key="k"
                )
                assert answer.success, answer.error
                assert answer.metadata.idempotent_replay == is_repeated
            assert time.monotonic() - begun > 2
            sql(url, text("DROP TRIGGER slow ON fence"))


SLOW_COMMITS = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON fence DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION slow()"""
"""Each durable commit changes the fence."""


@pytest.mark.anyio
async def test_hung_server_delays_promises_and_a_stop_only_for_a_while(
    server: Server, home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections and bytes, and answers nothing."""
    monkeypatch.setattr(PatientConnection, "answer_s", 0.5)
    monkeypatch.setattr(postgres_module, "CONNECT_S", 2)
    with closing(open_database(home / "state.db", url=url)) as database, ExitStack() as hanging:
        async with Engine(config=Config(home=home), database=database) as engine:

            async def code(**options: Any) -> str | None:
                answer = await engine.call("calculator", {"expression": "6 * 7"}, **options)
                assert answer.error is None or answer.error.retryable
                return answer.error and answer.error.code

            with anyio.fail_after(DEADLINE_S):
                with server.hung():
                    assert await code() is None
                    assert await code(idempotency_key="k") == "STATE_UNAVAILABLE"
                    with pytest.raises(ReadUnavailable):
                        await engine.calls()
                while await code(idempotency_key="k") is not None:
                    await anyio.sleep(0.1)
                hanging.enter_context(server.hung())
        with anyio.fail_after(DEADLINE_S):
            await anyio.to_thread.run_sync(database.close, abandon_on_cancel=True)


@pytest.mark.anyio
@pytest.mark.parametrize("is_shared", [True, False])
async def test_blob_of_the_engine_before_is_found_in_shared_files_only(
    home: Path, url: str, is_shared: bool
) -> None:
    """The next engine has another state directory, with the same audit key."""
    files = FileSettings(url=str(home / "files") if is_shared else None)
    one, two = home / "one", home / "two"
    one.mkdir()
    two.mkdir()
    with closing(open_database(one / "state.db", url=url)) as database:
        config = Config(home=one, files=files)
        async with Engine(config=config, database=database) as engine:
            draft = engine.blobs.draft(engine.owner.id)
            draft.feed(b"kept")
            blob = await engine.blobs.keep(draft, "a.txt", "text/plain")
    shutil.copy(one / "audit.key", two)
    signed = dict(parse_qsl(urlsplit(blob.url).query))
    with closing(open_database(two / "state.db", url=url)) as database:
        config = Config(home=two, files=files)
        async with Engine(config=config, database=database) as engine:
            asked = blob.id, engine.owner.id, signed["expires"], signed["signature"]
            if is_shared:
                _, file = await engine.blobs.open_blob(*asked)
                with file:
                    assert file.read() == b"kept"
            else:
                with pytest.raises(ResourceNotFound):
                    await engine.blobs.open_blob(*asked)


# -- states that cannot be used -------------------------------------------------------------


def test_foreign_newer_or_damaged_state_is_refused_and_stays(
    opened: Any, url: str, home: Path
) -> None:
    def read() -> None:
        with reading(home, url):
            pass

    with pytest.raises(StoreError, match="No engine of this version has started"):
        read()
    sql(url, text("CREATE TABLE theirs (id int)"))
    for use in (opened, read):
        with pytest.raises(ForeignState):
            use()
    sql(url, text("DROP TABLE theirs"))
    for wrong in ("postgres://a@b", "postgresql://a@b", "postgresql://me:se@cret@127.0.0.1/db"):
        with pytest.raises(StoreError, match=r"has the form postgresql://.* as %40"):
            open_database(home / "state.db", url=wrong)
    with pytest.raises(StoreError, match="does not exist"):
        open_database(home / "state.db", url=f"{url}x")
    opened().close()
    sql(url, update(FENCE).values(schema=99))
    for use in (opened, read):
        with pytest.raises(NewerState, match=r"newer engine wrote this state \(schema 99"):
            use()
    sql(url, update(FENCE).values(schema=len(STEPS) - 1))
    with pytest.raises(StoreError, match="No engine of this version has started"):
        read()
    sql(url, delete(FENCE))
    for use in (opened, read):
        with pytest.raises(DamagedState):
            use()


def test_state_that_an_earlier_version_anchored_needs_audit(opened: Any, url: str) -> None:
    def earlier() -> Any:
        sql(url, update(FENCE).values(schema=22))
        sql(url, text("ALTER TABLE sessions DROP COLUMN least_grade"))  # of a later step
        database = opened()
        keys = database.read_now(lambda connection: connection.execute(select(META.c.key)).all())
        database.close()
        return [tuple(row) for row in keys]

    database = opened()
    append, at = database.audit.append, ROW["at"]
    database.write_now(lambda connection: append(connection, "call.ended", at, {}))
    database.close()
    assert earlier() == []
    database = opened()
    database.write_now(lambda connection: append(connection, "audit.anchored", at, {}))
    database.close()
    assert [earlier() for _ in range(2)] == [[("needs.audit",)]] * 2


def test_url_that_leads_nowhere_is_refused_without_showing_it(home: Path) -> None:
    wrong = "postgresql://me:secret@127.0.0.1:1/db"
    started = subprocess.run(
        [FUMEHOOD, "serve", "--home", home, "--state", wrong],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert started.returncode != 0
    assert "Connection refused" in started.stderr
    assert "secret" not in started.stderr


# -- copies ---------------------------------------------------------------------------------


def test_state_is_copied_to_postgresql_and_back(home: Path, url: str) -> None:
    database = open_database(home / "state.db")
    database.write_now(add)
    database.write_now(lambda c: database.audit.append(c, "made", ROW["at"], {"a": "\\ é"}))
    database.close()
    back = home / "back"
    back.mkdir()
    counts = copy_state(str(home), url)
    assert (counts["changes"], counts["audit"]) == (1, 1)
    assert copy_state(url, f"sqlite:///{back}/state.db") == counts
    with reading(home) as one, reading(back) as two:
        for table in TABLES:
            assert one.execute(select(table)).all() == two.execute(select(table)).all()
    database = open_database(home / "state.db", url=url)
    database.write_now(add)  # its number follows those that were copied
    assert len(subjects(database)) == 2
    with pytest.raises(Standby):
        copy_state(str(home), url)
    database.close()

    def is_free() -> bool:  # PostgreSQL returns the lock of an ended connection a moment later
        try:
            copy_state(str(home), url)
        except Standby:
            return False
        return True

    with pytest.raises(StoreError, match="has a state already"):
        wait_until(is_free)
    with pytest.raises(StoreError, match="There is no database"):
        copy_state(str(home / "none"), url)


def test_copy_keeps_nulls_and_replaces_nul_characters_of_early_engines(
    home: Path, url: str
) -> None:
    session = {
        column.name: "2026" if isinstance(column.type, TypeDecorator) else 1
        for column in SESSIONS.columns if not column.nullable
    }  # fmt: skip
    with closing(open_database(home / "state.db")) as database:
        database.write_now(lambda c: c.execute(insert(SESSIONS), session))
        database.write_now(lambda c: c.execute(text("UPDATE sessions SET image = 'a' || char(0)")))
    copy_state(str(home), url)
    with reading(home, url) as connection:
        (row,) = connection.execute(text("SELECT * FROM sessions")).mappings()
        assert [row["home"], row["packages"], row["snapshots"]] == [None] * 3
        found = text("SELECT count(*) FROM sessions WHERE home IS NULL AND snapshots IS NULL")
        assert connection.execute(found).scalar() == 1
        assert row["image"] == "a\ufffd"


def test_copy_is_of_one_moment(
    opened: Any, home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine could become active meanwhile, if the lock is lost."""
    opened().close()
    copy = copying_module._copy

    def change_meanwhile(table: Any, *connections: Connection) -> int:
        count = copy(table, *connections)
        if table is TABLES[0]:
            sql(url, insert(CHANGES).values(ROW))
        return count

    monkeypatch.setattr(copying_module, "_copy", change_meanwhile)
    back = home / "back"
    back.mkdir()
    assert TABLES[0] is not CHANGES
    assert copy_state(url, str(back / "state.db"))["changes"] == 0


def test_text_with_a_nul_is_refused_and_results_with_one_are_kept(
    start_daemon: StartDaemon, home: Path, url: str
) -> None:
    client = start_daemon(home, state__url=url).client()
    refused = client.calculate("2 + 3", idempotency_key="a\0b")
    assert (refused.code, refused.status) == ("INVALID_PARAMS", 400)
    assert client.get("/v1/calls?tool=a%00b").code == "INVALID_PARAMS"
    assert client.get("/v1/calls/a%00b").code == "RESOURCE_NOT_FOUND"
    assert client.call("a%00b").code == "TOOL_NOT_FOUND"
    for _ in range(2):
        kept = client.call("run_restricted_python", {"code": "'a' + chr(0)"}, idempotency_key="k")
        assert kept.body["data"]["value"] == "a\0"
    assert kept.body["metadata"]["idempotent_replay"]
    tools = [call["tool_name"] for call in client.get("/v1/calls").body["data"]["items"]]
    assert sorted(tools)[:1] == ["a\ufffdb"]


# -- daemons --------------------------------------------------------------------------------


def home_of_a_standby(home: Path) -> Path:
    """Another directory with the same audit key."""
    other = home / "other"
    other.mkdir(mode=0o700)
    shutil.copy(home / "audit.key", other)
    return other


def test_standby_refuses_calls_and_takes_over_after_kill_9(
    start_daemon: StartDaemon, home: Path, url: str
) -> None:
    """What the killed engine promised, the standby keeps: the answer of a call with a key, and what
    is in the bucket, to which a standby writes nothing.
    """
    with running_s3() as s3:
        s3.client.create_bucket(Bucket="files")
        _take_over(start_daemon, home, s3, state__url=url, files__url="s3://files/cell")


SHORT: Any = {"max_length": 1000}


def _whole(client: Client, answer: Any) -> str | None:
    """The whole output of a call, or None if it was not kept."""
    with suppress(ValueError):
        return client.whole(answer, "stdout")
    return None


def _take_over(start_daemon: StartDaemon, home: Path, s3: Any, **options: Any) -> None:
    first = start_daemon(home, variables=s3.variables, **options)
    promised = first.client().calculate("2 + 3", idempotency_key="once").body
    arguments = {"code": "print('x' * 60_000)"}
    with Client(first.socket) as client:
        # The engine starts although its bucket has not answered yet, and then keeps nothing at first.
        wait_until(lambda: _whole(client, client.call("run_restricted_python", arguments, **SHORT)))
        answer = client.call("run_restricted_python", arguments, **SHORT)
        events = list(client.stream("run_restricted_python", arguments))
    call_id = events[0].metadata.call_id
    wait_until(lambda: f"cell/spool/{call_id}" in s3.keys("files"))
    other = home_of_a_standby(home)
    kept = s3.keys("files")
    second = start_daemon(other, variables=s3.variables, **options)
    assert second.client().get("/v1/health").status == 200
    ready = second.client().get("/v1/ready")
    assert (ready.status, ready.body["status"]) == (503, "standby")
    refused = second.client().calculate("2 + 3", idempotency_key="once").body
    assert refused["error"]["code"] == "SHUTTING_DOWN"
    assert refused["error"]["retryable"]
    assert refused["error"]["retry_after_ms"] == STANDBY_RETRY_MS
    # A token counts on the active one only: the standby does not know who was revoked.
    token = {"authorization": "Bearer fht_0123456789abcdef_" + "A" * 43}
    assert first.client().request("GET", "/v1/tools", headers=token).code == "UNAUTHORIZED"
    assert second.client().request("GET", "/v1/tools", headers=token).code == "SHUTTING_DOWN"
    assert s3.keys("files") == kept
    first.process.send_signal(signal.SIGKILL)
    wait_until(lambda: is_ready(second))
    replayed = second.client().calculate("2 + 3", idempotency_key="once").body
    assert replayed["data"] == promised["data"]
    assert replayed["metadata"]["idempotent_replay"]
    assert replayed["metadata"]["call_id"] == promised["metadata"]["call_id"]
    with Client(second.socket) as client:
        assert client.whole(answer, "stdout") == "x" * 60_000 + "\n"
        assert [event.id for event in client.follow(call_id)] == [event.id for event in events]
    assert second.stop() == 0


def test_attack_revoked_token_on_an_engine_that_was_replaced_and_is_idle(
    start_daemon: StartDaemon, home: Path, url: str
) -> None:
    """It notices by itself, without a promise to keep. Twin: the token, before that."""
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "FUMEHOOD_STATE__URL": url}
    credential = make_first_approver([str(FUMEHOOD)], environment)
    first = start_daemon(home, state__url=url, drain_seconds="0")
    with ControlClient(first.control, credential=credential) as control:
        made = control.tokens.new("ci", scopes=["call"])
    token = {"authorization": f"Bearer {made.secret}"}
    assert first.client().request("GET", "/v1/tools", headers=token).status == 200
    other = home_of_a_standby(home)
    second = start_daemon(other, state__url=url)
    cut_locks(url)
    wait_until(lambda: is_ready(second))
    assert second.client().request("GET", "/v1/tools", headers=token).status == 200
    with ControlClient(second.control, credential=credential) as control:
        control.tokens.revoke(made.token.id)
    assert second.client().request("GET", "/v1/tools", headers=token).code == "UNAUTHORIZED"
    assert first.process.wait(timeout=DEADLINE_S) == 4  # asked for nothing
    assert '"event":"state.fenced"' in first.log
    assert "Another engine has become active on this state." in first.log


@pytest.mark.needs("root", "docker")  # Docker brings iptables
def test_engine_that_is_cut_off_from_the_database_promises_nothing_while_another_is_active(
    home: Path,
) -> None:
    """Its packets are lost, in both directions, so neither side sees the connection end."""
    homes = [home / "one", home / "two"]
    with own_network() as network, running_postgres(network=network) as server, ExitStack() as both:
        server.state_url(home)
        found = []
        for place, address in zip(homes, ("127.0.0.2", "127.0.0.3"), strict=True):
            place.mkdir(mode=0o700)
            if found:
                shutil.copy(homes[0] / "audit.key", place)
            url = server.url.replace("@/postgres", f"@{address}/postgres").partition("?")[0]
            url += f"?options=-csearch_path%3D{schema_of(home)}"
            environment = {
                **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(place), "FUMEHOOD_STATE__URL": url,
                "FUMEHOOD_DRAIN_SECONDS": "0",
            }  # fmt: skip
            with (place / "log").open("ab") as log:
                process = both.enter_context(subprocess.Popen(
                    [*network.enter, str(FUMEHOOD), "serve"], env=environment, stderr=log, stdout=log
                ))  # fmt: skip
            both.callback(process.kill)
            daemon = Daemon(process, place, environment)
            both.callback(daemon.close_clients)
            found.append(wait_until_ready(daemon))
        first, second = found
        promised = first.client().calculate("2 + 3", idempotency_key="before").body
        assert promised["success"]
        with network.cut("127.0.0.2"):
            with ThreadPoolExecutor() as threads:
                during = threads.submit(first.client().calculate, "2 + 3", idempotency_key="during")
                assert first.client().calculate("2 + 3").body["success"]  # it promises nothing
                wait_until(lambda: is_ready(second))
                assert during.result(timeout=600).code == "STATE_UNAVAILABLE"
            new = second.client().calculate("2 + 3", idempotency_key="during").body
            assert new["success"]
        assert first.process.wait(timeout=600) == 4
        assert '"event":"state.fenced"' in first.log
        for key, told in (("before", promised), ("during", new)):
            again = second.client().calculate("2 + 3", idempotency_key=key).body
            assert again["metadata"]["idempotent_replay"]
            assert again["metadata"]["call_id"] == told["metadata"]["call_id"]


def test_standby_waits_for_a_rotated_key_and_ends_on_a_signal(
    start_daemon: StartDaemon, home: Path, url: str
) -> None:
    first = start_daemon(home, state__url=url)
    other = home_of_a_standby(home)
    second = start_daemon(other, state__url=url)
    (other / "audit.key").rename(other / "kept")  # as after a rotation by the first
    wait_until(lambda: "standby_cannot_take_over" in second.log)
    (other / "kept").rename(other / "audit.key")
    first.process.send_signal(signal.SIGKILL)
    time.sleep(STANDBY_PAUSE_S)
    assert second.stop() == 0


def test_calls_that_need_no_promise_go_on_while_the_database_is_away(
    start_daemon: StartDaemon, home: Path
) -> None:
    """A standby outlives it as well."""
    with running_postgres() as server:
        url = server.state_url(home)
        first = start_daemon(home, state__url=url)
        client = first.client()
        second = start_daemon(home_of_a_standby(home), state__url=url)
        server.stop()
        time.sleep(2 * STANDBY_PAUSE_S)
        assert second.client().get("/v1/ready").body["status"] == "standby"
        assert client.calculate("2 + 3").body["success"]
        for _ in range(2):
            refused = client.calculate("2 + 3", idempotency_key="once").body["error"]
            assert (refused["code"], refused["retryable"]) == ("STATE_UNAVAILABLE", True)
        server.start()

        def is_answered() -> bool:
            """By the first engine, or by the standby if that reached the database before it."""
            try:
                answer = client.calculate("2 + 3", idempotency_key="once").body
            except OSError:
                assert first.process.wait(timeout=DEADLINE_S) == 4
                assert '"event":"state.fenced"' in first.log
                return is_ready(second)
            assert answer["success"] or answer["error"]["retryable"], answer["error"]
            return bool(answer["success"])

        wait_until(is_answered)
        first.stop()
        wait_until(lambda: is_ready(second))
