"""`run_python` in a warm container: against Docker's own ways, and against the bare guest.

Everything runs the same program with the same interpreter of the same image, in turn. The bare
guest is the guest of the image, started by hand in namespaces of its own, without Docker, daemon
or limits: what is left when everything that fumehood and Docker add is taken away.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.bench_daemon import MB, Running, bare_client, private_bytes
from benchmarks.line import Line
from fumehood.core.limits import Limits
from fumehood.protocol import framing
from fumehood.protocol.container_frames import run_frames
from fumehood.sandbox.container.spec import ContainerSpec, guest_config
from support.containers import containers_of

PATH = "/v1/tools/run_python/call"
CODE = "total = sum(n * n for n in range(100))\nprint(total)\ntotal"
BODY = json.dumps({"arguments": {"code": CODE}}).encode()
VALUE = 328350

ROUNDS = 15
CALLS_PER_ROUND = 20
WARM_UP = 30
CLIENTS = 8
CALLS_PER_CLIENT = 100
BURST = 200
PACED_CALLS = 100
PACE_S = 0.05
CPU_CALLS = 300
SETTLE_S = 3
"""In which containers that have just started load their images' modules."""

CARRIERS = {"dockerd", "containerd", "containerd-shim-runc-v2"}


def container_lines(daemon: Running) -> Iterator[Line]:
    """Every target of the container wall, as it is configured by default, but those of the soak."""
    image = image_id("python-data")
    call = bare_client(daemon.socket, PATH, BODY)
    for _ in range(WARM_UP):
        check(call())
    yield from processor_time(daemon, call)  # before its container is replaced after 1,000 calls
    yield from against_docker(call, image)
    yield from paced(call)
    yield against_bare_guest(call, image)
    yield throughput(daemon)
    yield burst(daemon)


def small_image_lines(daemon: Running) -> Iterator[Line]:
    """The same program in the image `python`, which nobody has who does not configure it."""
    call = bare_client(daemon.socket, PATH, BODY)
    for _ in range(WARM_UP):
        check(call())
    yield idle_container(daemon)
    call_ms = statistics.median(timed(lambda: check(call())) for _ in range(10 * CALLS_PER_ROUND))
    yield Line("image python: run_python back to back", "–", f"{call_ms * 1e3:.2f} ms", None)


