"""Hand-made wheels, and a pip restricted to one folder."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

TAG = "py3-none-any"


def write_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    needs: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    tag: str = TAG,
) -> Path:
    """Write a wheel of one module that exposes its version, plus `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    contents = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/RECORD": "",
        **(files or {}),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def only_from(folder: Path) -> dict[str, str]:
    """An environment in which pip uses only this folder: no index and no other configuration."""
    return {
        "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder),
        "PIP_EXTRA_INDEX_URL": "", "PIP_INDEX_URL": "",
    }  # fmt: skip
