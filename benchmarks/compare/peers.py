"""Each peer behind the same few methods. A worker runs one peer, with that peer's libraries.

Without `hard`, a peer is what its shortest documented call gives; what could not run without an
option is named in `options`. With `hard`, it has every limit and wall that its documentation
offers for this. Code that a method gets is a Python program; what it prints is the answer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

LIMIT_S = 5
LIMIT_MB = 256
LIMIT_PROCESSES = 64
OWN_LIMIT_S = 20
"""After this a caller gives up on a peer that has no time limit of its own."""


@dataclass
class Answer:
    """What a program printed, and how the peer named an end that is not the program's own."""

    out: str
    said: str = ""


class Unable(Exception):
    """The peer cannot do this. The text says why."""


class Peer:
    """One way to run a program."""

    name = ""
    options = ""
    hard_options = ""
    image = "fumehood-compare/python"
    lacks_pandas = ""
    """Why it cannot run pandas, if so."""

    def __init__(self, hard: bool, image: str = "") -> None:
        self.hard = hard
        self.image = image or self.image

    def version(self) -> str:
        raise NotImplementedError

    def start(self) -> None:
        """Start what stays between calls."""

    def stop(self) -> None:
        """End what `start` began."""

    def run(self, code: str) -> Answer:
        """Run a program for one call."""
        raise NotImplementedError

    def session(self) -> Callable[[str], Answer]:
        """Begin a session; return what runs a program in it."""
        raise Unable("it has no sessions")

    def end_sessions(self) -> None:
        """End all sessions."""


