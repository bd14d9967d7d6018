"""A directory of the host is used only while its path means what was proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.core.errors import InvalidParams, PermissionDenied
from fumehood.projects.service import Claim, _look
from fumehood.projects.tree import ProjectDirectory


def test_parent_that_becomes_a_link_after_the_proof_leads_nowhere(tmp_path: Path) -> None:
    """Who writes in `mine` only must not reach `theirs` by a link in place of a parent."""
    mine, theirs = tmp_path / "mine/a/.ssh", tmp_path / "theirs/.ssh"
    for one in (mine, theirs):
        one.mkdir(parents=True)
    (theirs / "secret").write_text("theirs\n")
    (mine / "proof").touch()
    directory, found, _ = _look(Claim(mine, everything=True, proof="proof"))
    assert (directory, found) == (mine, [])
    claim = Claim(directory, everything=True)
    assert _look(claim)[1] == []

    mine.parent.rename(tmp_path / "mine/b")
    mine.parent.symlink_to("../theirs")

    with pytest.raises(InvalidParams):
        _look(claim)
    with pytest.raises(InvalidParams), ProjectDirectory(directory) as project:
        project.content("secret", 100)
    with pytest.raises(PermissionDenied):  # a new claim needs a new proof
        _look(Claim(mine, everything=True, proof="proof"))


@pytest.mark.parametrize("path", ["/tmp/a\0b", "{tmp}/loop/x", "/nowhere/at/all"])
def test_path_that_leads_to_no_directory_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidParams):
        _look(Claim(Path(path.format(tmp=tmp_path)), everything=True, proof="proof"))
