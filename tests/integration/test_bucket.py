"""Files in a bucket: shared by an active engine and a standby, bounded, and refused while away."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Client, Config, Refused
from fumehood.core.errors import ResourceNotFound
from fumehood.elsewhere import bucket as bucket_module
from fumehood.elsewhere.bucket import Bucket
from fumehood.elsewhere.bucket import Client as BucketClient
from fumehood.storage.blobs import BLOB_ID, Blob, BlobStore, NotKept
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import FilesAway, StoreError, WriteFailed
from fumehood.storage.files import Directory, Files, Missing, SavedFiles
from fumehood.streams.recordings import Record, RecordedCall, RecordingStore
from support.blobs import OWNER, read_blob
from support.s3 import S3, running_s3, silent_server
from tests.conftest import StartDaemon

pytestmark = [pytest.mark.anyio, pytest.mark.row("B10", "E6")]

KB = 1024
DEADLINE_S = 1
"""Seconds; long enough to make a client on a busy machine."""

OURS = f"blob_{'a' * 32}"
CALL = f"call_{'1' * 24}"


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    """A server to which the environment leads."""
    with running_s3() as server, pytest.MonkeyPatch.context() as patch:
        for variable, value in server.variables.items():
            patch.setenv(variable, value)
        yield server


@pytest.fixture(scope="module")
def client(server: S3) -> BucketClient:
    return BucketClient()


@pytest.fixture
def name(server: S3, request: pytest.FixtureRequest) -> str:
    """An empty bucket."""
    name = f"b{abs(hash(request.node.name))}"
    server.client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def bucket(client: BucketClient, name: str) -> Bucket:
    return replace(Bucket.at(f"s3://{name}/our/files"), client=client)


@pytest.fixture
def database() -> Iterator[Database]:
    database = open_database(None)
    yield database
    database.close()


@pytest.fixture
def home_of(home: Path) -> Callable[[str], Path]:
    """The state directory of one of several engines."""

    def made(engine: str) -> Path:
        (home / engine).mkdir(mode=0o700, exist_ok=True)
        return home / engine

    return made


def now() -> datetime:
    return datetime.now(UTC)


@asynccontextmanager
async def blobs_of(
    state: Path, database: Database, bucket: Bucket, *, max_bytes: int = 100 * KB
) -> AsyncIterator[BlobStore]:
    store = BlobStore(database, state, max_bytes=max_bytes, lifetime_s=60, now=now, remote=bucket)
    await store.open()
    try:
        yield store
    finally:
        await anyio.to_thread.run_sync(store.room.close)


@asynccontextmanager
async def recordings_of(
    state: Path, bucket: Bucket, *, max_bytes: int = 1000 * KB
) -> AsyncIterator[RecordingStore]:
    store = RecordingStore(state, max_bytes=max_bytes, kept_s=60, now=now, remote=bucket)
    await store.open()
    try:
        yield store
    finally:
        await store.room.drained()
        await anyio.to_thread.run_sync(store.room.close)


async def keep(store: BlobStore, content: bytes = b"abc") -> Blob:
    draft = store.draft(OWNER)
    draft.feed(content)
    return await store.keep(draft, "a.txt", "text/plain")


def blobs_in(server: S3, name: str) -> set[str]:
    prefix = "our/files/blobs/"
    return {key.removeprefix(prefix) for key in server.keys(name) if key.startswith(prefix)}


# -- the seam -------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, home: Path) -> Files:
    if request.param == "directory":
        (home / "place").mkdir()
        return Directory(home / "place")
    return request.getfixturevalue("bucket").below("pieces", re.compile("[0-9a-f]{4}"))


@pytest.mark.parametrize("size", [0, 20 << 20])
def test_file_is_put_found_read_and_deleted(place: Files, home: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256)
    (home / "draft").write_bytes(content)
    place.put("12ab", home / "draft")
    with place.open("12ab", size) as file:
        assert file.read(10) + file.read(100_000) + file.read() == content
    for name, wrong in (("12ab", size + 1), ("34cd", size)):
        with pytest.raises(FileNotFoundError):
            place.open(name, wrong)
    assert {name: one.size for name, one in place.found("12").items()} == {"12ab": size}
    assert place.found("34") == {}
    place.delete(["12ab", "34cd"])
    assert place.found() == {}


@pytest.mark.parametrize("is_conditional", [True, False])
def test_secret_that_another_engine_writes_meanwhile_is_kept(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, is_conditional: bool
) -> None:
    """Or a request that was given up. Without conditions, both then have what is there."""
    theirs, read, do = b"x" * 32, Bucket._read, BucketClient.do

    def read_then_write(self: Bucket, path: str, start: int, end: int) -> bytes:
        try:
            return read(self, path, start, end)
        except FileNotFoundError:
            monkeypatch.setattr(Bucket, "_read", read)
            do(self.client, "pipe_file", path, theirs)
            raise

    def refuse(self: BucketClient, method: str, *given: Any, **options: Any) -> Any:
        if options.get("mode") == "create" and not is_conditional:
            raise FilesAway("NotImplemented")
        return do(self, method, *given, **options)

    monkeypatch.setattr(Bucket, "_read", read_then_write)
    monkeypatch.setattr(BucketClient, "do", refuse)
    made = bucket.secret("some.key", 32)
    assert (made == theirs) is is_conditional
    assert bucket.secret("some.key", 32) == made


def test_secret_is_made_once(bucket: Bucket, home: Path) -> None:
    for keys in (bucket, Directory(home)):
        made = keys.secret("some.key", 32)
        assert len(made) == 32
        assert keys.secret("some.key", 32) == made
    assert Bucket.at(f"s3://{bucket.path}").secret("some.key", 32) == bucket.secret("some.key", 32)


@pytest.mark.parametrize("attack", ["../blobs.key", f"{OURS}/theirs", f"{OURS}\n", "", ".", "*"])
def test_attack_name_of_another_form_reaches_no_object(
    server: S3, name: str, bucket: Bucket, home: Path, attack: str
) -> None:
    server.put(name, **{"our/files/blobs.key": b"secret", f"our/files/blobs/{OURS}": b"ours"})
    blobs = bucket.below("blobs", BLOB_ID)
    (home / "draft").write_bytes(b"new")
    for reach in (
        lambda: blobs.put(attack, home / "draft"),
        lambda: blobs.open(attack, 6),
        lambda: blobs.delete([attack]),
        lambda: blobs.secret(attack, 6),
    ):
        with pytest.raises(ValueError, match="not the name of a file"):
            reach()
    assert len(server.keys(name)) == 2
    assert blobs.open(OURS, 4).read() == b"ours"  # twin


def test_control_without_the_check_of_names_a_neighbour_is_deleted(
    server: S3, name: str, bucket: Bucket
) -> None:
    server.put(name, **{f"our/files/blobs/{OURS}/theirs": b"x"})
    bucket.below("blobs", re.compile(".*")).delete([f"{OURS}/theirs"])
    assert server.keys(name) == set()


def test_unfinished_upload_does_not_exist(server: S3, name: str, bucket: Bucket) -> None:
    key, blobs = f"our/files/blobs/{OURS}", bucket.below("blobs", BLOB_ID)
    begun = server.client.create_multipart_upload(Bucket=name, Key=key)
    of = {"Bucket": name, "Key": key, "UploadId": begun["UploadId"]}
    part = server.client.upload_part(**of, PartNumber=1, Body=b"half")
    assert blobs.found() == {}
    with pytest.raises(FileNotFoundError):
        blobs.open(OURS, 4)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    server.client.complete_multipart_upload(**of, MultipartUpload=parts)
    assert blobs.open(OURS, 4).read() == b"half"  # twin


def test_bucket_without_s3fs_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError, match=r"pip install .*\[s3\]"):
        Bucket.at("s3://bucket")


@pytest.mark.parametrize(
    ("url", "is_valid"),
    [
        ("s3://bucket", True),
        ("s3://my.bucket-1/some/prefix_1.x", True),
        ("/srv/files", True),
        ("s3://", False),
        ("s3://bucket/", False),
        ("s3://bucket/a/../b", False),
        ("s3://bucket/.x", False),
        ("s3://key:secret@bucket", False),
        ("s3://bucket/a?versionId=1", False),
        ("s3://Bucket", False),
        ("gs://bucket", False),
        ("files", False),
    ],
)
def test_place_of_files_is_a_directory_or_a_bucket(url: str, is_valid: bool) -> None:
    if is_valid:
        config = Config(files={"url": url})
        remote = config.files.remote()
        found = remote.path if isinstance(remote, Bucket) else str(config.files.directory)
        assert found == url.removeprefix("s3://")
    else:
        with pytest.raises(ValueError, match="s3://BUCKET/PREFIX"):
            Config(files={"url": url})


# -- blobs ----------------------------------------------------------------------------------


async def test_next_engine_reads_a_blob_and_deletes_what_has_no_row(
    server: S3, name: str, database: Database, bucket: Bucket, home_of: Callable[[str], Path]
) -> None:
    """Only objects of our form at our place count as ours."""
    content = bytes(range(256)) * 100
    async with blobs_of(home_of("one"), database, bucket) as store:
        blob = await keep(store, content)
        assert not any((home_of("one") / "uploads").iterdir())
    foreign = {
        "our/files/blobs/README": b"x", f"our/files/blobs/{OURS}/x": b"x",
        f"our/files/{OURS}": b"x", f"our/files2/blobs/{OURS}": b"x", f"blobs/{OURS}": b"x",
    }  # fmt: skip
    server.put(name, **foreign, **{f"our/files/blobs/{OURS}": b"left by a crash"})
    async with blobs_of(home_of("two"), database, bucket) as store:
        assert await read_blob(store, blob.url) == content
        assert store.room.share.total == len(content)
    assert server.keys(name) == {*foreign, "our/files/blobs.key", f"our/files/blobs/{blob.id}"}


async def test_blob_is_in_the_bucket_before_its_row_and_is_deleted_without_one(
    server: S3,
    name: str,
    database: Database,
    bucket: Bucket,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: list[set[str]] = []

    async def fail_to_write(job: object) -> None:
        there.append(blobs_in(server, name))
        raise WriteFailed("the disk is full")

    async with blobs_of(home, database, bucket) as store:
        with monkeypatch.context() as patch:
            patch.setattr(database, "write", fail_to_write)
            with pytest.raises(NotKept, match="state cannot be written"):
                await keep(store)
        assert [len(found) for found in there] == [1]
        await store.prune(now())
        assert (blobs_in(server, name), store.room.share.total) == (set(), 0)


async def test_bytes_in_the_bucket_stay_within_the_limit(
    server: S3, name: str, database: Database, bucket: Bucket, home: Path
) -> None:
    async with blobs_of(home, database, bucket, max_bytes=100 * KB) as store:
        kept = [await keep(store, b"%d" % number * 20 * KB) for number in range(5)]
        assert blobs_in(server, name) == {blob.id for blob in kept[-2:]}  # half is its share
        with pytest.raises(ResourceNotFound, match="has expired"):
            await read_blob(store, kept[0].url)
        assert await store.prune(now()) == 3
        assert await store.prune(now() + timedelta(seconds=61)) == 2
        assert (blobs_in(server, name), store.room.share.total) == (set(), 0)


async def test_blob_is_not_kept_if_what_it_replaces_cannot_be_deleted(
    server: S3, name: str, database: Database, bucket: Bucket, home: Path
) -> None:
    """Otherwise the bucket would grow without limit."""
    async with blobs_of(home, database, bucket, max_bytes=100 * KB) as store:
        kept = [await keep(store, b"x" * 40 * KB)]
        policy = (
            '{"Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject",'
            f'"Resource": "arn:aws:s3:::{name}/*"}}]}}'
        )
        server.client.put_bucket_policy(Bucket=name, Policy=policy)
        with pytest.raises(NotKept, match=r"cannot be reached \(.*AccessDenied"):
            await keep(store, b"y" * 40 * KB)
        assert blobs_in(server, name) == {blob.id for blob in kept}
        server.client.delete_bucket_policy(Bucket=name)
        kept = [await keep(store, b"z" * 40 * KB)]
        assert blobs_in(server, name) == {blob.id for blob in kept}


async def test_blob_that_the_bucket_has_lost_is_not_found(
    server: S3, name: str, database: Database, bucket: Bucket, home: Path
) -> None:
    async with blobs_of(home, database, bucket) as store:
        lost, shorter, twin = [await keep(store, b"x" * 9) for _ in range(3)]
        server.client.delete_object(Bucket=name, Key=f"our/files/blobs/{lost.id}")
        server.put(name, **{f"our/files/blobs/{shorter.id}": b"x"})
        for blob in (lost, shorter):
            with pytest.raises(ResourceNotFound, match="has expired"):
                await read_blob(store, blob.url)
        assert await read_blob(store, twin.url) == b"x" * 9


async def test_blobs_are_refused_while_the_bucket_is_away_and_kept_when_it_is_back(
    server: S3,
    name: str,
    database: Database,
    bucket: Bucket,
    home_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by an engine that starts meanwhile."""
    monkeypatch.setattr(bucket_module, "PAUSE_S", 0.0)
    async with blobs_of(home_of("one"), database, bucket) as store:
        blob = await keep(store)
        server.stop()
        try:
            with pytest.raises(NotKept, match=r"files cannot be reached \((no answer|Endpoint)"):
                await keep(store)
            with pytest.raises(FilesAway) as away:
                await read_blob(store, blob.url)
            assert (away.value.code, away.value.may_retry) == ("STATE_UNAVAILABLE", True)
            assert str(server.port) not in str(away.value)
            with pytest.raises(FilesAway):
                await store.prune(now() + timedelta(seconds=61))
            next_store = BlobStore(
                database, home_of("two"), max_bytes=KB, lifetime_s=60, now=now, remote=bucket
            )
            with pytest.raises(StoreError, match="cannot be kept"):
                await next_store.open()
            with pytest.raises(FilesAway):
                await read_blob(next_store, blob.url)
            with pytest.raises(NotKept):
                await keep(next_store)
        finally:
            server.start()
        assert next_store.overdue.is_set()
        assert await next_store.prune(now()) == 0
        assert await read_blob(next_store, blob.url) == b"abc"
        assert await read_blob(next_store, (await keep(next_store)).url) == b"abc"
        assert await next_store.prune(now() + timedelta(seconds=61)) == 2
        await anyio.to_thread.run_sync(next_store.room.close)
        new = await keep(store)
        assert blobs_in(server, name) == {new.id}


