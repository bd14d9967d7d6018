"""The user ids of sandboxes, and the user namespace of an ordinary user's launcher.

Host side, standard library only. The root of a sandbox is never a user of the host who owns
anything. If the launcher is root, it is a user whom nobody else is. If an ordinary user runs the
launcher, it is one of the subordinate ids (sub-ids) that the host's administrator gave to this
user. The launcher then first enters a user namespace in which it is root. *Source*:
user_namespaces(7), subuid(5).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable

from fumehood.direct import sandbox

FIRST_ID, IDS = 2_000_000_000, 65_536
"""The first user and group id of sandboxes if the launcher is root on the host, and their number.
Neither the ranges that `useradd` gives to users nor those of systemd include them. *Source*:
systemd, UIDS-GIDS.md.
"""

LEAST_IDS = 16_384
"""Minimum number of ids. Programs run as the user 10,001."""

MAPPERS = (("newuidmap", "/etc/subuid"), ("newgidmap", "/etc/subgid"))
"""The programs that map sub-ids into a user namespace, and the files that list the sub-ids."""

NS_GET_PARENT = 0xB702
"""Request to a namespace: return a descriptor of the namespace above it. *Source*: ioctl_ns(2)."""

CAP_SYS_ADMIN = 1 << 21
"""*Source*: <linux/capability.h>."""

PATH = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"
"""Where these programs are searched."""


class NoIds(Exception):
    """There are too few user ids for sandboxes. The message says why."""


def read_sub_ids(path: str, user: int) -> tuple[int, int]:
    """Return the largest range of sub-ids that the file `path` gives to a user: the first id and
    the number of ids. Raises NoIds if no range has `LEAST_IDS` ids.
    """
    names = {str(user)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(user).pw_name)
    found = [(0, 0)]
    for line in _lines(path):
        name, _, rest = line.strip().partition(":")
        first, _, count = rest.partition(":")
        if name in names and first.isdigit() and count.isdigit():
            found.append((int(count), int(first)))
    most, start = max(found)
    if most < LEAST_IDS:
        raise NoIds(f"{path} gives this user {most} subordinate ids, and {LEAST_IDS} are needed")
    return start, min(most, IDS)


def may_make_namespaces() -> bool:
    """Return whether this process may create namespaces without a user namespace of its own. Root
    in a container usually may not.
    """
    fields = (line.split() for line in _lines("/proc/self/status"))
    capabilities = next((int(one[1], 16) for one in fields if one[:1] == ["CapEff:"]), 0)
    return bool(capabilities & CAP_SYS_ADMIN)


def join_user_namespace(pid: int) -> None:
    """Move this process into the user namespace of the launcher that has started the sandbox with
    the first process `pid`. Only there, it can act for the sandbox.

    Raises:
        OSError: the sandbox has ended.
    """
    with contextlib.ExitStack() as undo:

        def kept(descriptor: int) -> int:
            undo.callback(os.close, descriptor)
            return descriptor

        own = os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116 - no pathlib
        # The launcher's is the one directly below ours. A sandbox can have several below it.
        inner = kept(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC))
        while os.fstat(outer := kept(fcntl.ioctl(inner, NS_GET_PARENT))).st_ino != own:
            inner = outer
        sandbox.join(inner, sandbox.CLONE_NEWUSER)
    _become_root()


def enter_user_namespace() -> None:
    """Move this process into a new user namespace in which it is root. It has the user's sub-ids
    there or, if it is root already, the same ids as before. A user without sub-ids has only root
    there.

    Raises:
        NoIds, OSError: this host does not allow it.
    """
    own, pid = (os.geteuid(), os.getegid()), os.getpid()
    map_ids: Callable[[], str]
    if own[0] == 0:
        map_ids = functools.partial(_map_same_ids, pid)
    else:
        try:
            map_ids = functools.partial(_run_all, _commands(pid, own))
        except NoIds:
            map_ids = functools.partial(_map_own_id, pid, own)
    go_r, go_w = os.pipe()
    said_r, said_w = os.pipe()
    helper = os.fork()
    if helper == 0:  # outside, where it may map the ids
        os.close(go_w)
        os.close(said_r)
        if os.read(go_r, 1):
            os.write(said_w, map_ids().encode()[:1000])
        os._exit(0)
    os.close(said_w)
    os.close(go_r)
    try:
        sandbox.enter(sandbox.CLONE_NEWUSER)
        os.write(go_w, b"1")
    finally:
        os.close(go_w)
        fault = os.read(said_r, 1000).decode("utf-8", "replace")
        os.close(said_r)
        os.waitpid(helper, 0)
    if fault:
        raise NoIds(fault)
    _become_root()


def _commands(pid: int, own: tuple[int, int]) -> list[list[str]]:
    """Return the commands that map a user's sub-ids into the user namespace of a process. Raises
    NoIds if a program is missing, or the user has no sub-ids.
    """
    commands = []
    for (program, path), mine in zip(MAPPERS, own, strict=True):
        if shutil.which(program, path=PATH) is None:
            raise NoIds(f"{program} is missing")
        first, count = read_sub_ids(path, own[0])
        commands.append([program, str(pid), *map(str, (0, mine, 1, 1, first, count))])
    return commands


_is_inside = False
"""Whether this process has entered a user namespace."""


def _become_root() -> None:
    global _is_inside
    _is_inside = True
    os.setresgid(0, 0, 0)
    with contextlib.suppress(PermissionError):  # denied where root is the only id
        os.setgroups([])
    os.setresuid(0, 0, 0)


def _map_own_id(pid: int, own: tuple[int, int]) -> str:
    """Give the user namespace of a process only the id 0, which is this user. Return why this
    failed, or "".
    """
    try:
        for file, text in (
            ("setgroups", "deny"), ("uid_map", f"0 {own[0]} 1"), ("gid_map", f"0 {own[1]} 1"),
        ):  # fmt: skip
            with open(f"/proc/{pid}/{file}", "w", encoding="ascii") as opened:  # noqa: PTH123
                opened.write(text)
    except OSError as error:
        return f"the user id cannot be mapped: {error.strerror}"
    return ""


def _map_same_ids(pid: int) -> str:
    """Give the user namespace of a process all ids of this one, with the same numbers. Return why
    this failed, or "".
    """
    try:
        for kind in ("uid", "gid"):
            ranges = [line.split() for line in _lines(f"/proc/self/{kind}_map")]
            text = "".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges)
            with open(f"/proc/{pid}/{kind}_map", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(text)
    except OSError as error:
        return f"the ids cannot be mapped: {error.strerror}"
    return ""


def _run_all(commands: list[list[str]]) -> str:
    """Run the commands. Return why one of them failed, or ""."""
    for command in commands:
        try:
            ended = subprocess.run(  # noqa: S603 - fixed words and numbers
                command, env={"PATH": PATH}, capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"{command[0]} cannot be run: {error.strerror}"
        if ended.returncode != 0:
            return f"{command[0]} failed: {ended.stderr.strip()[-500:]}"
    return ""


def ids_of_sandboxes() -> tuple[int, int]:
    """Return the first user and group id of sandboxes, as this process's user namespace numbers
    them, and their number.

    Raises:
        NoIds: this namespace has too few ids.
    """
    found = [_largest(f"/proc/self/{kind}_map") for kind in ("uid", "gid")]
    first, count = found[0]
    if found[0] != found[1] or count < LEAST_IDS:
        raise NoIds(f"the user namespace has {count} user ids, and {LEAST_IDS} are needed")
    return first, count


def overlay_options() -> str:
    """Return the option of overlayfs that this process's user namespace needs, or ""."""
    is_host = [line.split() for line in _lines("/proc/self/uid_map")] == [_OF_HOST]
    return "" if is_host and not _is_inside else ",userxattr"


_OF_HOST = ["0", "0", "4294967295"]
"""The line of the map of user ids in the host's own user namespace."""


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 - no pathlib
            return lines.readlines()
    except OSError:
        return []


def _largest(path: str) -> tuple[int, int]:
    ranges = [tuple(map(int, line.split())) for line in _lines(path)]
    for inside, _, count in ranges:
        if inside <= FIRST_ID and inside + count >= FIRST_ID + IDS:
            return FIRST_ID, IDS
    # Not the id 0, which is the user who runs the launcher. If other users of a container have the
    # next ids, the upper half.
    free = []
    for inside, _, count in ranges:
        first = max(1, count // 2) if inside == 0 else inside
        free.append((inside + count - first, first))
    count, first = max(free, default=(0, 1))
    return first, min(count, IDS)
