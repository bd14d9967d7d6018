"""Programs in a container that exhaust a resource. Each stops by itself if the wall fails."""

from __future__ import annotations

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

PYTHON, FLOOD = Language.PYTHON, Topic.FLOOD

MARKED = "open('/proc/self/comm', 'w').write('@MARK@')\n"
"""Program text that renames its process, so that the host can find it."""

NOT_THE_HOSTS = "Processes under gVisor are not the host's; that none is left is tried by reset."

ATTACKS = (
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
        on_gvisor=OnGvisor(
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
        on_gvisor=OnGvisor(NOT_THE_HOSTS, not_looked_at=(Look.PROCESSES,)),
    ),
    Attack(
        "disk-fill", FLOOD, Harm.HOST_DOS, "write 256 MB into the workspace", PYTHON,
        code="for n in range(256):\n"
        "    with open(f'f{n}', 'wb') as file: file.write(bytes(1 << 20))",
        expected=raises("OSError", hits="disk"),
        twin="with open('f', 'wb') as file: file.write(bytes(1 << 20))\n1",
        looks=(Look.LAYER,),
    ),
    Attack(
        "shared-memory-fill", FLOOD, Harm.HOST_DOS, "write 256 MB into /dev/shm", PYTHON,
        code="with open('/dev/shm/f', 'wb', buffering=0) as file:\n"
        "    for n in range(256):\n        assert file.write(bytes(1 << 20)) == 1 << 20",
        expected=raises("OSError", "AssertionError"),
        twin="with open('/dev/shm/f', 'wb') as file: file.write(bytes(1 << 20))\n1",
    ),
    Attack(
        "inode-flood", FLOOD, Harm.HOST_DOS, "make 5000 empty files", PYTHON,
        code="for n in range(5000): open(f'f{n}', 'w').close()",
        expected=raises("OSError", hits="disk"),
        twin="for n in range(50): open(f'f{n}', 'w').close()",
        on_gvisor=OnGvisor(
            "gVisor does not count files; an empty one takes memory of its container only.",
            ends("ok", "memory"),
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
