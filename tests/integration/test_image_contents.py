"""Contents of the built-in images: programs, packages, permissions, and what is excluded."""

from __future__ import annotations

import json
import tarfile
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import ready_image
from fumehood.docker.api import open_docker
from fumehood.docker.store import DEADLINE_S
from fumehood.sandbox.images.recipe import image_names, read_recipe
from support.docker_images import run_inside, write_whole

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S7")]

SHELL_PROGRAMS = (
    "awk", "bash", "bc", "bzip2", "cmp", "column", "comm", "curl", "cut", "date", "diff", "file", "find",
    "gawk", "git", "grep", "gzip", "head", "hexdump", "jq", "less", "make", "nl", "od", "paste", "patch",
    "ps", "python3", "rg", "sed", "sha256sum", "sort", "split", "sqlite3", "tac", "tail", "tar", "tee",
    "tr", "tree", "uniq", "unzip", "wc", "xargs", "xz", "zip", "zstd",
)  # fmt: skip
NOT_THERE = ("wget", "ssh", "gcc", "pip", "npm", "sudo", "nc")


@cache
def about(name: str) -> dict[str, Any]:
    status, said = run_inside(ready_image(name).id, "cat", "/opt/fumehood/image.json")
    assert status == 0, said
    return json.loads(said)


def run(name: str, *command: str) -> tuple[int, str]:
    """Run a command in the image with the image's program environment."""
    return run_inside(ready_image(name).id, *command, environment=about(name)["environment"])


@pytest.mark.row("S10")
@pytest.mark.parametrize("name", ["python", "python-data", "shell", "node"])
def test_image_matches_its_recipe_and_has_a_shell_and_python(name: str) -> None:
    image, recipe = ready_image(name), read_recipe(name)
    assert (image.languages, image.guest_mb) == (
        recipe.settings.languages, recipe.settings.guest_mb,
    )  # fmt: skip
    assert about(name) == json.loads(recipe.about)
    assert name in image_names()
    program = "import sys; print(*sys.version_info[:2])"
    assert run(name, "bash", "-c", f"python3 -c '{program}'") == (0, "3 11\n")


