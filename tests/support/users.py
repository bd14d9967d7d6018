"""Real Unix users and groups for a test, and programs that run as them. Root only.

If the interpreter or the checkout is not readable for other users (under /root), the needed
files are linked or copied to a readable place.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import fumehood
import fumehood_tools
from fumehood.sandbox.images.recipe import images_folder
from support.http import Answer
from support.preloaded import Interpreter

NOBODY = 65_534
LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "ensurepip", "site-packages"}

CLIENT = """
import http.client, json, socket, sys
class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(120)
        self.sock.connect(path)
for line in sys.stdin:
    path, method, address, headers, body = json.loads(line)
    connection = Connection("fumehood")
    try:
        connection.request(method, address, body, headers)
        answer = connection.getresponse()
    except OSError as error:
        said = {"errno": error.errno}
    else:
        told = {key.lower(): value for key, value in answer.getheaders()}
        said = {"status": answer.status, "headers": told, "body": json.loads(answer.read())}
    finally:
        connection.close()
    print(json.dumps(said), flush=True)
"""
"""A client program: one request per line, each on its own connection."""


@dataclass(frozen=True)
class User:
    """A Unix user with an account or only a uid."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """The `subprocess` options that run a command as this user without other groups."""
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}


@contextmanager
def accounts(
    prefix: str, groups: list[str], members: dict[str, list[str]]
) -> Iterator[tuple[dict[str, int], dict[str, User]]]:
    """Create groups and users by short names; remove them afterwards."""
    import grp
    import pwd

    with ExitStack() as undo:
        gids = {}
        for group in groups:
            _administer("groupadd", "--system", f"{prefix}-{group}")
            undo.callback(_administer, "groupdel", f"{prefix}-{group}")
            gids[group] = grp.getgrnam(f"{prefix}-{group}").gr_gid
        users = {}
        for short, belongs_to in members.items():
            name = f"{prefix}-{short}"
            more = ["--groups", ",".join(f"{prefix}-{g}" for g in belongs_to)] if belongs_to else []
            _administer(
                "useradd", "--system", "--no-create-home", "--user-group",
                "--shell", "/usr/sbin/nologin", *more, name,
            )  # fmt: skip
            undo.callback(_administer, "userdel", name)
            entry = pwd.getpwnam(name)
            users[short] = User(
                name, entry.pw_uid, entry.pw_gid, tuple(gids[g] for g in belongs_to)
            )
        yield gids, users


def _administer(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, timeout=600)
    assert done.returncode == 0, (command, done.stderr)


@dataclass(frozen=True)
class Installation:
    """An interpreter with the engine, executable by every user."""

    python: Interpreter
    _clients: dict[User, list[subprocess.Popen[str]]] = field(default_factory=dict)
    """Idle client processes per user."""

    @property
    def command(self) -> list[str]:
        """The command `fumehood`."""
        return [self.python, "-m", "fumehood.cli.main"]

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "PYTHONPATH": self.python.import_path, "HOME": "/"}

    def run_as(self, user: User, program: str, stdin: str = "") -> str:
        """Run a standard-library Python program; return its standard output."""
        done = subprocess.run(
            [self.python, "-I", "-S", "-c", program], **user.identity, env={}, cwd="/",
            input=stdin.encode(), capture_output=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def ask_as(
        self,
        user: User,
        socket: Path,
        method: str,
        address: str,
        body: Any = None,
        credential: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | int:
        """Send one request; return the errno if the connection failed."""
        headers = dict(headers or {})
        if credential is not None:
            headers["authorization"] = f"Bearer {credential}"
        if body is not None:
            headers["content-type"] = "application/json"
        raw = None if body is None else json.dumps(body)
        answer = self._ask(user, json.dumps([str(socket), method, address, headers, raw]))
        if "errno" in answer:
            return int(answer["errno"])
        return Answer(answer["status"], answer["headers"], answer["body"])

    def _ask(self, user: User, request: str) -> Any:
        idle = self._clients.setdefault(user, [])
        client = idle.pop() if idle else self._client(user)
        client.stdin.write(f"{request}\n")
        client.stdin.flush()
        answer = json.loads(client.stdout.readline())
        idle.append(client)
        return answer

    def _client(self, user: User) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.python), "-I", "-S", "-c", CLIENT], **user.identity, env={}, cwd="/",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
        )  # fmt: skip

    def close(self) -> None:
        """End the client processes."""
        for client in chain.from_iterable(self._clients.values()):
            with client:
                client.kill()
        self._clients.clear()


def readable_installation(place: Path) -> Installation:
    """This interpreter and engine, from `place` where others cannot read them as they are."""
    packages = [Path(package.__file__ or "").parent for package in (fumehood, fumehood_tools)]
    site = Path(sysconfig.get_path("purelib"))
    import_path = ":".join(map(str, (site, *(path.parent for path in packages))))
    as_it_is = Installation(Interpreter(os.path.realpath(sys.executable), import_path))
    if _everybody_can_use(as_it_is):
        return as_it_is
    for package in packages:
        _share(package, place / "engine" / package.name)
    recipes = place / "engine" / "fumehood" / "sandbox_images"
    if not recipes.exists():  # a checkout keeps them elsewhere
        _share(images_folder(), recipes)
    _share(site, place / "site")
    import_path = f"{place / 'site'}:{place / 'engine'}"
    found = Installation(Interpreter(_shared_python(place), import_path))
    assert _everybody_can_use(found)
    return found


def _everybody_can_use(installation: Installation) -> bool:
    try:
        done = subprocess.run(
            [str(installation.python), "-c", "import fumehood.cli.main, fumehood_tools.calculator, sqlite3"],
            user=NOBODY, group=NOBODY, extra_groups=[], env=installation.environment, cwd="/",
            capture_output=True, timeout=600,
        )  # fmt: skip
    except PermissionError:
        return False
    return done.returncode == 0


def _shared_python(place: Path) -> str:
    """Copy the interpreter to another place; a script tells it the path of its library."""
    base, binary = Path(sys.base_prefix), Path(os.path.realpath(sys.executable))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    _share(base / "lib" / version, place / "python" / "lib" / version)
    for library in (base / "lib").glob("libpython*"):
        _share_file(library, place / "python" / "lib" / library.name)
    (place / "python" / "bin").mkdir(parents=True)
    _share_file(binary, place / "python" / "bin" / "real")
    script = place / "python" / "bin" / "python"
    lib, real = place / "python" / "lib", place / "python" / "bin" / "real"
    # Under the script's own name: what it starts with `sys.executable` comes this way, too.
    script.write_text(
        f'#!/bin/bash\nLD_LIBRARY_PATH="{lib}" exec -a "$0" "{real}" "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    return str(script)


def _share(source: Path, target: Path) -> None:
    for directory, names, files in os.walk(source):
        names[:] = [n for n in names if n not in LEFT_OUT or "fumehood" in directory]
        here = target / Path(directory).relative_to(source)
        here.mkdir(parents=True)
        for name in files:
            _share_file(Path(directory, name), here / name)


def _share_file(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if others cannot read it or it is on another disk."""
    if source.stat().st_mode & stat.S_IROTH:
        try:
            os.link(source, target)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
