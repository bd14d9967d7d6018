"""What is loaded: by `import fumehood` no submodule, because guests import it as well; by an engine
with a state in SQLite nothing of PostgreSQL, with files in a directory nothing of S3, without a cluster
nothing of Ray, and without network nothing of the gateway's proxy.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from fumehood import Client
from support.wait import DEADLINE_S, wait_until
from tests.conftest import CLEAN_ENVIRONMENT, SocketClient

SCRIPT = """
import json, sys
before = set(sys.modules)
import fumehood
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_the_package_loads_only_itself_and_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True, timeout=600, text=True
    )
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name.startswith("fumehood")] == ["fumehood"]
    assert {name.split(".")[0] for name in loaded} <= sys.stdlib_module_names | {"fumehood"}


DAEMON = """
import json, sys
from fumehood.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)))
"""


def test_local_daemon_loads_nothing_of_postgresql_s3_and_ray(home: Path) -> None:
    socket, environment = home / "engine.sock", {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, "serve"],
        env={**environment, "FUMEHOOD_FILES__URL": str(home / "files")},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as daemon:  # fmt: skip
        wait_until(lambda: SocketClient.answers(socket))
        with Client(socket) as client:
            assert client.call("calculator", {"expression": "6 * 7"}).success
            assert client.call("run_python", {"code": "6 * 7"}).metadata.call_id
        daemon.send_signal(signal.SIGTERM)
        said, _ = daemon.communicate(timeout=DEADLINE_S)
    loaded = json.loads(said.splitlines()[-1])
    assert "sqlalchemy.dialects.sqlite" in loaded
    assert [name for name in loaded if "psycopg" in name or "postgres" in name] == []
    assert {"s3fs", "fsspec", "botocore", "aiobotocore", "ray"}.isdisjoint(loaded)
    assert {"cryptography", "fumehood.gateway.proxy"}.isdisjoint(loaded)
    assert "fumehood.sandbox.container.wall" in loaded
    assert {name for name in loaded if name.startswith("fumehood.cluster.")} <= {
        f"fumehood.cluster.{name}"
        for name in ("part", "settings", "options", "in_engine", "routes")
    }