@pytest.mark.row("S3")
@pytest.mark.parametrize("name", ["python-data", "node"])  # `shell` has the files of `node`
def test_no_image_file_is_setuid_and_guest_files_belong_to_root(name: str, tmp_path: Path) -> None:
    with closing(open_docker(timeout_s=DEADLINE_S)) as client:
        write_whole(client, ready_image(name).id, tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar") as archive:
        members = list(archive)
    assert len(members) > 3000
    assert [m.name for m in members if m.isfile() and m.mode & 0o6000] == []
    assert [m.name for m in members if any("capability" in key for key in m.pax_headers)] == []
    ours = [m for m in members if m.name.removeprefix("./").startswith("opt/fumehood/")]
    assert {(m.uid, m.gid) for m in ours} == {(0, 0)}
    assert [m.name for m in ours if m.mode & 0o022] == []


def test_shell_image_has_expected_programs_and_no_installer_or_network_client() -> None:
    script = "for name in {}; do command -v $name >/dev/null || echo $name; done"
    assert run("shell", "bash", "-c", script.format(" ".join(SHELL_PROGRAMS))) == (0, "")
    status, said = run("shell", "bash", "-c", script.format(" ".join(NOT_THERE)))
    assert (status, said.split()) == (0, list(NOT_THERE))


def test_shell_programs_work_together() -> None:
    script = (
        "cd /tmp && git init -q x && cd x && printf '{\"a\": [3, 4]}' > a.json && git add . &&"
        " git -c user.name=a -c user.email=a@example.org commit -qm first && git log --format=%s &&"
        " jq '.a | add' a.json && tar cJf ../x.tar.xz . && tar tf ../x.tar.xz | grep -c a.json &&"
        " echo '2^70' | bc && sqlite3 :memory: 'select 6 * 7' && file -b a.json"
    )
    status, said = run_inside(
        ready_image("shell").id, "bash", "-c", script, environment={"HOME": "/tmp"}
    )
    assert status == 0, said
    assert said.splitlines() == [
        "first",
        "7",
        "1",
        "1180591620717411303424",
        "42",
        "JSON text data",
    ]


def test_node_runs_javascript_and_has_no_package_manager() -> None:
    status, said = run("node", "node", "-e", "console.log([3, 4].map(n => n ** 2).join())")
    assert (status, said) == (0, "9,16\n")
    script = "command -v npm npx yarn corepack || echo none"
    assert run("node", "bash", "-c", script) == (0, "none\n")


DATA_PROGRAM = """
import io, json, sys
import matplotlib, numpy as np, pandas as pd, seaborn
import matplotlib.pyplot as plt
table = pd.DataFrame({"key": np.arange(10_000) % 5, "value": np.arange(10_000.0)})
means = table.groupby("key")["value"].mean()
figure = plt.figure()
plt.plot(means); plt.title("Ünïcode $x^2$")
picture = io.BytesIO(); figure.savefig(picture, format="png")
book = io.BytesIO(); table.head().to_excel(book); book.seek(0)
print(json.dumps([means.tolist(), picture.getvalue()[1:4].decode(), len(picture.getvalue()) > 5000,
                  len(pd.read_excel(book)), table.head(1).to_markdown().count("|") > 5]))
"""


def test_data_program_reads_groups_plots_and_writes_without_warnings() -> None:
    """The output is two lines: warnings would be others. The second is of packages that programs
    commonly import."""
    status, said = run("python-data", "python3", "-c", DATA_PROGRAM + WANTED_PROGRAM)
    assert status == 0, said
    told, imported = said.splitlines()
    assert imported == "2026-05-02 {'a': [1, 2]} x (2, 3) https://a.example/?b=1"
    means, kind, is_drawn, rows, is_markdown = json.loads(told)
    assert means == [4997.5, 4998.5, 4999.5, 5000.5, 5001.5]
    assert (kind, is_drawn, rows, is_markdown) == ("PNG", True, 5, True)


WANTED_PROGRAM = """
import datetime, io
import dateutil.parser, lxml.etree, openpyxl, PIL.Image, requests, yaml
picture = io.BytesIO(); PIL.Image.new("RGB", (2, 3)).save(picture, "JPEG")
print(dateutil.parser.parse("2 May 2026").date(), yaml.safe_load("a: [1, 2]"),
      lxml.etree.fromstring("<a><b>x</b></a>").findtext("b"), PIL.Image.open(picture).size,
      requests.Request("GET", "https://a.example", params={"b": 1}).prepare().url)
"""


def test_prebuilt_matplotlib_font_cache_is_used() -> None:
    program = (
        "import os, pathlib, shutil\n"
        "shutil.copytree('/opt/fumehood/matplotlib', os.environ['MPLCONFIGDIR'])\n"
        "(kept,) = pathlib.Path(os.environ['MPLCONFIGDIR']).iterdir()\n"
        "os.utime(kept, (1, 1))\n"
        "import matplotlib.font_manager as fonts\n"
        "print(kept.stat().st_mtime, len(fonts.fontManager.ttflist) > 20, kept.name[:8])\n"
    )
    assert run("python-data", "python3", "-c", program) == (0, "1.0 True fontlist\n")


def test_numerical_libraries_stay_single_threaded_so_the_guest_can_fork() -> None:
    program = (
        "import numpy, os, pandas, matplotlib.pyplot\n"
        "numpy.ones((300, 300)) @ numpy.ones((300, 300))\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    assert run("python-data", "python3", "-c", program) == (0, "1\n")


def test_index_packages_match_the_lock_and_are_precompiled() -> None:
    program = (
        "import importlib.metadata as m, importlib.util as u, json, os\n"
        "found = {d.name: d.version for d in m.distributions(path=['/opt/fumehood/site'])}\n"
        "cached = u.cache_from_source('/opt/fumehood/site/pandas/core/frame.py')\n"
        "tests = [f for f, _, _ in os.walk('/opt/fumehood/site/pandas') if f.endswith('/tests')]\n"
        "print(json.dumps([found, open(cached, 'rb').read(8)[4:].hex(), tests]))\n"
    )
    status, said = run("python-data", "python3", "-c", program)
    assert status == 0, said
    found, kind, tests = json.loads(said)
    locked = {each.name: each.version for each in read_recipe("python-data").lock.packages}
    assert {name.lower().replace("_", "-"): version for name, version in found.items()} == locked
    assert kind == "01000000", "valid whatever time stamps the files have"
    assert tests == []
    image = ready_image("python-data")
    assert image.packages == ready_image("shell").packages + len(locked)
