"""The pages of the documentation: their snippets, run as a reader would run them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import shell_path
from support.preloaded import PYTHON

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(sh|python)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
JSON = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SET_UP_BY_THE_TEST = ("daemon", "service", "images")
"""Marks after a fence's language for snippets whose steps the test performs itself."""


@dataclass
class Snippet:
    """A snippet of a page after it ran, or one whose steps the test performs itself."""

    mark: str
    text: str
    stdout: str = ""
    stderr: str = ""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def json_of(page: str) -> list[Any]:
    """The JSON documents shown on a page."""
    return [json.loads(text) for text in JSON.findall(read(page))]


def write_config(page: str, file: Path, replace: Mapping[str, str] | None = None) -> str:
    """Write the only configuration shown on a page to a file, and return it."""
    (text,) = TOML.findall(read(page))
    for old, new in (replace or {}).items():
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return str(text)


def run_snippets(
    page: str,
    environment: Mapping[str, str],
    directory: Path = ROOT,
    *,
    replace: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout_s: float = 60,
) -> Iterator[Snippet]:
    """Run the snippets of a page in order; each must succeed, and finds the commands in `directory`.
    A test may change the environment while it iterates.
    """
    for language, rest, text in FENCE.findall(read(page)):
        snippet = Snippet(rest.strip(), text)
        if snippet.mark == "daemon":
            assert text.strip() == "fumehood serve"
        if snippet.mark not in SET_UP_BY_THE_TEST:
            for old, new in (replace or {}).items():
                text = text.replace(old, new)
            interpreter = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [PYTHON, "-c"]
            done = subprocess.run(
                [*interpreter, text], cwd=directory, env={**environment, "PATH": f"{directory}:{shell_path()}"},
                capture_output=True, timeout=timeout_s, input=stdin and stdin.encode(),
            )  # fmt: skip
            assert done.returncode == 0, (text, done.stdout, done.stderr)
            snippet.stdout, snippet.stderr = done.stdout.decode(), done.stderr.decode()
        yield snippet
