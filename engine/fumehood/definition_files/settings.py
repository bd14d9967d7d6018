"""The setting for the directory of definition files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from fumehood.core.part import Setting


def _refuse_relative(value: Path) -> Path:
    """Refuse a path whose meaning depends on the working directory."""
    if not value.is_absolute():
        raise ValueError("must be an absolute path")
    return value


SETTINGS = {
    "tools_directory": Setting(Annotated[Path, AfterValidator(_refuse_relative)] | None, None)
}
