"""Programs in a container that attack the host, the Linux kernel, the guest, or later calls.

Programs that flood a resource stop by themselves if the wall fails. Programs make system calls by
number, not through a library function. Some runtimes do not implement every system call: the wall
holds as long as the call grants the program nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.attack.attack import (
    Attack,
    Differs,
    Harm,
    Language,
    Look,
    Topic,
    Value,
    ends,
    raises,
)

PYTHON = Language.PYTHON
NO_SHM = "Without namespaces a program has no /dev/shm."
NO_SOCKETS = "Without a network namespace a program gets no socket but a pair, so no twin connects."
OWN_PAIR = (
    "import socket\none, other = socket.socketpair()\none.sendall(b'own')\nother.recv(3) == b'own'"
)
"""A harmless program for walls that give no other sockets."""

SHARES = "Without namespaces a program is one of the host's processes"

FLOOD, NETWORK, HOST, KERNEL = Topic.FLOOD, Topic.NETWORK, Topic.HOST, Topic.KERNEL
RIGHTS, GUEST, RESET = Topic.RIGHTS, Topic.GUEST, Topic.RESET

# -- resources ---------------------------------------------------------------------------

MARKED = "import ctypes\nctypes.CDLL(None).prctl(15, b'@MARK@', 0, 0, 0)\n"
"""Text of a program that renames its own process, so that the host can find it."""

NOT_THE_HOSTS = "Processes under gVisor are not the host's; that none is left is tried by reset."

_FLOODS = (
    Attack(
        "output-flood", FLOOD, Harm.HOST_DOS, "print endlessly", PYTHON,
        code="for _ in range(500_000): print('x' * 1000)",
        expected=ends("output"),
        twin="print('x' * 1000)",
        is_quick=True,
    ),
    Attack(
        "fork-bomb", FLOOD, Harm.HOST_DOS, "start 300 processes", PYTHON,
        code=MARKED + """
import os, time
for _ in range(300):
    try:
        child = os.fork()
    except BlockingIOError:
        time.sleep(1)  # the host must have time to see the processes
        raise
    if child == 0:
        time.sleep(15)
        os._exit(0)
""",
        expected=raises("BlockingIOError", hits="processes"),
        twin="import os\nif os.fork() == 0: os._exit(0)\nos.wait()\n1",
        looks=(Look.PROCESSES, Look.UNBROKEN),
        is_quick=True,
        on_gvisor=Differs(
            "gVisor counts processes one by one, and each costs threads of the host's: many of "
            "them may end the container, which is memory.",
            ends("exception:BlockingIOError", "memory"),
            not_looked_at=(Look.PROCESSES, Look.UNBROKEN),
            is_slow=True,
        ),
    ),
    Attack(
        "thread-flood", FLOOD, Harm.HOST_DOS, "start 300 threads", PYTHON,
        code="import threading, time\nfor _ in range(300):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        expected=raises("RuntimeError"),
        twin="import threading\none = threading.Thread(target=print)\none.start()\none.join()",
    ),
    Attack(
        "memory-hog", FLOOD, Harm.HOST_DOS, "use three times the memory", PYTHON,
        code="held = []\nfor _ in range(384): held.append(b'x' * (1 << 20))\nlen(held)",
        expected=ends("memory"),
        twin="len(b'x' * (16 << 20))",
        looks=(Look.MEMORY_LIMIT,),
        is_quick=True,
    ),
    Attack(
        "memory-hog-in-grandchildren", FLOOD, Harm.HOST_DOS,
        "use three times the memory in a child's children", PYTHON,
        code="""
import os, time
if os.fork() == 0:
    for _ in range(8):
        if os.fork() == 0:
            held = []
            for _ in range(48): held.append(b'x' * (1 << 20))
            time.sleep(9)
            os._exit(0)
    time.sleep(9)
    os._exit(0)
