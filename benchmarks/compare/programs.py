"""What each peer runs: work to measure, and attacks with what the host looks for afterwards.

Every attack is bounded in count, size and time by itself, and is run inside the peers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EMPTY = "print('x')"
STANDARD = (
    "import re, math, datetime\n"
    "found = re.findall('[a-z]+', 'some words to be found ' * 100)\n"
    "total = sum(math.sqrt(n) for n in range(1000))\n"
    "print(len(found), int(total))"
)
PANDAS = (
    "import pandas as pd\n"
    "t = pd.DataFrame({'g': ['a', 'b'] * 5000, 'v': range(10000)})\n"
    "print(int(t.groupby('g').v.sum()['a']))"
)
MEGABYTE = "print('x' * 1_000_000)"
TOTAL = "500 21065"
SUM = "24995000"

CANARY = "canary-of-the-host"

NAMED = """
try:
    import ctypes
    ctypes.CDLL(None).prctl(15, b'{mark}')
except Exception:
    pass
"""
"""Gives the program a name by which the host finds it."""


@dataclass(frozen=True)
class Seen:
    """What came of an attack. `took_s` is None if the caller gave up."""

    out: str
    said: str
    took_s: float | None
    grown_mb: float
    left: int
    """Processes of the attack that still run a while after the answer."""
    most: int
    """The most of them that ran at once."""
    on_host: bool
    """Whether its file is on the host."""
    connected: bool
    """Whether it reached a port of the host."""


@dataclass(frozen=True)
class Attack:
    """A program, and a rule that says whether the peer held it: a text if not."""

    what: str
    code: str
    fault: Callable[[Seen], str | None]
    then: str = ""
    """A second program, for another call."""


def _lasting(seen: Seen) -> str | None:
    if seen.left:
        return f"{seen.left} still run afterwards"
    return None if seen.took_s is not None else "never answers"


def _memory(seen: Seen) -> str | None:
    return "gets 1 GB" if "GOT" in seen.out else _lasting(seen)


def _processes(seen: Seen) -> str | None:
    if seen.most >= 250:
        return f"{seen.most} processes at once"
    return None if seen.took_s is not None else "never answers"


def _disk(seen: Seen) -> str | None:
    return "writes 1 GB" if "WROTE 1024" in seen.out else _lasting(seen)


def _output(seen: Seen) -> str | None:
    if seen.grown_mb > 100:
        return f"the caller's memory grows by {seen.grown_mb:.0f} MB"
    return _lasting(seen)


def _leaked(seen: Seen) -> str | None:
    return "reads it" if CANARY in seen.out else None


LOOP = Attack("never ends", "while True:\n    pass", _lasting)
MEMORY = Attack(
    "takes 1 GB of memory",
    "held = [str(n) * (1 << 20) for n in range(1000, 1256)]\nprint('GOT', len(held))",
    _memory,
)
PROCESSES = Attack(
    "starts 300 processes",
    "import os, time\n"
    "for n in range(300):\n"
    "    try:\n"
    "        if os.fork() == 0:\n"
    "            time.sleep(15)\n"
    "            os._exit(0)\n"
    "    except OSError:\n"
    "        break\n"
    "time.sleep(2)\nprint('STARTED', n + 1)",
    _processes,
)
STAYS = Attack(
    "leaves a process behind",
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    for n in (0, 1, 2):\n"
    "        os.close(n)\n"
    "    time.sleep(60)\n"
    "    os._exit(0)\n"
    "print('STARTED')",
    _lasting,
)
DISK = Attack(
    "writes 1 GB of files",
    "import os, tempfile\n"
    "most = 0\n"
    "for place in (tempfile.gettempdir(), os.getcwd(), '/var/tmp', os.path.expanduser('~')):\n"
    "    name, wrote = os.path.join(place, '{mark}.big'), 0\n"
    "    try:\n"
    "        with open(name, 'wb', 0) as f:\n"
    "            for _ in range(1024):\n"
    "                wrote += f.write(b'x' * (1 << 20)) >> 20\n"
    "    except OSError:\n"
    "        pass\n"
    "    try:\n"
    "        os.remove(name)\n"
    "    except OSError:\n"
    "        pass\n"
    "    most = max(most, wrote)\n"
    "    if most == 1024:\n"
    "        break\n"
    "print('WROTE', most)",
    _disk,
)
OUTPUT = Attack(
    "prints 300 MB",
    "for _ in range(300):\n    print('x' * (1 << 20))",
    _output,
)
READS = Attack(
    "reads a file of the host",
    "for place in ('/tmp', '/var/tmp', '/root', '/home', '/etc'):\n"
    "    try:\n"
    "        with open(place + '/{mark}.secret') as f:\n"
    "            print(f.read())\n"
    "    except OSError:\n"
    "        pass",
    _leaked,
)
SECRETS = Attack(
    "reads the caller's environment",
    "import os\n"
    "print(dict(os.environ))\n"
    "for one in os.listdir('/proc') if os.path.isdir('/proc') else []:\n"
    "    try:\n"
    "        with open('/proc/' + one + '/environ') as f:\n"
    "            print(f.read())\n"
    "    except OSError:\n"
    "        pass",
    _leaked,
)
WRITES = Attack(
    "writes a file of the host",
    "for place in ('/tmp', '/var/tmp', '/root', '/etc', '/dev/shm'):\n"
    "    try:\n"
    "        with open(place + '/{mark}.written', 'w') as f:\n"
    "            f.write('x')\n"
    "    except OSError:\n"
    "        pass",
    lambda seen: "writes it" if seen.on_host else None,
)
NETWORK = Attack(
    "reaches a port of the host",
    "import socket\n"
    "for host in {hosts!r}:\n"
    "    try:\n"
    "        socket.create_connection((host, {port}), 1).close()\n"
    "    except OSError:\n"
    "        pass",
    lambda seen: "reaches it" if seen.connected else None,
)
KILLS = Attack(
    "kills its caller",
    "import os, signal\n"
    "if os.getppid() > 1:\n"
    "    os.kill(os.getppid(), signal.SIGKILL)\n"
    "print('SENT')",
    lambda seen: "the caller is dead" if seen.said == "worker died" else None,
)
NEXT = Attack(
    "leaves files for the next call",
    "import os, tempfile\n"
    "for place in (tempfile.gettempdir(), os.getcwd(), '/var/tmp', os.path.expanduser('~')):\n"
    "    try:\n"
    "        with open(os.path.join(place, '{mark}.next'), 'w') as f:\n"
    "            f.write('x')\n"
    "    except OSError:\n"
    "        pass",
    lambda seen: "the next call finds them" if "FOUND" in seen.out else None,
    then="import os, tempfile\n"
    "for place in (tempfile.gettempdir(), os.getcwd(), '/var/tmp', os.path.expanduser('~')):\n"
    "    if os.path.exists(os.path.join(place, '{mark}.next')):\n"
    "        print('FOUND', place)",
)
ATTACKS = (
    LOOP, MEMORY, PROCESSES, STAYS, DISK, OUTPUT, READS, SECRETS, WRITES, NETWORK, KILLS, NEXT,
)  # fmt: skip


def fill(text: str, **values: Any) -> str:
    """Put in what is new for each run."""
    for name, value in values.items():
        text = text.replace("{" + name + "!r}", repr(value)).replace("{" + name + "}", str(value))
    return text
