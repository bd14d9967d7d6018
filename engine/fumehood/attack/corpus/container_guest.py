"""Programs in a container that attack the guest itself, or the calls after them."""

from __future__ import annotations

from fumehood.attack.attack import (
    Attack,
    Harm,
    Language,
    Look,
    OnGvisor,
    Topic,
    Value,
    ends,
    raises,
)

PYTHON, GUEST, RESET = Language.PYTHON, Topic.GUEST, Topic.RESET

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

LEAVE = """
import builtins, os, signal, sys, time
for path in ("/workspace/left", "/tmp/left", "/dev/shm/left"):
    open(path, "w").write("x")
if not os.path.lexists("/workspace/deep"):
    os.makedirs("/workspace/deep/er")
    os.chmod("/workspace/deep", 0)
os.environ["LEFT"] = "x"
os.umask(0)
sys.path.append("/left")
builtins.left = "x"
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
"""
LEAVE_PROCESS = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(20)
    os._exit(0)
time.sleep(0.1)
"""
LEFT_FILES = ["/workspace/left", "/workspace/deep", "/tmp/left", "/dev/shm/left"]  # noqa: S108
LOOK_FOR_FILES = f"import os\n[path for path in {LEFT_FILES} if os.path.lexists(path)]"

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
for name in os.listdir("/proc"):
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
ATTACKS = (
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
        on_gvisor=OnGvisor(
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
        twin_gives=LEFT_FILES,
        looks=(Look.NO_OTHER_CONTAINER,),
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
        looks=(Look.NO_OTHER_CONTAINER,),
    ),
    Attack(
        "left-processes", RESET, Harm.LATERAL, "find processes of the previous call", PYTHON,
        before="import os, signal, time\n" + LEAVE_PROCESS,
        code=LOOK_FOR_PROCESSES,
        expected=ends("ok", gives=0),
        twin="import os, signal, time\n" + LEAVE_PROCESS + LOOK_FOR_PROCESSES,
        twin_gives=Value.SOMETHING,
        looks=(Look.NO_OTHER_CONTAINER,),
    ),
    Attack(
        "left-memory", RESET, Harm.HOST_LEAK, "find data of the previous call in memory", PYTHON,
        before=HOLD,
        code=SCAN,
        expected=ends("ok", gives=0),
        twin=HOLD + SCAN,
        twin_gives=Value.SOMETHING,
        looks=(Look.NO_OTHER_CONTAINER,),
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