time.sleep(9)
""",
        expected=ends("memory"),
        twin="import os\nif os.fork() == 0:\n    held = b'x' * (16 << 20)\n    os._exit(0)\n"
        "os.wait()\n1",
        looks=(Look.MEMORY_LIMIT,),
    ),
    Attack(
        "cpu-spin", FLOOD, Harm.HOST_DOS, "compute past the deadline", PYTHON,
        code="import time\nbegan = time.monotonic()\nwhile time.monotonic() - began < 20: pass",
        expected=ends("wall_time"),
        twin="sum(range(1000))",
        wall_s=0.5,
        is_quick=True,
    ),
    Attack(
        "sleep-past-deadline", FLOOD, Harm.PEER_DOS,
        "sleep past the deadline, ignoring signals, with a child in another session", PYTHON,
        code=MARKED + """
import os, signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
if os.fork() == 0:
    os.setsid()
    os.fork()
time.sleep(20)
""",
        expected=ends("wall_time"),
        twin="import time\ntime.sleep(0.01)\n1",
        looks=(Look.PROCESSES, Look.UNBROKEN),
        wall_s=1.5,
        on_gvisor=Differs(NOT_THE_HOSTS, not_looked_at=(Look.PROCESSES,)),
    ),
    Attack(
        "disk-fill", FLOOD, Harm.HOST_DOS, "write 256 MB into the workspace", PYTHON,
        code="for n in range(256):\n"
        "    with open(f'f{n}', 'wb') as file: file.write(bytes(1 << 20))",
        expected=raises("OSError", hits="disk"),
        twin="with open('f', 'wb') as file: file.write(bytes(1 << 20))\n1",
        looks=(Look.LAYER,),
        on_landlock=Differs(
            "Files are watched there and count as memory: the program ends.",
            ends("memory", hits="disk"),
        ),
    ),
    Attack(
        "shared-memory-fill", FLOOD, Harm.HOST_DOS, "write 256 MB into /dev/shm", PYTHON,
        code="with open('/dev/shm/f', 'wb', buffering=0) as file:\n"
        "    for n in range(256):\n        assert file.write(bytes(1 << 20)) == 1 << 20",
        expected=raises("OSError", "AssertionError"),
        twin="with open('/dev/shm/f', 'wb') as file: file.write(bytes(1 << 20))\n1",
        on_landlock=Differs(
            NO_SHM, raises("PermissionError"),
            twin="with open('f', 'wb') as file: file.write(bytes(1 << 20))\n1",
        ),
    ),
    Attack(
        "inode-flood", FLOOD, Harm.HOST_DOS, "make 5000 empty files", PYTHON,
        code="for n in range(5000): open(f'f{n}', 'w').close()",
        expected=raises("OSError", hits="disk"),
        twin="for n in range(50): open(f'f{n}', 'w').close()",
        on_gvisor=Differs(
            "gVisor does not count files; an empty one takes memory of its container only.",
            ends("ok", "memory"),
        ),
        on_landlock=Differs(
            "Files are watched there and count as memory: the program ends.",
            ends("memory", hits="disk"),
        ),
    ),
    Attack(
        "open-file-flood", FLOOD, Harm.HOST_DOS, "hold 2000 open files", PYTHON,
        code="held = [open('/dev/null') for _ in range(2000)]",
        expected=raises("OSError", hits="open_files"),
        twin="held = [open('/dev/null') for _ in range(50)]\nlen(held)",
        twin_gives=50,
    ),
    Attack(
        "file-size", FLOOD, Harm.HOST_DOS, "make a file of a terabyte", PYTHON,
        code="open('big', 'wb').truncate(1 << 40)",
        expected=raises("OSError", hits="file_size"),
        twin="open('small', 'wb').truncate(1 << 20)",
    ),
    Attack(
        "raise-a-limit", FLOOD, Harm.SELF_DOS, "raise its own limit on open files", PYTHON,
        code="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
        expected=raises("ValueError"),
        twin="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    ),
)  # fmt: skip


# -- the host: network, files, environment, processes ------------------------------------

KNOCK = """
import socket
def knock(address, family=socket.AF_INET):
    with socket.socket(family) as caller:
        caller.settimeout(1)
        caller.connect(address)
        caller.sendall(b'@KNOCK@')
    return True
