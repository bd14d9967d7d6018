"""Which programs are taken to need what an image preloads."""

from __future__ import annotations

import pytest

from fumehood.sandbox.container.imports import MAX_CHARACTERS, needs_preloaded


@pytest.mark.parametrize(
    "code",
    [
        "",
        "1 + 1",
        "import json",
        "import os.path, json as j; from collections import deque",
        "from __future__ import annotations\nimport sys  # for its version\n",
        "if True:\n    import math\n",
        "import re\nre.compile('x')",
        "important = 1\nfrom_here = important",
    ],
)
def test_a_program_of_the_standard_library_needs_nothing_else(code: str) -> None:
    assert not needs_preloaded(code)


@pytest.mark.parametrize(
    "code",
    [
        "import pandas",
        "import json, numpy as np",
        "import json; import pandas",
        "def f():\n    from pandas import DataFrame",
        "from matplotlib.pyplot import plot",
        "from . import json",
        "import helper",
        "import \\\n    pandas",
        "import\tpandas",
        "from\\\n pandas import DataFrame",
        "import ｐandas",
        "__import__('pan' + 'das')",
        "import importlib",
        'exec("imp" + "ort pandas")',
        "eval('1')",
        "compile('1', '', 'eval')",
        "getattr(__builtins__, '__imp' + 'ort__')('pandas')",
        "import sys\nsys.modules",
        "from sys import modules",
        "import pickle\npickle.load(open('table', 'rb'))",
        "import runpy",
        "x = 1\n" * MAX_CHARACTERS,
        "from\x0cpandas import x",
    ],
)
def test_every_doubt_is_settled_for_the_modules(code: str) -> None:
    assert needs_preloaded(code)


@pytest.mark.parametrize(
    ("code", "needs"),
    [
        ("import " * 9000, True),
        ("import " + " " * 60_000, True),
        ("from " * 12_000, False),
        ("from " + "a" * 60_000, False),
    ],
)
def test_a_long_strange_text_is_searched_in_linear_time(code: str, needs: bool) -> None:
    assert needs_preloaded(code) == needs
