"""Programs in a container that try to reach the host: network, files, environment, processes."""

from __future__ import annotations

from fumehood.attack.attack import Attack, Harm, Language, Look, Topic, Value, ends, raises

PYTHON, NETWORK, HOST = Language.PYTHON, Topic.NETWORK, Topic.HOST

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

ATTACKS = (
    Attack(
        "reach-loopback", NETWORK, Harm.EXFIL, "connect to a listener on the host's loopback",
        PYTHON,
        code=KNOCK + "knock(('127.0.0.1', @PORT@))",
        expected=raises("ConnectionRefusedError"),
        twin=KNOCK + OWN_LISTENER + "knock(listener.getsockname())",
        twin_gives=True,
        looks=(Look.NO_NETWORK,),
        is_quick=True,
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
    ),
    Attack(
        "reach-abstract-socket", NETWORK, Harm.ESCAPE,
        "connect to an abstract socket of the host", PYTHON,
        code=KNOCK + "knock('\\0@ABSTRACT@', socket.AF_UNIX)",
        expected=raises("ConnectionRefusedError"),
        twin=KNOCK + "listener = socket.socket(socket.AF_UNIX)\nlistener.bind('\\0own')\n"
        "listener.listen()\nknock('\\0own', socket.AF_UNIX)",
        twin_gives=True,
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
    ),
    Attack(
        "raw-socket", NETWORK, Harm.LATERAL, "send raw packets", PYTHON,
        code="import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_INET).close()",
    ),
    Attack(
        "packet-socket", NETWORK, Harm.LATERAL, "listen on the network interface", PYTHON,
        code="import socket\nsocket.socket(17, socket.SOCK_RAW)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_INET).close()",
    ),
    Attack(
        "netlink", NETWORK, Harm.HOST_LEAK, "ask the kernel about its network", PYTHON,
        code="import socket\nsocket.socket(16, socket.SOCK_RAW)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_UNIX).close()",
    ),
    Attack(
        "vsock", NETWORK, Harm.ESCAPE, "connect to a virtual machine's host", PYTHON,
        code="import socket\nsocket.socket(40, socket.SOCK_STREAM)",
        expected=raises("PermissionError"),
        twin="import socket\nsocket.socket(socket.AF_INET).close()",
    ),
    Attack(
        "read-host-file", HOST, Harm.HOST_LEAK, "read a file of the host", PYTHON,
        code="open('@FILE@').read()",
        expected=raises("FileNotFoundError"),
        twin="open('own', 'w').write('own')\nopen('own').read()",
        twin_gives="own",
        is_quick=True,
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
    ),
    Attack(
        "host-disks", HOST, Harm.ESCAPE, "find a disk, or memory, of the host among the devices",
        PYTHON,
        code="""
import os, stat
found = []
for where, _, names in os.walk('/dev'):
    for name in names:
        path = os.path.join(where, name)
        try: kind = os.lstat(path).st_mode
        except OSError: continue
        if stat.S_ISBLK(kind) or name in ('mem', 'kmem', 'port', 'kmsg', 'kvm'):
            found.append(path)
found
""",
        expected=ends("ok", gives=[]),
        twin="import os\n'null' in os.listdir('/dev')",
        twin_gives=True,
    ),
)  # fmt: skip
