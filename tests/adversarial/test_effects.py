"""The `approval` boundary of files: programs that change files between preview and execution.

A session's programs may change its workspace before the preview and again before the execution. The
tests use a real container, whose own programs check the outcome.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from fumehood.core.errors import WorkspaceChanged
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.sandbox.images.catalog import Image
from fumehood_tools.delete_files import delete_files
from fumehood_tools.write_file import write_file
from support.attacks import Harm
from support.effect_files import EffectFiles
from support.one_container import one_container

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("A2")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def shared(python_image: Image) -> AsyncIterator[EffectFiles]:
    async with one_container(python_image) as box:
        yield EffectFiles(box)


@pytest.fixture
async def files(shared: EffectFiles) -> AsyncIterator[EffectFiles]:
    yield shared
    await shared.empty()


DELETE = (delete_files, {"paths": ["d"], "recursive": True})
REPLACE = (write_file, {"path": "d/f", "content": "new\n", "mode": "replace"})
APPEND = (write_file, {"path": "d/f", "content": "new\n", "mode": "append"})


@dataclass(frozen=True)
class Switch:
    """A change that replaces the previewed files by something that looks the same."""

    name: str
    harm: Harm
    command: str
    calls: tuple[tuple[ToolDefinition, JsonObject], ...] = (DELETE, REPLACE, APPEND)
    keep: str = "cat keep d/f was/f 2>/dev/null | sort -u"
    """A command that must print the same before and after."""
    set_up: str = field(default="mkdir d; echo shown > d/f; echo kept > keep")

    def __str__(self) -> str:
        return self.name


SWITCHES = [
    Switch("other-content-with-equal-size-and-time", Harm.INTEGRITY,
           "touch -r d/f /tmp/t; echo other > d/f; touch -r /tmp/t d/f"),
    Switch("symlink-to-another-file", Harm.INTEGRITY, "rm d/f; ln -s ../keep d/f"),
    Switch("hard-link-to-another-file", Harm.INTEGRITY, "rm d/f; ln keep d/f"),
    Switch("hard-link-added-to-previewed-file", Harm.INTEGRITY, "ln d/f was", (APPEND, REPLACE)),
    Switch("directory-replaced-by-symlink", Harm.INTERNAL_ESC, "mv d was; ln -s was d"),
    Switch("directory-replaced-by-symlink-out-of-workspace", Harm.INTERNAL_ESC,
           "mv d was; ln -s /etc d"),
    Switch("file-added-to-directory", Harm.INTEGRITY, "mv keep d/keep", (DELETE,),
           keep="cat d/keep"),
    Switch("file-added-under-reserved-name", Harm.INTEGRITY,
           "mv keep d/.fumehood-upload-0123456789abcdef0123456789abcdef", (DELETE,),
           keep="cat d/.f*"),
    Switch("file-added-under-undecodable-name", Harm.INTEGRITY,
           "mv keep d/$'\\xff'", (DELETE,), keep="cat d/$'\\xff'"),
    Switch("file-replaced-by-directory", Harm.INTEGRITY,
           "rm d/f; mkdir d/f; mv keep d/f/", (DELETE,), keep="cat d/f/keep"),
    Switch("file-replaced-by-fifo", Harm.PEER_DOS, "rm d/f; mkfifo d/f", keep="cat keep"),
    Switch("file-made-executable", Harm.INTEGRITY, "chmod 755 d/f"),
]  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
async def test_file_call_is_refused_if_previewed_files_were_switched(
    files: EffectFiles, switch: Switch
) -> None:
    for tool, arguments in switch.calls:
        await files.shell("find . -mindepth 1 -delete")
        await files.shell(switch.set_up)
        shown = await files.effect(tool, arguments)
        await files.shell(switch.command)
        before = await files.shell(switch.keep)
        assert before
        with pytest.raises(WorkspaceChanged):
            await files.act(tool, arguments, shown.base)
        assert await files.shell(switch.keep) == before


async def test_twin_file_call_runs_if_previewed_files_are_unchanged(files: EffectFiles) -> None:
    """The session's programs run in between and change other files."""
    for tool, arguments in (DELETE, REPLACE, APPEND):
        await files.shell("find . -mindepth 1 -delete; mkdir d; echo shown > d/f; echo 1 > keep")
        shown = await files.effect(tool, arguments)
        await files.shell("echo 2 > keep; mkdir other; cat d/f")
        assert (await files.act(tool, arguments, shown.base)).error is None
        left = await files.shell("cat d/f 2>/dev/null; true")
        assert left == {"append": "shown\nnew\n", "replace": "new\n"}.get(
            arguments.get("mode", ""), ""
        )


