"""No page, message or script installs fumehood by its name: it is on no package index, so whoever took
the name there would run code on the machine of a user who types it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PLACES = (
    ".ci", "benchmarks", "builtin_tools", "docs", "engine", "fuzz", "kubernetes", "monitoring",
    "requirements", "sandbox_images", "scripts", "systemd",
)  # fmt: skip

BY_NAME = re.compile(
    r"""(?<![\w/-])
    (?:install|uv[ ]add|inject|uvx|npx|(?:pipx|tool)[ ]run|--with|--from|--spec)  # of an installer
    (?:[ =]+--?[\w-]+)*  # its options
    [ =]+["']?
    fumehood(?:[-_]tools)?
    (?![\w/.*-])  # no path
    """,
    re.VERBOSE,
)
EXTRA = re.compile(r"(?<![\w/])fumehood(?:[-_]tools)?\[")
"""A name with an extra is not a command, and is still what a reader would type after one."""


def texts() -> Iterator[tuple[Path, str]]:
    files = [file for file in CHECKOUT.iterdir() if file.is_file() and not file.is_symlink()]
    for place in PLACES:
        files += (CHECKOUT / place).rglob("*")
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            try:
                yield file.relative_to(CHECKOUT), file.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a picture
                continue


def found_in(text: str) -> list[str]:
    return [
        line.strip()[:160]
        for line in text.splitlines()
        if BY_NAME.search(line) or EXTRA.search(line)
    ]


def test_nothing_installs_fumehood_by_its_name() -> None:
    found = {str(path): lines for path, text in texts() if (lines := found_in(text))}
    assert found == {}
    read = {path.parts[0] for path, _ in texts()}
    assert read >= {"README.md", "engine", "docs", "scripts", "kubernetes", "pyproject.toml"}


@pytest.mark.parametrize(
    "line",
    [
        "pip install fumehood", "pip install 'fumehood[otel]'", "pip3 install -U fumehood==1.0",
        "pip install --upgrade --quiet fumehood", "uv add fumehood", "uvx fumehood serve",
        "uv tool run fumehood", "pipx run fumehood", "pipx install 'fumehood'",
        "uv run --with=fumehood python", "uvx --from fumehood mcp", "It needs `fumehood[repair]`.",
        "npx fumehood", "pip install fumehood_tools",
    ],
)  # fmt: skip
def test_name_after_an_installer_is_found(line: str) -> None:
    assert found_in(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install .", "pip install 'PATH_OF_THE_CHECKOUT[otel]'", "pipx uninstall fumehood",
        "pipx install dist/fumehood-*.whl", "RUN pip install '/tmp/fumehood[cluster]'",
        "systemctl edit fumehood", "then run `fumehood serve`", "fumehood serve", "from fumehood import Client",
        "ExecStart=/opt/fumehood/bin/fumehood serve",
    ],
)  # fmt: skip
def test_path_or_another_command_is_not(line: str) -> None:
    assert found_in(line) == []
