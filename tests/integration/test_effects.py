"""Effect previews in real containers: they match the change, and stale ones refuse it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fumehood.sandbox.images.catalog import Image
from fumehood_tools.delete_files import delete_files
from fumehood_tools.write_file import write_file
from support.effect_files import EffectFiles
from support.one_container import one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("A2", "S6")]


ON_BOTH_RUNTIMES = pytest.mark.parametrize(
    "shared", ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))], indirect=True
)
"""For what depends on the kernel that programs see."""


@pytest.fixture(scope="module")
async def shared(request: pytest.FixtureRequest, python_image: Image) -> AsyncIterator[EffectFiles]:
    async with one_container(python_image, runtime=getattr(request, "param", "runc")) as box:
        yield EffectFiles(box)


@pytest.fixture
async def files(shared: EffectFiles) -> AsyncIterator[EffectFiles]:
    yield shared
    await shared.empty()


TREE = (
    "mkdir -p d/e; echo text > d/f; echo -n secret > d/e/hidden; ln -s /etc d/l; mkfifo d/p; "
    "touch d/.fumehood-upload-x d/$'\\xff' d/$'a\\nb'; echo other > g"
)


async def test_approved_preview_matches_the_performed_change(files: EffectFiles) -> None:
    await files.shell(TREE)
    arguments = {"path": "d/f", "content": "more\n", "mode": "append"}
    found = await files.effect(write_file, arguments)
    (changed,) = found.shown["changed"]
    assert changed["diff"] == "@@ -1 +1,2 @@\n text\n+more\n"
    assert (await files.act(write_file, arguments, found.base)).error is None
    assert changed["after"]["sha256"] in await files.shell("sha256sum d/f")
    found = await files.effect(delete_files, {"paths": ["d"], "recursive": True})
    done = await files.act(delete_files, {"paths": ["d"], "recursive": True}, found.base)
    assert done.data["deleted"] == ["d"]
    assert await files.shell("ls -A") == "g\n"


@ON_BOTH_RUNTIMES
@pytest.mark.parametrize(
    ("set_up", "arguments"),
    [
        ("mkdir d; chmod 500 d", {"path": "d/new", "content": "x"}),
        ("mkdir d; touch d/f; chmod 500 d", {"path": "d/f", "content": "x", "mode": "replace"}),
        ("touch f; chmod 400 f", {"path": "f", "content": "x", "mode": "append"}),
        ("mkdir d; chmod 600 d", {"path": "d/f", "content": "x"}),
    ],
)
async def test_write_without_permission_is_predicted_to_fail(
    files: EffectFiles, set_up: str, arguments: dict[str, Any]
) -> None:
    await files.shell(set_up)
    before = await files.state()
    found = await files.effect(write_file, arguments)
    assert "Permission denied" in found.shown["would_fail"]
    done = await files.act(write_file, arguments, found.base)
    assert done.error is not None
    assert await files.state() == before


@ON_BOTH_RUNTIMES
async def test_preview_of_large_sparse_files_does_not_read_them_whole(files: EffectFiles) -> None:
    """Their total apparent size is far larger than the workspace."""
    await files.shell("mkdir d; for n in $(seq 30); do truncate -s 100M d/$n 2>/dev/null; done")
    found = await files.effect(delete_files, {"paths": ["d"], "recursive": True})
    assert found.shown["counts"]["removed"] == 31
    assert any(one.get("unread") for one in found.shown["removed"])


async def test_preview_ignores_planted_modules_in_the_workspace(files: EffectFiles) -> None:
    """The preview must not import modules from the workspace."""
    await files.shell("echo 'raise SystemExit(9)' | tee hashlib.py json.py base64.py stat.py")
    found = await files.effect(delete_files, {"paths": ["json.py"]})
    assert (await files.act(delete_files, {"paths": ["json.py"]}, found.base)).error is None


async def test_session_variables_survive_a_preview(files: EffectFiles) -> None:
    await files.box.python("x = 1")
    await files.effect(write_file, {"path": "f", "content": "x"})
    assert value_of(await files.box.python("x")) == 1
