"""The user ids of sandboxes: which ranges are taken, and which are refused."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from fumehood.direct import ids
from fumehood.direct.ids import FIRST_ID, IDS, LEAST_IDS, NoIds

OWN = pwd.getpwuid(os.getuid()).pw_name


def listed(tmp_path: Path, text: str) -> str:
    path = tmp_path / "subuid"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{OWN}:100000:65536\n", (100_000, 65_536)),
        (f"{os.getuid()}:100000:65536\n", (100_000, 65_536)),
        (f"other:1:65536\n{OWN}:5:20000\n{OWN}:300000:70000\n", (300_000, IDS)),
        (f"broken\n{OWN}:x:65536\n{OWN}:1\n{OWN}:7:{LEAST_IDS}", (7, LEAST_IDS)),
    ],
)
def test_largest_range_of_the_user_is_taken(
    text: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    assert ids.read_sub_ids(listed(tmp_path, text), os.getuid()) == expected


@pytest.mark.parametrize("text", ["", f"{OWN}:1:{LEAST_IDS - 1}\n", f"not{OWN}:1:65536\n"])
def test_user_with_too_few_ids_is_refused(text: str, tmp_path: Path) -> None:
    path = listed(tmp_path, text)
    with pytest.raises(NoIds, match=str(LEAST_IDS)):
        ids.read_sub_ids(path, os.getuid())
    with pytest.raises(NoIds):
        ids.read_sub_ids(f"{path}-missing", os.getuid())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["0 0 4294967295"], (FIRST_ID, IDS)),
        (["0 1000 1", "1 100000 65536"], (1, 65_536)),
        (["0 100000 65536"], (32_768, 32_768)),  # a pod with a user namespace of its own
        (["0 1000 1", "1 100000 20000", "20001 900000 30000"], (20_001, 30_000)),
    ],
)
def test_root_of_a_sandbox_is_not_the_user_who_runs_the_launcher(
    lines: list[str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "_lines", lambda path: lines)
    assert ids.ids_of_sandboxes() == expected
    is_of_host = expected[0] == FIRST_ID
    assert ids.overlay_options() == ("" if is_of_host else ",userxattr")


@pytest.mark.parametrize("lines", [["0 1000 1"], [], ["0 0 100"]])
def test_namespace_with_too_few_ids_is_refused(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "_lines", lambda path: lines)
    with pytest.raises(NoIds):
        ids.ids_of_sandboxes()
