"""Wheels made by hand, and a pip that looks for packages in one folder alone."""

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
    """A wheel of one module that says which version it is, and of `files` besides."""
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
    """An environment in which pip asks nobody: no index, no configuration but this folder."""
    return {
        "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder),
        "PIP_EXTRA_INDEX_URL": "", "PIP_INDEX_URL": "",
    }  # fmt: skip