def _program(command: list[str], code: str) -> Answer:
    """Run a command that reads a program. It has no time limit, so its caller's ends it."""
    try:
        done = subprocess.run(
            command, input=code.encode(), capture_output=True, timeout=OWN_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Answer((late.stdout or b"").decode(errors="replace"), "")
    said = f"exit status {done.returncode}" if done.returncode else ""
    return Answer(done.stdout.decode(errors="replace"), said)


def _version(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Fumehood(Peer):
    name = "fumehood"
    options = "the default configuration; a megabyte is fetched by `client.whole`, because an answer has its ends"
    hard_options = f"limits of {LIMIT_S} s and {LIMIT_MB} MB for the call; the rest is its default"

    def version(self) -> str:
        return metadata.version("fumehood")

    def start(self) -> None:
        from fumehood import Client

        self.home = tempfile.mkdtemp(prefix="fh-", dir="/tmp")
        environment = {**os.environ, "FUMEHOOD_HOME": self.home}
        if self.image.endswith("data"):
            environment["FUMEHOOD_CONTAINER__IMAGES__PYTHON"] = "python-data"
        program = Path(os.sys.executable).with_name("fumehood")
        with open(f"{self.home}/log", "wb") as log:
            self.daemon = subprocess.Popen(
                [program, "serve"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.make = lambda: Client(f"{self.home}/engine.sock", connect_timeout_s=30)
        deadline = time.monotonic() + 30
        while not os.path.exists(f"{self.home}/engine.sock"):
            if time.monotonic() > deadline:
                raise Unable("its daemon does not start")
            time.sleep(0.005)
        self.client = self.make()
        self.sessions: list[str] = []

    def stop(self) -> None:
        self.client.close()
        self.daemon.terminate()
        self.daemon.wait(60)
        shutil.rmtree(self.home, ignore_errors=True)

    def run(self, code: str, **options: Any) -> Answer:
        if self.hard:
            options |= {"timeout_seconds": LIMIT_S, "memory_limit_mb": LIMIT_MB}
        envelope = self.client.call("run_python", {"code": code}, **options)
        is_cut = envelope.data.get("truncated", False)
        out = self.client.whole(envelope, "stdout") if is_cut else envelope.data.get("stdout", "")
        return Answer(out, "" if envelope.error is None else envelope.error.code)

    def session(self) -> Callable[[str], Answer]:
        made = self.client.create_session()
        self.sessions.append(made.id)
        return lambda code: self.run(code, session_id=made.id)

    def end_sessions(self) -> None:
        for one in self.sessions:
            self.client.end_session(one)
        self.sessions.clear()


class DockerRun(Peer):
    name = "docker run"
    options = "`docker run --rm -i IMAGE python3 -I -`"
    hard_options = (
        f"`--network none --memory {LIMIT_MB}m --memory-swap {LIMIT_MB}m --pids-limit "
        f"{LIMIT_PROCESSES} --cap-drop ALL --security-opt no-new-privileges --read-only "
        "--tmpfs /tmp:size=64m --user 65534`; it has no time limit, and `timeout` before it is no help: "
        "the program is the container's first process, which a SIGTERM does not end"
    )

    def version(self) -> str:
        return _version("docker", "version", "--format", "{{.Client.Version}}")

    @property
    def flags(self) -> list[str]:
        return self.hard_options.split("`")[1].split() if self.hard else []

    def run(self, code: str) -> Answer:
        entry = ["--entrypoint", "python3", self.image, "-I", "-"]
        return _program(["docker", "run", "--pull=never", "--rm", "-i", *self.flags, *entry], code)


class DockerExec(DockerRun):
    name = "docker exec"
    options = "`docker exec -i CONTAINER python3 -I -` in a container that stays"
    hard_options = "the container has the same as `docker run`; it has no time limit"

    @property
    def flags(self) -> list[str]:
        return DockerRun.hard_options.split("`")[1].split() if self.hard else []

    def start(self) -> None:
        self.made: list[str] = []
        self.shared = self._container()

    def _container(self) -> str:
        command = [
            "docker",
            "run",
            "--pull=never",
            "-d",
            *self.flags,
            "--entrypoint",
            "sleep",
            self.image,
            "infinity",
        ]
        self.made.append(_version(*command))
        return self.made[-1]

    def stop(self) -> None:
        subprocess.run(["docker", "rm", "-f", *self.made], capture_output=True, check=False)

    def run(self, code: str) -> Answer:
        return self._within(self.shared, code)

    def _within(self, container: str, code: str) -> Answer:
        return _program(["docker", "exec", "-i", container, "python3", "-I", "-"], code)

    def session(self) -> Callable[[str], Answer]:
        container = self._container()
        return lambda code: self._within(container, code)


class LlmSandbox(Peer):
    name = "llm-sandbox, Docker"
    options = (
        "`skip_environment_setup=True`, because it installs from the network otherwise; to end a session "
        "it stops the container, whose first process does not end by that, so Docker waits ten seconds"
    )
    hard_options = (
        f"`execution_timeout={LIMIT_S}`; by `runtime_configs` the network, memory, processes, "
        "capabilities and privileges of `docker run`; `read_only` fails, because it copies the program in"
    )
    backend = "docker"

    def version(self) -> str:
        return metadata.version("llm-sandbox")

    def _limits(self) -> dict[str, Any]:
        limits = {
            "network_mode": "none", "mem_limit": f"{LIMIT_MB}m",
            "memswap_limit": f"{LIMIT_MB}m", "pids_limit": LIMIT_PROCESSES,
            "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"],
        }  # fmt: skip
        return {"runtime_configs": limits} if self.hard else {}

    def _time(self) -> dict[str, Any]:
        return {"execution_timeout": LIMIT_S} if self.hard else {}

    def _made(self) -> Any:
        from llm_sandbox import SandboxSession

        return SandboxSession(
            lang="python", image=self.image, skip_environment_setup=True,
            **self._limits(), **self._time(),
        )  # fmt: skip

    def _run(self, session: Any, code: str) -> Answer:
        try:
            done = session.run(code)
        except Exception as error:
            return Answer("", f"{type(error).__name__}")
        return Answer(done.stdout, f"exit status {done.exit_code}" if done.exit_code else "")

    def start(self) -> None:
        self.stack = contextlib.ExitStack()

    def stop(self) -> None:
        self.stack.close()

    def run(self, code: str) -> Answer:
        with self._made() as session:
            return self._run(session, code)

    def session(self) -> Callable[[str], Answer]:
        session = self.stack.enter_context(self._made())
        return lambda code: self._run(session, code)

    def end_sessions(self) -> None:
        self.stack.close()
        self.stack = contextlib.ExitStack()


class LlmSandboxPool(LlmSandbox):
    name = "llm-sandbox, pool"
    options = "`create_pool_manager` with its defaults, `SandboxSession(pool=pool)`"

    def start(self) -> None:
        super().start()
        self.pool: Any = None
        self.starting = threading.Lock()

    def _made(self) -> Any:
        from llm_sandbox import SandboxBackend, SandboxSession
        from llm_sandbox.pool import PoolConfig, create_pool_manager

        with self.starting:
            if self.pool is None:
                self.pool = create_pool_manager(
                    backend=SandboxBackend.DOCKER, config=PoolConfig(), lang="python",
                    image=self.image, skip_environment_setup=True, **self._limits(),
                )  # fmt: skip
        return SandboxSession(lang="python", pool=self.pool, **self._time())

    def stop(self) -> None:
        super().stop()
        if self.pool is not None:
            self.pool.close()


class LlmSandboxBubblewrap(LlmSandbox):
    name = "llm-sandbox, bubblewrap"
    options = "`SandboxBackend.BUBBLEWRAP`"
    lacks_pandas = "it runs the machine's own Python, which has no pandas"
    hard_options = f"`execution_timeout={LIMIT_S}`; it has no limits of memory or processes"

    def _made(self) -> Any:
        from llm_sandbox import SandboxBackend, SandboxSession

        limits = {"execution_timeout": LIMIT_S} if self.hard else {}
        return SandboxSession(
            backend=SandboxBackend.BUBBLEWRAP, lang="python", skip_environment_setup=True, **limits
        )


class SmolagentsLocal(Peer):
    name = "smolagents, local"
    lacks_pandas = "pandas would be imported into the caller's own process"
    options = "`LocalPythonExecutor([])`, in the caller's own process"
    hard_options = f"`timeout_seconds={LIMIT_S}`"

    def version(self) -> str:
        return metadata.version("smolagents")

    def _executor(self) -> Any:
        from smolagents import LocalPythonExecutor

        limits = {"timeout_seconds": LIMIT_S} if self.hard else {}
        made = LocalPythonExecutor([], **limits)
        made.send_tools({})
        return made

    def _run(self, executor: Any, code: str) -> Answer:
        try:
            return Answer(str(executor(code).logs))
        except Exception as error:
            return Answer(str(executor.state.get("_print_outputs", "")), f"{type(error).__name__}")

    def run(self, code: str) -> Answer:
        return self._run(self._executor(), code)

    def session(self) -> Callable[[str], Answer]:
        executor = self._executor()
        return lambda code: self._run(executor, code)


class SmolagentsDocker(Peer):
    name = "smolagents, Docker"
    image = "fumehood-compare/jupyter"
    options = "`DockerExecutor([], logger, build_new_image=False)` on a free port; a new one for a call of its own"
    hard_options = (
        "by `container_run_kwargs` the memory, processes, capabilities and privileges of `docker run`; "
        "its kernel needs the network and its files; it has no time limit"
    )

    def version(self) -> str:
        return metadata.version("smolagents")

    def start(self) -> None:
        self.stack = contextlib.ExitStack()

    def stop(self) -> None:
        self.stack.close()

    @contextlib.contextmanager
    def _executor(self) -> Iterator[Any]:
        from smolagents import DockerExecutor
        from smolagents.monitoring import AgentLogger, LogLevel

        limits: dict[str, Any] = {}
        if self.hard:
            limits = {
                "mem_limit": f"{LIMIT_MB}m", "memswap_limit": f"{LIMIT_MB}m",
                "pids_limit": LIMIT_PROCESSES, "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges"],
            }  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        made = DockerExecutor(
            [], AgentLogger(LogLevel.OFF), port=port, image_name=self.image,
            build_new_image=False, container_run_kwargs=limits,
        )  # fmt: skip
        try:
            yield made
        finally:
            made.cleanup()

    def _run(self, executor: Any, code: str) -> Answer:
        answers: list[Answer] = []

        def wait() -> None:
            try:
                answers.append(Answer(str(executor(code).logs)))
            except Exception as error:
                answers.append(Answer("", type(error).__name__))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(OWN_LIMIT_S)
        return answers[0] if answers else Answer("")

    def run(self, code: str) -> Answer:
        with self._executor() as executor:
            return self._run(executor, code)

    def session(self) -> Callable[[str], Answer]:
        executor = self.stack.enter_context(self._executor())
        return lambda code: self._run(executor, code)

    def end_sessions(self) -> None:
        self.stack.close()


class Sandlock(Peer):
    name = "sandlock"
    lacks_pandas = "it runs the machine's own Python, which has no pandas"
    options = '`Sandbox(fs_readable=["/usr", "/lib", "/lib64"])`, because without it nothing starts'
    hard_options = (
        f"`max_memory`, `max_processes={LIMIT_PROCESSES}`, `clean_env`, a `timeout` of {LIMIT_S} s "
        "for the run"
    )

    def version(self) -> str:
        return metadata.version("sandlock")

    def run(self, code: str) -> Answer:
        import sandlock

        limits: dict[str, Any] = {}
        if self.hard:
            limits = {
                "max_memory": f"{LIMIT_MB}M", "max_processes": LIMIT_PROCESSES, "clean_env": True,
            }  # fmt: skip
        made = sandlock.Sandbox(fs_readable=["/usr", "/lib", "/lib64"], **limits)
        done = made.run(
            ["/usr/bin/python3", "-I", "-c", code], timeout=LIMIT_S if self.hard else None
        )
        reason = "" if done.success else f"{getattr(done.reason, 'name', '') or done.error}"
        if not done.success and reason == "EXITED":
            reason = f"exit status {done.exit_code}"
        return Answer(done.stdout.decode(errors="replace"), reason)


class Bubblewrap(Peer):
    name = "bubblewrap"
    lacks_pandas = "it runs the machine's own Python, which has no pandas"
    options = (
        "`bwrap --ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev "
        "--tmpfs /tmp --unshare-all --die-with-parent --new-session --clearenv /usr/bin/python3 -I -`"
    )
    hard_options = (
        "the same: it has no limits; its own process keeps the environment that `--clearenv` takes from "
        "the program, which reads it in `/proc`"
    )

    def version(self) -> str:
        return _version("bwrap", "--version").split()[-1]

    def run(self, code: str) -> Answer:
        return _program(self.options.strip("`").split(), code)


class Monty(Peer):
    name = "pydantic-monty"
    lacks_pandas = "its subset of Python has no packages"
    options = "`with Monty(max_processes=8) as pool`, because each session keeps one; a checkout for each call; a subset of Python"
    hard_options = f"`max_feed_duration_secs={LIMIT_S}`, `max_memory` of {LIMIT_MB} MB"

    def version(self) -> str:
        return metadata.version("pydantic-monty")

    def start(self) -> None:
        from pydantic_monty import Monty as Pool

        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(Pool(max_processes=8))
        self.sessions = contextlib.ExitStack()

    def stop(self) -> None:
        self.stack.close()

    def _checkout(self) -> Any:
        limits = {"max_feed_duration_secs": LIMIT_S, "max_memory": LIMIT_MB << 20}
        return self.pool.checkout(**({"limits": limits} if self.hard else {}))

    def _run(self, session: Any, code: str) -> Answer:
        parts: list[str] = []
        try:
            session.feed_run(code, print_callback=lambda _, text: parts.append(text))
        except Exception as error:
            return Answer("".join(parts), str(error).split(":")[0] or type(error).__name__)
        return Answer("".join(parts))

    def run(self, code: str) -> Answer:
        with self._checkout() as session:
            return self._run(session, code)

    def session(self) -> Callable[[str], Answer]:
        session = self.sessions.enter_context(self._checkout())
        return lambda code: self._run(session, code)

    def end_sessions(self) -> None:
        self.sessions.close()
        self.sessions = contextlib.ExitStack()


PEERS: dict[str, type[Peer]] = {
    one.name: one
    for one in (
        Fumehood, DockerRun, DockerExec, LlmSandbox, LlmSandboxPool, LlmSandboxBubblewrap, SmolagentsLocal,
        SmolagentsDocker, Sandlock, Bubblewrap, Monty,
    )
}  # fmt: skip
