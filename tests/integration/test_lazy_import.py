"""What is loaded: by `import fumehood` no submodule, because guests import it as well; by an engine
with a state in SQLite nothing of PostgreSQL, with files in a directory nothing of S3, without a cluster
nothing of Ray, and without network nothing of the gateway's proxy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
before = set(sys.modules)
import fumehood
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_the_package_loads_only_itself_and_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True, timeout=60, text=True
    )
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name.startswith("fumehood")] == ["fumehood"]
    assert {name.split(".")[0] for name in loaded} <= sys.stdlib_module_names | {"fumehood"}


DAEMON = """
import json, pathlib, sys
import anyio, fumehood.cli.serve, fumehood.http.server
from fumehood import Config, Engine
from fumehood.storage.database import open_database
path = pathlib.Path(sys.argv[1])
database = open_database(path)
async def run():
    config = Config(files={"url": str(path.parent / "files")})
    async with Engine(config=config, database=database):
        pass
anyio.run(run)
database.close()
print(json.dumps(sorted(sys.modules)))
"""


def test_local_engine_loads_nothing_of_postgresql_s3_and_ray(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DAEMON, home / "state.db"],
        capture_output=True, check=True, timeout=60, text=True,
    )  # fmt: skip
    loaded = json.loads(done.stdout)
    assert "sqlalchemy.dialects.sqlite" in loaded
    assert [name for name in loaded if "psycopg" in name or "postgres" in name] == []
    assert {"s3fs", "fsspec", "botocore", "aiobotocore", "ray"}.isdisjoint(loaded)
    assert {"cryptography", "fumehood.gateway.proxy"}.isdisjoint(loaded)
    assert "fumehood.sandbox.container.wall" in loaded
    assert [name for name in loaded if name.startswith("fumehood.sandbox.cluster")] == []