async def test_bucket_that_never_answers_is_given_up_and_holds_up_nothing_else(
    database: Database, bucket: Bucket, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with blobs_of(home, database, bucket) as store:
        blob = await keep(store)
        with silent_server() as url:
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            silent = replace(bucket, client=BucketClient(DEADLINE_S))
            monkeypatch.setattr(store.room, "remote", silent.below("blobs", BLOB_ID))
            refused: list[str] = []

            async def keep_one() -> None:
                with pytest.raises(NotKept) as why:
                    await keep(store)
                refused.append(str(why.value))

            with anyio.fail_after(120):  # every one waits for the deadline once
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(keep_one)
                    draft = store.draft(OWNER)
                    draft.feed(b"written meanwhile")
                    await store.room.drained()
                    assert draft.fault is None
                    assert refused == []
                    draft.discard()
                with pytest.raises(FilesAway, match="a moment ago"):
                    await read_blob(store, blob.url)
                await keep_one()
            assert "no answer in time" in refused[0]
            assert "a moment ago" in refused[-1]


# -- recordings -----------------------------------------------------------------------------


def begin(store: RecordingStore, call_id: str, *, events: int = 3) -> None:
    recording = store.new(RecordedCall(call_id, OWNER, "run_python", "t"), lambda why: {"m": why})
    for number in range(events):
        recording.record("tool_output", {"n": number})


def end(store: RecordingStore, call_id: str) -> None:
    store._all[call_id].finish("tool_result", b'{"ok":true}')


async def read_recording(
    store: RecordingStore, call_id: str, owner: str = OWNER, after: str | None = None
) -> list[Record] | None:
    await store.fetch(call_id, owner)
    reader = store.find(call_id, owner, after)
    if reader is None:
        return None
    found = []
    with anyio.fail_after(120):
        while records := await reader.read():
            found += records
    reader.close()
    return found


async def test_next_engine_reads_a_recording_of_an_ended_call(
    server: S3, name: str, bucket: Bucket, home_of: Callable[[str], Path]
) -> None:
    running = CALL.replace("1", "2")
    async with recordings_of(home_of("one"), bucket) as store:
        begin(store, CALL)
        begin(store, running)
        end(store, CALL)
        read = await read_recording(store, CALL)
        assert read is not None
        assert [record.kind for record in read] == ["tool_output"] * 3 + ["tool_result"]
        store.room.submit(store._all[running].file.close)  # as the engine's death does
    assert server.keys(name) == {f"our/files/spool/{CALL}"}
    async with recordings_of(home_of("two"), bucket) as store:
        assert await read_recording(store, CALL, "uid:2") is None
        assert await read_recording(store, running) is None
        assert list((home_of("two") / "spool").iterdir()) == []
        assert await read_recording(store, CALL) == read
        assert await read_recording(store, CALL, after=read[1].id) == read[2:]
        assert await read_recording(store, CALL, "uid:2") is None
        size = (home_of("two") / "spool" / CALL).stat().st_size
        assert store.room.share.total == size
    async with recordings_of(home_of("two"), bucket) as store:  # a restart
        assert await read_recording(store, CALL) == read
        assert store.room.share.total == size
        await store.prune(now() + timedelta(seconds=61))
    assert server.keys(name) == set()


async def test_recordings_of_the_engine_before_count_and_are_evicted(
    server: S3, name: str, bucket: Bucket, home_of: Callable[[str], Path]
) -> None:
    calls = [CALL.replace("1", digit) for digit in "123"]
    async with recordings_of(home_of("one"), bucket) as store:
        for call_id in calls[:2]:
            begin(store, call_id, events=100)
            end(store, call_id)
            await read_recording(store, call_id)
        both = store.room.share.total
    async with recordings_of(home_of("two"), bucket, max_bytes=both * 5 // 4) as store:
        assert store.room.share.total == both
        begin(store, calls[2], events=100)
        end(store, calls[2])
        await read_recording(store, calls[2])
        assert store.room.share.total == both
        assert await read_recording(store, calls[0]) is None
    assert server.keys(name) == {f"our/files/spool/{call_id}" for call_id in calls[1:]}


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"call_id":"x"}\n["tool_result",0,{}]\n'])
async def test_invalid_recording_in_the_bucket_is_deleted_when_requested(
    server: S3, name: str, bucket: Bucket, home: Path, content: bytes
) -> None:
    server.put(name, **{f"our/files/spool/{CALL}": content, "our/files/spool/x": content})
    async with recordings_of(home, bucket) as store:
        assert await read_recording(store, CALL) is None
        assert store.room.share.total == 0
        await store.prune(now())
    assert server.keys(name) == {"our/files/spool/x"}


async def test_recording_cannot_be_fetched_while_the_bucket_is_away(
    server: S3, bucket: Bucket, home_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    another = f"call_{2:024x}"
    monkeypatch.setattr(bucket_module, "PAUSE_S", 0.0)
    async with recordings_of(home_of("one"), bucket) as store:
        begin(store, CALL)
        end(store, CALL)
        read = await read_recording(store, CALL)
    async with recordings_of(home_of("two"), bucket) as store:
        server.stop()
        try:
            with pytest.raises(FilesAway):
                await read_recording(store, CALL)
            begin(store, another)  # what runs is recorded as ever
            end(store, another)
            assert len(await read_recording(store, another) or ()) == 4
        finally:
            server.start()
        assert await read_recording(store, CALL) == read


# -- daemons --------------------------------------------------------------------------------


def test_engine_starts_and_calls_tools_while_the_bucket_does_not_answer(
    start_daemon: StartDaemon, server: S3
) -> None:
    with silent_server() as url:
        silent = {**server.variables, "AWS_ENDPOINT_URL": url}
        daemon = start_daemon(variables=silent, files__url="s3://bucket")
        with Client(daemon.socket) as client:
            code = {"code": "print('x' * 60_000)"}
            answer = client.call("run_restricted_python", code, max_length=1000)
            assert answer.data["stdout"].startswith("xxx")
            assert "resource_url" not in answer.data
            assert client.call("calculator", {"expression": "2 + 3"}).success
            with pytest.raises(Refused) as refused:
                client.blob(f"/v1/blobs/{OURS}?expires=9999999999&signature={'0' * 64}")
            assert (refused.value.code, refused.value.retryable) == ("STATE_UNAVAILABLE", True)
        assert "blobs.unavailable" in daemon.log
        assert "no answer" in daemon.log


async def test_saved_workspaces_are_read_back_swept_and_refused_while_the_bucket_is_away(
    server: S3, bucket: Bucket, name: str
) -> None:
    saved = SavedFiles(None, bucket, "sessions")
    session = f"sess_{'a' * 32}"
    contents = {
        f"{session}.{'0' * 8}.{hashlib.sha256(content).hexdigest()}": content
        for content in (b"", b"one", b"x" * (5 << 20))
    }
    sizes = {one: len(content) for one, content in contents.items()}
    await saved.put(contents)
    server.put(name, **{"our/files/sessions/foreign": b"not ours"})
    assert await saved.names(session) == set(contents)
    assert await saved.get(sizes) == contents
    server.put(
        name, **{f"our/files/sessions/{max(sizes, key=sizes.__getitem__)}": b"y" * (5 << 20)}
    )
    with pytest.raises(Missing):
        await saved.get(sizes)
    now = datetime.now(UTC)
    assert await saved.sweep([session], [], now + timedelta(hours=2)) == 0
    assert await saved.sweep([], [], now) == 0
    assert await saved.sweep([], [], now + timedelta(hours=2)) == 3
    assert server.keys(name) == {"our/files/sessions/foreign"}
    server.stop()
    try:
        with pytest.raises(FilesAway):
            await saved.put(contents)
    finally:
        server.start()
    saved.close()
