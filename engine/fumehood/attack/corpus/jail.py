"""Attacks on the jail by an untrusted sandboxed function.

The function may read the interpreter and its libraries, and cannot reach any other process, socket
or file. If the function makes a system call that the filter does not allow, the Linux kernel kills
the process, and the run ends as `policy`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.attack.attack import Attack, Harm, Language, Look, Topic, Value, ends, raises

FUNCTION = Language.FUNCTION
KILLED = ends("policy")
CALL = (
    "import os\nnumber = {{'x86_64': {0}, 'aarch64': {1}}}[os.uname().machine]\n"
    "libc.syscall(number, 0, 0, 0)"
)
"""Program text that makes one system call by its number, on x86-64 or AArch64."""

HARMLESS = "import os; out = os.getpid() > 0"


def killed(
    name: str, topic: Topic, harm: Harm, tries: str, code: str, twin: str, *, quick: bool = False
) -> Attack:
    """Return an attack whose process the jail's system call filter must kill. The arguments are
    fields of `Attack`.
    """
    return Attack(name, topic, harm, tries, FUNCTION, code, KILLED, twin, is_quick=quick)


_FLOODS = (
    Attack(
        "output-flood", Topic.FLOOD, Harm.HOST_DOS, "answer with 8 MB", FUNCTION,
        code="out = 'x' * (8 << 20)",
        expected=ends("output"),
        twin="out = 'x' * 1000",
        is_quick=True,
    ),
    Attack(
        "memory-hog", Topic.FLOOD, Harm.HOST_DOS, "use four times the memory", FUNCTION,
        code="held = []\nfor _ in range(256): held.append(b'x' * (1 << 20))\nout = len(held)",
        expected=ends("memory"),
        twin="out = len(b'x' * (8 << 20))",
        is_quick=True,
    ),
    Attack(
        "cpu-spin", Topic.FLOOD, Harm.HOST_DOS, "compute past the deadline, ignoring signals",
        FUNCTION,
        code="import signal, time\nfor n in range(1, 32):\n"
        "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "began = time.monotonic()\nwhile time.monotonic() - began < 20: pass",
        expected=ends("wall_time"),
        twin="out = sum(range(1000))",
        looks=(Look.PROCESSES, Look.UNBROKEN),
        wall_s=0.5,
        is_quick=True,
    ),
    Attack(
        "sleep-past-deadline", Topic.FLOOD, Harm.PEER_DOS, "sleep past the deadline", FUNCTION,
        code="import time; time.sleep(20)",
        expected=ends("wall_time"),
        twin="import time; time.sleep(0.001); out = 1",
        looks=(Look.PROCESSES, Look.UNBROKEN),
        wall_s=0.5,
    ),
    Attack(
        "open-file-flood", Topic.FLOOD, Harm.HOST_DOS, "hold 100 open files", FUNCTION,
        code="import os\nheld = [open(os.__file__) for _ in range(100)]",
        expected=raises("OSError"),
        twin="import os\nheld = [open(os.__file__) for _ in range(20)]\nout = len(held)",
        twin_gives=20,
    ),
    killed("fork-bomb", Topic.FLOOD, Harm.HOST_DOS, "start a process",
           "import os\nif os.fork() == 0: os._exit(0)", HARMLESS, quick=True),
    killed("thread-flood", Topic.FLOOD, Harm.HOST_DOS, "start a thread",
           "import threading; threading.Thread(target=print).start()", HARMLESS),
    Attack(
        "disk-fill", Topic.FLOOD, Harm.HOST_DOS, "write into directories open to all users",
        FUNCTION,
        code="""
wrote = []
for place in ('/tmp', '/var/tmp', '/dev/shm'):
    try: open(f'{place}/@MARK@', 'wb').close(); wrote.append(place)
    except OSError: pass
