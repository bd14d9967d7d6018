"""The table of planted faults names places and suites that exist. `make planted` plants them."""

from __future__ import annotations

import pytest

from support.parts import PACKAGE, ROOT
from support.seams import Seam, read_seams

SEAMS = read_seams()


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_planted_fault_has_its_place_and_its_suite(seam: Seam) -> None:
    code = (ROOT / PACKAGE / seam.file).read_text(encoding="utf-8")
    assert code.count(seam.text) == 1
    compile(code.replace(seam.text, seam.fault), seam.file, "exec")
    assert seam.fault != seam.text
    assert (ROOT / "tests" / seam.suite[0]).is_file()
