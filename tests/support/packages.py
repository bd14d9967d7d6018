"""Installed tool packages for a daemon."""

from __future__ import annotations

from pathlib import Path


def install(directory: Path, name: str, source: str) -> dict[str, str]:
    """Install a package whose module `name` lists `tools`; return the variables to find it."""
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (directory / f"{name}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[fumehood.tools]\n{name} = {name}:tools\n")
    return {"PYTHONPATH": str(directory)}
