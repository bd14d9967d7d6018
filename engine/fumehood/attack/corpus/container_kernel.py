"""Programs in a container that attack the kernel, or try to gain privileges.

System calls are made by number, without a library in between. A number may not exist under some
runtime; what counts is that nothing is granted.
"""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.attack.attack import (
    Attack,
    Harm,
    Language,
    Look,
    OnGvisor,
    Topic,
    ends,
    raises,
)
from fumehood.attack.corpus.container_floods import MARKED

PYTHON, KERNEL, RIGHTS = Language.PYTHON, Topic.KERNEL, Topic.RIGHTS

GETPID = (39, 172)


def call(numbers: tuple[int, int], *arguments: str) -> str:
    """Return a program that makes one system call and raises the kernel's error.

    `numbers` are the call's numbers on x86-64 and on AArch64.
    """
    called = ", ".join(["number", *arguments])
    return (
        "import ctypes, os, platform, struct\n"
        f"number = {{'x86_64': {numbers[0]}, 'aarch64': {numbers[1]}}}[platform.machine()]\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"result = libc.syscall({called})\n"
        "if result == -1: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        "int(result)"
    )


_CALLS = (
    ("mount", Harm.ESCAPE, "mount a file system", (165, 40),
     ("b'x'", "b'/tmp'", "b'tmpfs'", "0", "0")),
    ("unshare-user", Harm.ESCAPE, "make a user namespace", (272, 97), ("0x10000000",)),
    ("clone-user", Harm.ESCAPE, "start a process in a user namespace", (56, 220),
     ("0x10000011", "0", "0", "0", "0")),
    ("enter-namespace", Harm.ESCAPE, "enter another namespace", (308, 268), ("0", "0")),
    ("trace-supervisor", Harm.INTERNAL_ESC, "trace the guest's first process (ptrace)",
     (101, 117), ("16", "1", "0", "0")),
    ("read-other-memory", Harm.INTERNAL_READ, "read another process's memory", (310, 270),
     ("1", "0", "0", "0", "0", "0")),
    ("steal-descriptor", Harm.INTERNAL_ESC, "steal another process's open file", (438, 438),
     ("3", "0", "0")),
    ("keyring", Harm.LATERAL, "use the kernel's keys (keyctl)", (250, 219), ("0", "-3", "1")),
    ("bpf", Harm.ESCAPE, "load a program into the kernel (bpf)", (321, 280), ("0", "0", "0")),
    ("perf-event", Harm.HOST_LEAK, "count what others do (perf)", (298, 241),
     ("0", "0", "0", "0", "0", "0")),
    # *Source*: isolate 2.6, also of `vsock` in container_host.
    ("io-uring", Harm.ESCAPE, "queue system calls past the filter (io_uring)", (425, 425),
     ("1", "0")),
    ("userfaultfd", Harm.ESCAPE, "hold the kernel in a page fault", (323, 282), ("0",)),
    ("open-by-handle", Harm.ESCAPE, "open a file past the mounts (shocker, 2014)", (304, 265),
     ("0", "0", "0")),
    ("load-module", Harm.ESCAPE, "load a kernel module", (313, 273), ("-1", "b''", "0")),
    ("shared-memory-segment", Harm.LATERAL, "leave shared memory behind (System V)",
     (29, 194), ("0", "4096", "0o1666")),
    ("semaphore-set", Harm.LATERAL, "leave semaphores behind (System V)", (64, 190),
     ("0", "1", "0o1666")),
    ("message-queue", Harm.LATERAL, "leave a message queue (POSIX)", (240, 180),
     ("b'q'", "0o102", "0o600", "0")),
    ("wake-by-child", Harm.INTEGRITY, "have itself woken after its call (clone)", (56, 220),
     ("18", "0", "0", "0", "0")),
    ("wake-by-parent", Harm.INTEGRITY, "have itself woken after its call (prctl)", (157, 167),
     ("1", "18", "0", "0", "0")),
    ("wake-by-file", Harm.INTEGRITY, "have itself woken after its call (F_SETSIG)", (72, 25),
     ("0", "10", "18")),
    ("watch-files", Harm.PEER_DOS, "use up the user's file watches (inotify)", (294, 26), ("0",)),
)  # fmt: skip
_QUICK = {"mount", "trace-supervisor", "bpf"}


def _rows_of_calls() -> Iterator[Attack]:
    for name, harm, tries, numbers, arguments in _CALLS:
        yield Attack(
            name,
            KERNEL,
            harm,
            tries,
            PYTHON,
            code=call(numbers, *arguments),
            expected=raises("PermissionError"),
            twin=call(GETPID),
            is_quick=name in _QUICK,
        )


