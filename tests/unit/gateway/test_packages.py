"""Which package a request to an index is for."""

from __future__ import annotations

import pytest

from fumehood.gateway.packages import PackageList

LISTED = PackageList(("index.test",), ("Charset_Normalizer", "six", "lodash", "@types/node"))


@pytest.mark.parametrize(
    "path",
    [
        "/simple/charset-normalizer/",
        "/simple/Charset.Normalizer",
        "/pypi/six/json",
        "/pypi/six/1.16.0/json?x=1",
        "/packages/ab/cd/ef/charset_normalizer-3.4.0-cp311-cp311-manylinux_2_17_x86_64.whl",
        "/packages/ab/cd/ef/six-1.16.0-py2.py3-none-any.whl.metadata",
        "/packages/ab/cd/ef/charset-normalizer-3.4.0.tar.gz",
        "/lodash",
        "/lodash/latest?/simple/evil",
        "/lodash/-/lodash-4.17.21.tgz",
        "/@types%2fnode",
        "/@types/node",
        "/@types/node/-/node-22.0.0.tgz",
    ],
)
def test_request_for_a_listed_package_passes(path: str) -> None:
    assert LISTED.has(path)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/simple/", "/simple", "/simple/evil/", "/simple/evil/six", "/pypi/evil/six/json",
        "/simple/six%2f..%2fevil/", "/simple/sixevil/", "/evil/-/six-1.0.tgz", "/evil/six",
        "/packages/six/evil-1.0-py3-none-any.whl", "/packages/six/six_evil-1.0-py3-none-any.whl",
        "/packages/six/six-evil-1.0.tar.gz", "/packages/evil%2fsix-1.0-py3-none-any.whl",
        "/packages/six/evil", "//lodash", "/Lodash", "/@types", "/@types/nodes", "/@evil/lodash",
        "/lodash%2f..%2fevil", "/-/v1/search?text=lodash",
    ],
)  # fmt: skip
def test_attack_request_for_another_package_passes(path: str) -> None:
    assert not LISTED.has(path)