"""
OWN_LISTENER = "listener = socket.create_server(('127.0.0.1', 0))\n"

_HOST = (
    Attack(
        "reach-loopback", NETWORK, Harm.EXFIL, "connect to a listener on the host's loopback",
        PYTHON,
        code=KNOCK + "knock(('127.0.0.1', @PORT@))",
        expected=raises("ConnectionRefusedError"),
        twin=KNOCK + OWN_LISTENER + "knock(listener.getsockname())",
        twin_gives=True,
        looks=(Look.NO_NETWORK,),
        is_quick=True,
        on_landlock=Differs(NO_SOCKETS, raises("PermissionError"), twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "reach-host-addresses", NETWORK, Harm.EXFIL,
        "connect to the host on each of its other addresses", PYTHON,
        code=KNOCK + """
reached = []
for address in @ADDRESSES@:
    try: reached.append(knock((address, @PORT@)))
    except OSError: pass
reached
""",
        expected=ends("ok", gives=[]),
        twin=KNOCK + OWN_LISTENER + "[knock(listener.getsockname())]",
        twin_gives=[True],
        on_landlock=Differs(NO_SOCKETS, twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "reach-abstract-socket", NETWORK, Harm.ESCAPE,
        "connect to an abstract socket of the host", PYTHON,
        code=KNOCK + "knock('\\0@ABSTRACT@', socket.AF_UNIX)",
        expected=raises("ConnectionRefusedError"),
        twin=KNOCK + "listener = socket.socket(socket.AF_UNIX)\nlistener.bind('\\0own')\n"
        "listener.listen()\nknock('\\0own', socket.AF_UNIX)",
        twin_gives=True,
        on_landlock=Differs(NO_SOCKETS, raises("PermissionError"), twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "find-a-route", NETWORK, Harm.EXFIL,
        "find a way to a name server and to the world (nothing is sent)", PYTHON,
        code="""
import socket
servers = ['192.0.2.1']
try:
    with open('/etc/resolv.conf') as lines:
        servers += [line.split()[1] for line in lines if line.startswith('nameserver ')]
except OSError: pass
routes = []
for server in servers:
    if not server.startswith('127.') and ':' not in server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
            try: caller.connect((server, 53)); routes.append(server)
            except OSError: pass
routes
""",
        expected=ends("ok", gives=[]),
        twin="import socket\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))",
        on_landlock=Differs(NO_SOCKETS, raises("PermissionError"), twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "raw-socket", NETWORK, Harm.LATERAL, "send raw packets", PYTHON,
        code="import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_INET).close()",
        on_landlock=Differs(NO_SOCKETS, twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "packet-socket", NETWORK, Harm.LATERAL, "listen on the network interface", PYTHON,
        code="import socket\nsocket.socket(17, socket.SOCK_RAW)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_INET).close()",
        on_landlock=Differs(NO_SOCKETS, twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "netlink", NETWORK, Harm.HOST_LEAK, "ask the kernel about its network", PYTHON,
        code="import socket\nsocket.socket(16, socket.SOCK_RAW)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_UNIX).close()",
        on_landlock=Differs(NO_SOCKETS, twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "vsock", NETWORK, Harm.ESCAPE, "connect to a virtual machine's host", PYTHON,
        code="import socket\nsocket.socket(40, socket.SOCK_STREAM)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_INET).close()",
        on_landlock=Differs(NO_SOCKETS, twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "read-host-file", HOST, Harm.HOST_LEAK, "read a file of the host", PYTHON,
        code="open('@FILE@').read()",
        expected=raises("FileNotFoundError"),
        twin="open('own', 'w').write('own')\nopen('own').read()",
        twin_gives="own",
        is_quick=True,
        on_landlock=Differs(
            f"{SHARES}: the path is there, and Landlock refuses it.", raises("PermissionError")
        ),
    ),
    Attack(
        "host-pressure", HOST, Harm.HOST_LEAK, "read how busy the host is (/proc/pressure)", PYTHON,
        code="open('/proc/pressure/cpu').read()",
        expected=raises("FileNotFoundError"),
        twin="len(open('/proc/self/stat').read()) > 0",
        twin_gives=True,
        is_quick=True,
        on_landlock=Differs(
            f"{SHARES}: the path is there, and Landlock refuses it.", raises("PermissionError")
        ),
    ),
    Attack(
        "host-environment", HOST, Harm.HOST_LEAK,
        "find the host's environment in its own and in every process's", PYTHON,
        code="""