out = wrote
""",
        expected=ends("ok", gives=[]),
        twin="import os; out = os.path.basename(os.__file__)",
        twin_gives="os.py",
    ),
)  # fmt: skip

_NETWORK = (
    killed("reach-loopback", Topic.NETWORK, Harm.EXFIL,
           "connect to a listener on the host's loopback",
           "import socket\ncaller = socket.create_connection(('127.0.0.1', @PORT@))\n"
           "caller.sendall(b'@KNOCK@')",
           "import socket; a, b = socket.socketpair(); a.send(b'x'); out = b.recv(1).decode()",
           quick=True),
    killed("reach-abstract-socket", Topic.NETWORK, Harm.ESCAPE,
           "connect to an abstract socket of the host",
           "import socket\ncaller = socket.socket(socket.AF_UNIX)\n"
           "caller.connect('\\0@ABSTRACT@')\ncaller.sendall(b'@KNOCK@')",
           "import socket; a, b = socket.socketpair(); out = 1"),
    killed("raw-socket", Topic.NETWORK, Harm.LATERAL, "send raw packets",
           "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", HARMLESS),
    killed("netlink", Topic.NETWORK, Harm.HOST_LEAK, "ask the kernel about its network",
           "import socket; socket.socket(16, socket.SOCK_RAW)", HARMLESS),
    killed("docker-socket", Topic.HOST, Harm.ESCAPE, "connect to Docker",
           "import socket; socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
           HARMLESS, quick=True),
)  # fmt: skip

READS_ITS_OWN = "import os; out = open(os.__file__, 'rb').read(1) != b''"


def _hidden(name: str, harm: Harm, tries: str, code: str, *, quick: bool = False) -> Attack:
    return Attack(
        name, Topic.HOST, harm, tries, FUNCTION, code, raises("PermissionError"), READS_ITS_OWN,
        twin_gives=True, is_quick=quick,
    )  # fmt: skip


_HOST = (
    _hidden("read-host-file", Harm.HOST_LEAK, "read a file of the host",
            "out = open('@FILE@').read()", quick=True),
    _hidden("list-host", Harm.HOST_LEAK, "list a directory of the host",
            "import os; out = os.listdir('@DIRECTORY@')"),
    _hidden("reopen-by-descriptor", Harm.HOST_LEAK, "open a file of the host in two steps",
            "import os; f = os.open('@FILE@', os.O_PATH); out = open(f'/proc/self/fd/{f}').read()"),
    _hidden("run-host-file", Harm.ESCAPE, "run a program file of the host",
            "import runpy; out = runpy.run_path('@DIRECTORY@/canary.py')['WORD']"),
    _hidden("host-processes", Harm.HOST_LEAK, "read the command line of a process of the host",
            "out = open('/proc/@PID@/cmdline').read()"),
    Attack(
        "host-environment", Topic.HOST, Harm.HOST_LEAK, "find the host's environment", FUNCTION,
        code="""
import os
found = [repr(sorted(os.environ.items()))]
for path in ('/proc/self/environ', '/proc/@PID@/environ', f'/proc/{os.getppid()}/environ'):
    try: found.append(open(path).read())
    except OSError: pass
