"""What an installed fumehood brings with it beside its modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_has_every_file_that_images_are_made_from(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps",
         "--no-build-isolation", f"--wheel-dir={tmp_path}", str(ROOT)],
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name.removeprefix("fumehood/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("fumehood/sandbox_images/")
        }
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "sandbox_images").rglob("*")
        if path.is_file()
    }
    assert packed == files
    assert "sandbox_images/common/finish" in packed