import glob, os
found = [repr(sorted(os.environ.items()))]
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        with open(path, 'rb') as file: found.append(repr(file.read(4096)))
    except OSError: pass
' '.join(found)[:20000]
""",
        expected=ends("ok", gives=Value.SOMETHING),
        twin="import os\nos.environ['OWN'] = 'own'\nos.environ['OWN']",
        twin_gives="own",
        is_quick=True,
    ),
    Attack(
        "host-processes", HOST, Harm.HOST_LEAK, "read the command lines of the host's processes",
        PYTHON,
        code="""
import glob
found = []
for path in glob.glob('/proc/[0-9]*/cmdline'):
    try:
        with open(path, 'rb') as file: found.append(repr(file.read(300)))
    except OSError: pass
' '.join(found)[:20000]
""",
        expected=ends("ok"),
        twin="len(open('/proc/self/cmdline', 'rb').read()) > 0",
        twin_gives=True,
    ),
    Attack(
        "end-host-process", HOST, Harm.HOST_DOS, "end a process of the host", PYTHON,
        code="import os\nos.kill(@PID@, 9)",
        expected=raises("ProcessLookupError", "PermissionError"),
        twin="import os\nos.kill(os.getpid(), 0)",
    ),
    Attack(
        "docker-socket", HOST, Harm.ESCAPE, "find the sockets of Docker and containerd", PYTHON,
        code="""
import socket
paths = ['/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock',
         '/run/podman/podman.sock', '/run/crio/crio.sock']
found = []
for path in paths:
    try: socket.socket(socket.AF_UNIX).connect(path); found.append(path)
    except OSError: pass
found
""",
        expected=ends("ok", gives=[]),
        twin="import socket\nlistener = socket.socket(socket.AF_UNIX)\nlistener.bind('own')\n"
        "listener.listen()\nsocket.socket(socket.AF_UNIX).connect('own')\n1",
        is_quick=True,
        on_landlock=Differs(NO_SOCKETS, twin=OWN_PAIR, twin_gives=True),
    ),
    Attack(
        "host-disks", HOST, Harm.ESCAPE, "find a disk, or memory, of the host among the devices",
        PYTHON,
        code="""
import os, stat
found = []
paths = [f'/dev/{name}' for name in ('mem', 'kmem', 'port', 'kmsg', 'kvm', 'sda', 'vda', 'nvme0n1')]
for where, _, names in os.walk('/dev'):
    paths += [os.path.join(where, name) for name in names]
for path in {*paths}:
    try: kind = os.lstat(path).st_mode
    except OSError: continue
    if stat.S_ISBLK(kind) or path in paths[:5]:
        try: os.close(os.open(path, os.O_RDONLY)); found.append(path)
        except PermissionError: pass
        except OSError: found.append(path)
