"""`import fumehood` loads no submodule, because guests import it as well."""

from __future__ import annotations

import json
import subprocess
import sys

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