out = ' '.join(found)
""",
        expected=ends("ok", gives=Value.SOMETHING),
        twin="import os; os.environ['OWN'] = 'own'; out = os.environ['OWN']",
        twin_gives="own",
        is_quick=True,
    ),
    killed("end-host-process", Topic.HOST, Harm.HOST_DOS, "end a process of the host",
           "import os; os.kill(@PID@, 9)", HARMLESS, quick=True),
    _hidden("write-outside-workspace", Harm.INTEGRITY, "write beside a file of the host",
            "open('@DIRECTORY@/left', 'w')", quick=True),
    _hidden("change-host-file", Harm.INTEGRITY, "change a file of the host",
            "open('@FILE@', 'a').write('x')"),
    _hidden("remove-host-file", Harm.INTEGRITY, "remove a file of the host",
            "import os; os.unlink('@FILE@')"),
    Attack(
        "sysrq-trigger", Topic.KERNEL, Harm.HOST_DOS,
        "open the kernel's emergency keys for writing", FUNCTION,
        code="open('/proc/sysrq-trigger', 'w')",
        expected=raises("PermissionError", "FileNotFoundError"),
        twin=READS_ITS_OWN,
        twin_gives=True,
    ),
)  # fmt: skip

_CALLS = (
    ("execute", Harm.ESCAPE, "start another program", "import os; os.execv('/bin/true', ['true'])"),
    ("trace-supervisor", Harm.INTERNAL_ESC, "trace another process (ptrace)",
     "libc.ptrace(0, 0, 0, 0)"),
    ("read-other-memory", Harm.INTERNAL_READ, "read another process's memory",
     "libc.process_vm_readv(@PID@, 0, 0, 0, 0, 0)"),
    ("unshare-user", Harm.ESCAPE, "make a user namespace", "libc.unshare(0x10000000)"),
    ("mount", Harm.ESCAPE, "mount a file system", "libc.mount(b'a', b'/', b'tmpfs', 0, 0)"),
    ("bpf", Harm.ESCAPE, "load a program into the kernel (bpf)", (321, 280)),
    ("keyring", Harm.LATERAL, "use the kernel's keys (keyctl)", (250, 219)),
    ("io-uring", Harm.ESCAPE, "queue system calls past the filter (io_uring)", (425, 425)),
    ("userfaultfd", Harm.ESCAPE, "hold the kernel in a page fault", (323, 282)),
    ("shared-memory-segment", Harm.LATERAL, "leave shared memory behind (System V)",
     "libc.shmget(0, 4096, 0o1000)"),
    ("another-filter", Harm.INTERNAL_ESC, "change its own filter (seccomp)", (317, 277)),
    ("chroot", Harm.ESCAPE, "change its root directory", "import os; os.chroot('/')"),
    ("become-root", Harm.INTERNAL_ESC, "become root", "import os; os.setuid(0)"),
)  # fmt: skip


def _rows_of_calls() -> Iterator[Attack]:
    for name, harm, tries, what in _CALLS:
        code = what if isinstance(what, str) else CALL.format(*what)
        topic = Topic.RIGHTS if name == "become-root" else Topic.KERNEL
        yield killed(
            name, topic, harm, tries, f"import ctypes\nlibc = ctypes.CDLL(None)\n{code}",
            "import ctypes; out = ctypes.CDLL(None).abs(-3)",
            quick=name in ("execute", "trace-supervisor", "mount"),
        )  # fmt: skip


_GUEST = (
    Attack(
        "capabilities", Topic.RIGHTS, Harm.ESCAPE, "hold privileges, or run without a filter",
        FUNCTION,
        code="import time; time.sleep(0.3); out = 1",
        expected=ends("ok", gives=1),
        twin=HARMLESS,
        looks=(Look.SEALED,),
        is_quick=True,
    ),
    Attack(
        "end-supervisor", Topic.GUEST, Harm.INTERNAL_ESC, "end the guest of all functions",
        FUNCTION,
        code="import os; os.kill(os.getppid(), 9)",
        expected=KILLED,
        twin=HARMLESS,
        looks=(Look.UNBROKEN,),
        is_quick=True,
    ),
    Attack(
        "forge-ending", Topic.GUEST, Harm.INTEGRITY, "break the guest's channel by a forged frame",
        FUNCTION,
        code="import os; os.write(4, b'\\0\\0\\0\\5hello')",
        expected=ends("sandbox_lost"),
        twin="out = 42",
        twin_gives=42,
        looks=(Look.UNBROKEN,),
        is_quick=True,
    ),
    Attack(
        "exit-as-if-done", Topic.GUEST, Harm.INTEGRITY, "exit as if it had answered", FUNCTION,
        code="import os; os._exit(0)",
        expected=ends("sandbox_lost"),
        twin="out = 42",
        twin_gives=42,
    ),
    Attack(
        "left-environment", Topic.RESET, Harm.LATERAL, "find what the previous call left behind",
        FUNCTION,
        before="import builtins, os, sys; builtins.left = sys.left = 'x'; os.environ['LEFT'] = 'x'",
        code="import builtins, os, sys\n"
        "out = [hasattr(builtins, 'left'), hasattr(sys, 'left'), 'LEFT' in os.environ]",
        expected=ends("ok", gives=[False, False, False]),
        twin="import builtins, os, sys; builtins.left = sys.left = 'x'; os.environ['LEFT'] = 'x'\n"
        "out = [hasattr(builtins, 'left'), hasattr(sys, 'left'), 'LEFT' in os.environ]",
        twin_gives=[True, True, True],
        is_quick=True,
    ),
)  # fmt: skip

ATTACKS = (*_FLOODS, *_NETWORK, *_HOST, *_rows_of_calls(), *_GUEST)