async def test_control_switch_succeeds_without_comparison_to_preview(files: EffectFiles) -> None:
    await files.shell("mkdir d; echo shown > d/f; echo kept > keep")
    await files.effect(*DELETE)
    await files.shell("mv keep d/keep")
    assert (await files.act(*DELETE, None)).error is None
    assert await files.shell("ls -A") == ""


LEFT_BEHIND = [
    (
        "import subprocess\n"
        "subprocess.Popen(['setsid', 'sh', '-c', 'while :; do echo more >> d/f; done'])"
    ),
    (
        "import threading\n"
        "def write():\n"
        "    while True:\n"
        "        open('d/f', 'a').write('more')\n"
        "threading.Thread(target=write, daemon=True).start()"
    ),
    (
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: open('d/f', 'a').write('more'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)"
    ),
]


@pytest.mark.parametrize("program", LEFT_BEHIND, ids=["process", "thread", "timer"])
async def test_leftover_writers_are_stopped_between_preview_and_execution(
    files: EffectFiles, program: str
) -> None:
    await files.shell("mkdir d; echo shown > d/f")
    ended = await files.box.python(program)
    assert ended.ended_by.value == "ok", ended.stderr
    shown = await files.effect(*DELETE)
    for _ in range(3):
        assert (await files.effect(*DELETE)).base == shown.base
    assert (await files.act(*DELETE, shown.base)).error is None
    assert await files.shell("ls -A") == ""


async def test_preview_shows_hard_links_that_would_also_be_written(files: EffectFiles) -> None:
    """An approver of a log line must know that it is also written into a program."""
    await files.shell("mkdir d; echo pass > program.py; ln program.py d/f")
    (changed,) = (await files.effect(*APPEND)).shown["changed"]
    assert changed["other_names"] == 1
    await files.shell("rm program.py")
    (changed,) = (await files.effect(*APPEND)).shown["changed"]
    assert "other_names" not in changed  # the twin


async def test_diff_markers_in_file_content_cannot_forge_preview_diff(files: EffectFiles) -> None:
    """Hunk and file headers within a text are marked as its lines."""
    await files.shell(
        r"mkdir d; printf -- '@@ -1 +1 @@\n-safe\n+++ other\n\\ No newline at end of file' > d/f"
    )
    (changed,) = (await files.effect(*REPLACE)).shown["changed"]
    lines = changed["diff"].split("\n")
    assert [line for line in lines if line.startswith("@@")] == ["@@ -1,4 +1 @@"]
    assert [line[1:] for line in lines if line.startswith("-")][:3] == [
        "@@ -1 +1 @@", "-safe", "+++ other",
    ]  # fmt: skip


async def test_diff_of_worst_case_texts_is_bounded_and_truncated(files: EffectFiles) -> None:
    """Two texts of repeated lines with nothing in common are shown as removed and added."""
    await files.shell("mkdir d; yes a | head -c 200000 > d/f")
    content = "b\na\n" * 40_000
    found = await files.effect(write_file, {"path": "d/f", "content": content, "mode": "replace"})
    (changed,) = found.shown["changed"]
    assert changed["diff_truncated"] is True
    assert len(changed["diff"].encode()) <= 16 * 1024