_DOORS = (
    Attack(
        "wake-by-timer", KERNEL, Harm.INTEGRITY, "have itself woken after its call (timer_create)",
        PYTHON,
        code=call(
            (222, 107), "1", "struct.pack('QiiQ40x', 0, 18, 0, 0)", "ctypes.byref(ctypes.c_int())"
        ),
        expected=raises("OSError"),
        twin="import signal; signal.setitimer(signal.ITIMER_REAL, 100)[0]",
        twin_gives=0.0,
    ),
    Attack(
        "sysrq-trigger", KERNEL, Harm.HOST_DOS, "open the kernel's emergency keys for writing",
        PYTHON,
        code="open('/proc/sysrq-trigger', 'w')",
        expected=raises("FileNotFoundError", "PermissionError", "OSError"),
        twin="len(open('/proc/uptime').read()) > 0",
        twin_gives=True,
    ),
    Attack(
        "kernel-setting", KERNEL, Harm.ESCAPE, "open kernel settings for writing", PYTHON,
        code="""
opened = []
for path in ('/proc/sys/kernel/core_pattern', '/proc/sys/vm/overcommit_memory',
             '/proc/sys/kernel/hostname', '/sys/kernel/uevent_helper'):
    try: open(path, 'w').close(); opened.append(path)
    except OSError: pass
opened
""",
        expected=ends("ok", gives=[]),
        twin="open('/proc/sys/kernel/hostname').read()",
        twin_gives="sandbox\n",
    ),
    Attack(
        "change-cgroup", KERNEL, Harm.HOST_DOS, "open its own limits for writing", PYTHON,
        code="""
import glob
opened = []
for path in glob.glob('/sys/fs/cgroup/**/*.max', recursive=True)[:50] + \\
            glob.glob('/sys/fs/cgroup/**/*limit_in_bytes', recursive=True)[:50]:
    try: open(path, 'r+').close(); opened.append(path)
    except OSError: pass
opened
""",
        expected=ends("ok", gives=[]),
        twin="import os\nos.path.isdir('/sys')",
        twin_gives=True,
    ),
    Attack(
        "chroot", KERNEL, Harm.ESCAPE, "change its root directory", PYTHON,
        code="import os\nos.chroot('/tmp')",
        expected=raises("PermissionError"),
        twin="import os\nos.chdir('/tmp')",
    ),
    Attack(
        "make-device", KERNEL, Harm.ESCAPE, "make a device file of the first disk, and open it",
        PYTHON,
        code="import os\nos.mknod('/tmp/disk', 0o60666, 0x800)\nopen('/tmp/disk', 'rb')",
        expected=raises("PermissionError"),
        twin="import os\nos.mkfifo('/tmp/pipe')",
        on_gvisor=OnGvisor(
            "gVisor lets it be made; its own kernel knows no such device to open.",
            raises("PermissionError", "OSError"),
        ),
    ),
)  # fmt: skip

_RIGHTS = (
    Attack(
        "capabilities", RIGHTS, Harm.ESCAPE, "hold privileges", PYTHON,
        code=MARKED + """
import os, time
lines = [line.strip().partition(':\\t') for line in open('/proc/self/status')]
status = {name: value for name, _, value in lines}
time.sleep(0.4)
[os.getresuid() == os.getresgid() == (10001,) * 3, os.getgroups(),
 sorted({status[name] for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb') if name in status}),
 status['Seccomp']]
""",
        expected=ends("ok", gives=[True, [], ["0" * 16], "2"]),
        twin="import os\nos.getuid() > 0",
        twin_gives=True,
        looks=(Look.SEALED,),
        is_quick=True,
        on_gvisor=OnGvisor(
            "Processes under gVisor are not the host's: its own kernel's word is all there is.",
            not_looked_at=(Look.SEALED,),
        ),
    ),
    Attack(
        "become-root", RIGHTS, Harm.INTERNAL_ESC, "become root", PYTHON,
        code="import os\nos.setresuid(0, 0, 0)",
        expected=raises("PermissionError"),
        twin="import os\nos.setresuid(10001, 10001, 10001)",
        is_quick=True,
    ),
    Attack(
        "join-group", RIGHTS, Harm.INTERNAL_ESC, "join root's group", PYTHON,
        code="import os\nos.setgroups([0])",
        expected=raises("PermissionError"),
        twin="import os\nos.getgroups()",
    ),
    Attack(
        "setuid-programs", RIGHTS, Harm.INTERNAL_ESC,
        "find a program that runs as another user", PYTHON,
        code="""
import os, stat
found = looked = 0
for where, inner, names in os.walk('/'):
    if where == '/': inner[:] = [name for name in inner if name not in ('proc', 'sys')]
    for name in names:
        try: state = os.lstat(os.path.join(where, name))
        except OSError: continue
        looked += 1
        found += stat.S_ISREG(state.st_mode) and bool(state.st_mode & 0o6000)
[found, looked > 500]
""",
        expected=ends("ok", gives=[0, True]),
        twin="import os\nos.access('/usr/bin/python3', os.X_OK)",
        twin_gives=True,
        looks=(Look.LAYER,),
        wall_s=10,
    ),
    Attack(
        "write-outside-workspace", RIGHTS, Harm.INTERNAL_ESC,
        "write outside its own directories", PYTHON,
        code="""
import os
places = ['/', '/etc', '/usr/bin', '/usr/lib', '/opt', '/opt/fumehood', '/var', '/var/tmp', '/run',
          '/home', '/root', '/sys', '/proc', '/boot']
wrote = []
for place in places:
    try: open(os.path.join(place, 'left'), 'w').close(); wrote.append(place)
    except OSError: pass
wrote
""",
        expected=ends("ok", gives=[]),
        twin="wrote = []\nfor place in ('/workspace', '/tmp', '/dev/shm'):\n"
        "    open(f'{place}/left', 'w').close()\n    wrote.append(place)\nlen(wrote)",
        twin_gives=3,
        looks=(Look.LAYER,),
        is_quick=True,
    ),
    Attack(
        "change-the-guest", RIGHTS, Harm.INTERNAL_ESC, "change the guest's own program", PYTHON,
        code="open('/opt/fumehood/fumehood/guest/__main__.py', 'a')",
        expected=raises("PermissionError", "OSError"),
        twin="open('/opt/fumehood/fumehood/guest/__main__.py').close()",
        looks=(Look.LAYER,),
    ),
)  # fmt: skip

ATTACKS = (*_rows_of_calls(), *_DOORS, *_RIGHTS)
