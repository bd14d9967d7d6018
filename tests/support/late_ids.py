"""Start a process wall's guest whose zygote reports a child only after its end: `python -I -S -B
late_ids.py CONFIG HANDOVER_FD`. For children that end by themselves.
"""

from __future__ import annotations

import json
import os
import struct
import sys

CONFIG = json.loads(sys.argv[1])
sys.path.extend(CONFIG["import_paths"])

from fumehood.guest.process import supervisor, zygote  # noqa: E402  # it is found by these paths


class LateId(struct.Struct):
    """Packs the id of a process once it is gone."""

    def pack(self, *values: int) -> bytes:
        while os.path.exists(f"/proc/{values[0]}"):
            os.sched_yield()
        return super().pack(*values)


if __name__ == "__main__":
    zygote.PID = LateId(zygote.PID.format)
    supervisor.supervise(CONFIG, int(sys.argv[2]))