def image_id(name: str) -> str:
    """What an image of ours is called by Docker."""
    return subprocess.run(
        ["docker", "image", "inspect", "--format={{.Id}}", f"fumehood/{name}:latest"],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout.strip()  # fmt: skip


def idle_container(daemon: Running) -> Line:
    """Private memory of the processes of a container that has served and waits."""
    time.sleep(1)
    firsts = [
        psutil.Process(one["State"]["Pid"])
        for one in containers_of(f"fumehood.pid={daemon.process.pid}")
        if one["State"]["Running"]
    ]
    sizes = [private_bytes([one, *one.children(recursive=True)]) / MB for one in firsts]
    largest = max(sizes)
    return Line(
        "image python: idle warm container, private", "≤ 15 MB", f"{largest:.1f} MB", largest <= 15
    )


def paced(call: Callable[[], bytes]) -> Iterator[Line]:
    """The same call with a pause before it, as an agent makes it."""
    taken = []
    for _ in range(PACED_CALLS):
        time.sleep(PACE_S)
        taken.append(timed(lambda: check(call())))
    call_ms = statistics.median(taken) * 1e3
    yield Line(f"run_python paced by {PACE_S * 1e3:.0f} ms", "–", f"{call_ms:.2f} ms", None)


def processor_time(daemon: Running, call: Callable[[], bytes]) -> Iterator[Line]:
    """Of every process that has to do with a call: the daemon's, the container's, and Docker's own,
    which carries the bytes between them.
    """
    time.sleep(SETTLE_S)
    family = [daemon.process, *daemon.guest()]
    inside = [one for first in supervisors() for one in (first, *first.children(recursive=False))]
    carriers = [p for p in psutil.process_iter(["name"]) if p.info["name"] in CARRIERS]
    parts = {"daemon": family, "container": inside, "Docker": carriers}
    before = {process: used_s(process) for group in parts.values() for process in group}
    for _ in range(CPU_CALLS):
        check(call())
    time.sleep(1)  # what is done after an answer belongs to its call
    spent_ms = {
        name: sum(used_s(one) - before[one] for one in group if one.is_running()) * 1e3 / CPU_CALLS
        for name, group in parts.items()
    }
    total_ms = sum(spent_ms.values())
    shown = ", ".join(f"{name} {ms:.1f}" for name, ms in spent_ms.items())
    yield Line(
        "processor time of one run_python, all processes",
        "≤ 10 ms", f"{total_ms:.1f} ms ({shown})", total_ms <= 10,
    )  # fmt: skip


def used_s(process: psutil.Process) -> float:
    """Processor time of a process, and of its children that have ended, of which it heard."""
    return float(sum(process.cpu_times()[:4]))


def supervisors() -> list[psutil.Process]:
    """The first processes of this machine's containers of ours, as the host sees them."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "/opt/fumehood/fumehood/guest" in (process.info["cmdline"] or [])
        and not _is_below_guest(process)
    ]


def _is_below_guest(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and "/opt/fumehood/fumehood/guest" in parent.cmdline()


def against_docker(call: Callable[[], bytes], image: str) -> Iterator[Line]:
    with standing_container(image) as name:
        entry = "--entrypoint=/usr/bin/python3"
        ways = {
            "run": docker("run", "--rm", entry, image),
            "run without a network": docker("run", "--rm", "--network=none", entry, image),
            "exec": docker("exec", name, "/usr/bin/python3"),
        }
        times: dict[str, list[float]] = {what: [] for what in ("call", *ways)}
        for _ in range(ROUNDS):
            for what, way in ways.items():
                times[what].append(timed(way))
            times["call"] += [timed(lambda: check(call())) for _ in range(CALLS_PER_ROUND)]
    middle = {what: statistics.median(taken) * 1e3 for what, taken in times.items()}
    for what, shown, target in (
        ("run", "docker run --rm", None),
        ("run without a network", "docker run --rm --network=none", 60),
        ("exec", "docker exec python3 -c", 12),
    ):
        ratio = middle[what] / middle["call"]
        yield Line(
            f"{shown} / run_python through the daemon, back to back",
            f"≥ {target}" if target else "–",
            f"{ratio:.0f} ({middle[what]:.0f} ms / {middle['call']:.2f} ms)",
            ratio >= target if target else None,
        )


def docker(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        done = subprocess.run(
            ["docker", *arguments, "-c", CODE], capture_output=True, check=True, timeout=60
        )
        if done.stdout.strip() != str(VALUE).encode():
            raise RuntimeError(f"wrong answer: {done.stdout[:200]!r}")

    return run


@contextlib.contextmanager
def standing_container(image: str) -> Iterator[str]:
    """A container that does nothing, for `docker exec`."""
    name = f"fumehood-bench-{time.monotonic_ns()}"
    subprocess.run(
        ["docker", "run", "--detach", "--rm", "--network=none", f"--name={name}",
         "--entrypoint=/usr/bin/python3", image, "-c", "import time; time.sleep(600)"],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    try:
        yield name
    finally:
        subprocess.run(["docker", "kill", name], capture_output=True, timeout=60, check=False)


def against_bare_guest(call: Callable[[], bytes], image: str) -> Line:
    with bare_guest(image) as run:
        for _ in range(WARM_UP):
            run()
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            times[0].extend(timed(run) for _ in range(CALLS_PER_ROUND))
            times[1].extend(timed(lambda: check(call())) for _ in range(CALLS_PER_ROUND))
    bare_ms, call_ms = (statistics.median(taken) * 1e3 for taken in times)
    ratio = call_ms / bare_ms
    return Line(
        "run_python / the same guest driven directly on the host", "≤ 1.5",
        f"{ratio:.2f} ({call_ms:.2f} ms / {bare_ms:.2f} ms)", ratio <= 1.5,
    )  # fmt: skip


MOUNT_AND_RUN = """
set -e
mount -t proc proc "$1/proc"
for place in workspace tmp dev/shm; do
    mkdir -p "$1/$place"
    mount -t tmpfs -o nosuid,nodev,size=64m,nr_inodes=4096,mode=1777 tmpfs "$1/$place"
done
[ -e "$1/dev/null" ] || { mknod -m 666 "$1/dev/null" c 1 3; mknod -m 666 "$1/dev/urandom" c 1 9; }
exec chroot "$1" /usr/bin/python3 -I -S -B -X utf8 /opt/fumehood/fumehood/guest "$2"
"""


@contextlib.contextmanager
def bare_guest(image: str) -> Iterator[Callable[[], None]]:
    """The guest on two pipes, in the image's files; calling it runs one program, reset awaited."""
    root = Path(tempfile.mkdtemp(prefix="fh-bare-", dir="/tmp"))
    made = subprocess.run(
        ["docker", "create", image], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    export = subprocess.Popen(["docker", "export", made], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(root)], stdin=export.stdout, check=True, timeout=120)
    export.wait(timeout=60)
    subprocess.run(["docker", "rm", made], capture_output=True, check=True, timeout=60)
    spec = ContainerSpec(
        name="", image_id="", image_name="", engine_id="", owner_id="", memory_mb=512, cpus=1,
        lifetime_s=600, deadline=0,
    )  # fmt: skip
    guest = subprocess.Popen(
        ["unshare", "--pid", "--mount", "--net", "--ipc", "--fork", "--kill-child", "/bin/sh", "-c",
         MOUNT_AND_RUN, "sh", str(root), json.dumps(guest_config(spec))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert guest.stdin is not None
    assert guest.stdout is not None
    stdin, stdout = guest.stdin, guest.stdout
    decoder = framing.Decoder(1 << 20)
    limits = Limits(30, 30, 512, 1 << 20)
    count = 0

    def await_frame(op: str) -> None:
        while True:
            chunk = stdout.read(1 << 16)
            if not chunk:
                raise RuntimeError("the bare guest ended")
            if any(message["op"] == op for message in decoder.feed(chunk)):
                return

    def run() -> None:
        nonlocal count
        count += 1
        for frame in run_frames(count, "python", {"code": CODE}, limits, thin=True):
            stdin.write(framing.encode(frame))
        await_frame("reset")

    try:
        await_frame("ready")
        yield run
    finally:
        stdin.close()
        guest.wait(timeout=30)
        shutil.rmtree(root, ignore_errors=True)


def throughput(daemon: Running) -> Line:
    with multiprocessing.get_context("spawn").Pool(CLIENTS) as pool:
        pool.map(hammer, [(daemon.socket, 10)] * CLIENTS)
        before = time.perf_counter()
        pool.map(hammer, [(daemon.socket, CALLS_PER_CLIENT)] * CLIENTS)
        seconds = time.perf_counter() - before
    rate = CLIENTS * CALLS_PER_CLIENT / seconds
    return Line(
        f"{CLIENTS} clients, run_python, one trust domain", "≥ 150 calls/s", f"{rate:.0f} calls/s",
        rate >= 150,
    )  # fmt: skip


def hammer(work: tuple[Path, int]) -> None:
    """One client process."""
    path, count = work
    call = bare_client(path, PATH, BODY)
    for _ in range(count):
        check(call())


def burst(daemon: Running) -> Line:
    """All at once, each on a connection of its own."""
    answered: list[bool] = []

    def one() -> None:
        try:
            check(bare_client(daemon.socket, PATH, BODY)())
            answered.append(True)
        except (OSError, RuntimeError):
            answered.append(False)

    threads = [threading.Thread(target=one) for _ in range(BURST)]
    before = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - before
    count = sum(answered)
    return Line(
        f"a burst of {BURST}", "all answered", f"{count} in {seconds:.1f} s", count == BURST
    )


def timed(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def check(answer: bytes) -> None:
    """A benchmark of wrong answers measures nothing."""
    data = json.loads(answer).get("data") or {}
    if data.get("value") != VALUE or data.get("stdout") != f"{VALUE}\n":
        raise RuntimeError(f"wrong answer: {answer[:300]!r}")