found
""",
        expected=ends("ok", gives=[]),
        twin="import os\n'null' in os.listdir('/dev')",
        twin_gives=True,
        on_landlock=Differs(
            f"{SHARES}: it can name devices, and Landlock refuses to open them.",
            twin="open('/dev/null', 'wb').write(b'x')", twin_gives=1,
        ),
    ),
)  # fmt: skip


# -- the kernel, and privileges ----------------------------------------------------------

GETPID = (39, 172)


def call(numbers: tuple[int, int], *arguments: str) -> str:
    """Return the text of a program that makes one system call and raises the Linux kernel's error
    as an exception.

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
    # *Source*: isolate 2.6, also of `vsock`.
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
        on_landlock=Differs(
            f"{SHARES}, with the host's name.",
            twin="len(open('/proc/sys/kernel/hostname').read()) > 0", twin_gives=True,
        ),
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
        code="import os\nos.chroot(os.environ['TMPDIR'])",
        expected=raises("PermissionError"),
        twin="import os\nos.chdir(os.environ['TMPDIR'])",
    ),
    Attack(
        "make-device", KERNEL, Harm.ESCAPE, "make a device file of the first disk, and open it",
        PYTHON,
        code="import os\nos.mknod('disk', 0o60666, 0x800)\nopen('disk', 'rb')",
        expected=raises("PermissionError"),
        twin="import os\nos.mkfifo('pipe')",
        on_gvisor=Differs(
            "gVisor lets it be made; its own kernel knows no such device to open.",
            raises("PermissionError", "OSError"),
        ),
    ),
)  # fmt: skip

