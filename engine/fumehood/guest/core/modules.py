"""Import all modules of a package in which each module adds one feature, named like the module."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def modules_of(folder: ModuleType) -> dict[str, ModuleType]:
    """Import all modules in the package `folder`, and return them by name."""
    found = (os.path.splitext(name) for name in os.listdir(folder.__path__[0]))
    names = sorted(name for name, suffix in found if suffix == ".py" and name != "__init__")
    return {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}