WRITE_OWN = """
import os
wrote = []
for place in (os.getcwd(), os.environ['TMPDIR'], '/dev/shm'):
    try: open(f'{place}/left', 'w').close(); wrote.append(place)
    except PermissionError: pass
len(wrote)
"""
GUEST_PROGRAM = """
path = '/opt/fumehood/fumehood/guest/__main__.py'
for line in open('/proc/self/cmdline').read().split('\\0'):
    if line.endswith('/fumehood/guest'): path = f'{line}/__main__.py'
"""
"""Text of a program that finds the program of the guest."""

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
        on_gvisor=Differs(
            "Processes under gVisor are not the host's: its own kernel's word is all there is.",
            not_looked_at=(Look.SEALED,),
        ),
        on_landlock=Differs(
            f"{SHARES}, with a user and groups of the host's.", ends("ok")
        ),
    ),
    Attack(
        "become-root", RIGHTS, Harm.INTERNAL_ESC, "become root", PYTHON,
        code="import os\nos.setresuid(0, 0, 0)",
        expected=raises("PermissionError"),
        twin="import os\nos.setresuid(*[os.getuid()] * 3)",
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
try: tops = [f'/{name}' for name in os.listdir('/')]
except PermissionError: tops = ['/bin', '/lib', '/opt', '/sbin', '/usr']
tops = [top for top in tops if not os.path.islink(top)]
for where, inner, names in (one for top in tops for one in os.walk(top)):
    if where in ('/proc', '/sys'): inner[:], names[:] = [], []
    for name in names:
        try: state = os.lstat(os.path.join(where, name))
        except OSError: continue
        looked += 1
        if 65534 in (state.st_uid, state.st_gid): continue  # nobody here, so it lends nothing
        found += stat.S_ISREG(state.st_mode) and bool(state.st_mode & 0o6000)
[found, looked > 500]
""",
        expected=ends("ok", gives=[0, True]),
        twin="import os\nos.access('/usr/bin/python3', os.X_OK)",
        twin_gives=True,
        looks=(Look.LAYER,),
        wall_s=60,  # an image of this host can have a hundred thousand files
        on_landlock=Differs(
            f"{SHARES}, and finds its programs; no_new_privs takes the other user from them.",
            ends("ok"),
        ),
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
        twin=WRITE_OWN,
        twin_gives=3,
        on_landlock=Differs(NO_SHM, twin=WRITE_OWN, twin_gives=2),
        looks=(Look.LAYER,),
        is_quick=True,
    ),
    Attack(
        "change-the-guest", RIGHTS, Harm.INTERNAL_ESC, "change the guest's own program", PYTHON,
        code=GUEST_PROGRAM + "open(path, 'a')",
        expected=raises("PermissionError", "OSError"),
        twin=GUEST_PROGRAM + "open(path).close()",
        looks=(Look.LAYER,),
    ),
)  # fmt: skip


# -- the guest, and what is left for the next call ---------------------------------------

FORGE = """
import json, os, struct
frames = [
    {"op": "ended", "id": 1, "ended_by": "ok", "cpu_ms": 0, "peak_memory_bytes": 0,
     "stdout_bytes": 0, "stderr_bytes": 0, "exit_code": 0, "signal": None, "limits_hit": [],
     "files_left_out": 0, "claim": {"result": {"value": "forged", "has_value": True,
                                               "value_repr": "forged"}}},
    {"op": "ready", "enforces": {}, "faults": ["forged"]},
    {"op": "reset", "id": 1, "clean": True, "why": None},
    {"result": {"value": "forged", "has_value": True, "value_repr": "forged"}},
]
for descriptor in range(64):
    for frame in frames:
        body = json.dumps(frame).encode()
        try: os.write(descriptor, struct.pack("!I", len(body)) + body)
        except OSError: pass
raise SystemExit(3)
"""

PLACES = """
import os
PLACES = [os.getcwd(), os.environ["TMPDIR"]]
try: os.listdir("/dev/shm"); PLACES.append("/dev/shm")
except PermissionError: pass
"""
"""Text of a program that names its own directories."""

LEAVE = (
    PLACES
    + """
import builtins, os, signal, sys, time
for place in PLACES:
    open(f"{place}/left", "w").write("x")
if not os.path.lexists(f"{PLACES[0]}/deep"):
    os.makedirs(f"{PLACES[0]}/deep/er")
    os.chmod(f"{PLACES[0]}/deep", 0)
os.environ["LEFT"] = "x"
os.umask(0)
sys.path.append("/left")
builtins.left = "x"
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
"""
)
LEAVE_PROCESS = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(20)
    os._exit(0)
time.sleep(0.1)
"""
LOOK_FOR_FILES = (
    PLACES
    + """
paths = [f"{PLACES[0]}/deep", *(f"{place}/left" for place in PLACES)]
[os.path.lexists(path) for path in paths if os.path.lexists(path)]
"""
)

LOOK_FOR_STATE = """
import builtins, os, signal, sys
mask = os.umask(0o22)
[name for name, is_there in (
    ("environment", "LEFT" in os.environ), ("path", "/left" in sys.path),
    ("builtins", hasattr(builtins, "left")), ("umask", mask != 0o22),
    ("signal", signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL)) if is_there]
"""
LOOK_FOR_PROCESSES = """
import os
found = 0
try: names = os.listdir("/proc")
except PermissionError:  # processes of others are not hidden, so programs cannot list any
    names = []
    try: os.kill(-1, 0); found = 1
    except ProcessLookupError: pass
for name in names:
    if name.isdigit() and int(name) != os.getpid():
        try:
            with open(f"/proc/{name}/status") as status:
                owner = [line for line in status if line.startswith("Uid:")][0].split()[1]
        except OSError:
            continue
        found += owner != "0"
found
"""
HOLD = """
kept = "@MARK@" + "-0123456789"
held = [kept + str(number) for number in range(1000)]
"""
SCAN = """
import re
needle = b"@MARK@"
hits = 0
for line in open("/proc/self/maps"):
    span, rights = line.split()[:2]
    if not rights.startswith("r") or "[v" in line:
        continue
    low, high = (int(end, 16) for end in span.split("-"))
    with open("/proc/self/mem", "rb", 0) as memory:
        try:
            memory.seek(low)
            data = memory.read(high - low)
        except (OSError, ValueError, OverflowError):
            continue
    hits += len(re.findall(re.escape(needle) + b"-012345678[9]", data))
    del data
hits
"""
_GUEST = (
    Attack(
        "end-supervisor", GUEST, Harm.INTERNAL_ESC, "end the container's first process", PYTHON,
        code="import os\nos.kill(1, 9)",
        expected=raises("PermissionError"),
        twin="import os\nos.kill(os.getpid(), 0)",
        looks=(Look.UNBROKEN,),
        is_quick=True,
    ),
    Attack(
        "stop-everybody", GUEST, Harm.INTERNAL_ESC, "end every process that it may", PYTHON,
        code="import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.kill(os.getpid(), 9)",
        expected=ends("signal"),
        twin="1",
        looks=(Look.UNBROKEN,),
    ),
    Attack(
        "read-supervisor", GUEST, Harm.INTERNAL_READ, "read the supervisor's memory", PYTHON,
        code="open('/proc/1/mem', 'rb')",
        expected=raises("PermissionError"),
        twin="open('/proc/self/mem', 'rb').close()",
    ),
    Attack(
        "speak-for-supervisor", GUEST, Harm.INTEGRITY, "write into the supervisor's channel",
        PYTHON,
        code="open('/proc/1/fd/1', 'wb')",
        expected=raises("PermissionError"),
        twin="import os\nos.write(1, b'own')",
        twin_gives=3,
    ),
    Attack(
        "forge-ending", GUEST, Harm.INTEGRITY, "claim that it ended well", PYTHON,
        code=FORGE,
        expected=ends("exit"),
        twin="6 * 7",
        twin_gives=42,
        looks=(Look.UNBROKEN,),
        is_quick=True,
    ),
    Attack(
        "spare-itself", GUEST, Harm.PEER_DOS, "make the kernel kill others for its memory", PYTHON,
        code="open('/proc/self/oom_score_adj', 'w', buffering=1).write('-1000\\n')",
        expected=raises("PermissionError"),
        twin="len(open('/proc/self/oom_score_adj').read()) > 0",
        twin_gives=True,
        on_gvisor=Differs(
            "gVisor's kernel keeps the number and does not act by it: it is not the host's.",
            ends("ok"),
        ),
    ),
    Attack(
        "left-files", RESET, Harm.LATERAL, "find files of the previous call", PYTHON,
        before=LEAVE,
        code=LOOK_FOR_FILES,
        expected=ends("ok", gives=[]),
        twin=LEAVE + LOOK_FOR_FILES,
        twin_gives=[True] * 4,
        on_landlock=Differs(NO_SHM, twin=LEAVE + LOOK_FOR_FILES, twin_gives=[True] * 3),
        is_quick=True,
    ),
    Attack(
        "left-environment", RESET, Harm.LATERAL,
        "find changes that the previous call made in its process", PYTHON,
        before=LEAVE,
        code=LOOK_FOR_STATE,
        expected=ends("ok", gives=[]),
        twin=LEAVE + LOOK_FOR_STATE,
        twin_gives=["environment", "path", "builtins", "umask", "signal"],
    ),
    Attack(
        "left-processes", RESET, Harm.LATERAL, "find processes of the previous call", PYTHON,
        before="import os, signal, time\n" + LEAVE_PROCESS,
        code=LOOK_FOR_PROCESSES,
        expected=ends("ok", gives=0),
        twin="import os, signal, time\n" + LEAVE_PROCESS + LOOK_FOR_PROCESSES,
        twin_gives=Value.SOMETHING,
    ),
    Attack(
        "left-memory", RESET, Harm.HOST_LEAK, "find data of the previous call in memory", PYTHON,
        before=HOLD,
        code=SCAN,
        expected=ends("ok", gives=0),
        twin=HOLD + SCAN,
        twin_gives=Value.SOMETHING,
        wall_s=15,
    ),
    Attack(
        "another-principal", RESET, Harm.LATERAL,
        "be served by the container of another principal", PYTHON,
        before=LEAVE,
        by_stranger=True,
        code=LOOK_FOR_FILES,
        expected=ends("ok", gives=[]),
        twin="1",
        looks=(Look.OTHER_CONTAINER,),
        is_quick=True,
    ),
)  # fmt: skip

ATTACKS = (*_FLOODS, *_HOST, *_rows_of_calls(), *_DOORS, *_RIGHTS, *_GUEST)
