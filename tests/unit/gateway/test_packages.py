"""Which package a request to an index is for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fumehood.gateway.settings import GatewaySettings, ListedPackages

PYTHON = ListedPackages(python=("Charset_Normalizer", "six", "lodash"))
NPM = ListedPackages(npm=("lodash", "six", "@types/node"))


@pytest.mark.parametrize(
    ("listed", "path"),
    [
        (PYTHON, "/simple/charset-normalizer/"),
        (PYTHON, "/simple/Charset.Normalizer"),
        (PYTHON, "/pypi/six/json"),
        (PYTHON, "/pypi/six/1.16.0/json?x=1"),
        (PYTHON, "/packages/ab/charset_normalizer-3.4.0-cp311-cp311-manylinux_2_17_x86_64.whl"),
        (PYTHON, "/packages/ab/six-1.16.0-py2.py3-none-any.whl.metadata"),
        (PYTHON, "/packages/ab/charset-normalizer-3.4.0.tar.gz"),
        (NPM, "/lodash"),
        (NPM, "/lodash/latest?/simple/evil"),
        (NPM, "/lodash/-/lodash-4.17.21.tgz"),
        (NPM, "/@types%2fnode"),
        (NPM, "/@types/node"),
        (NPM, "/@types/node/-/node-22.0.0.tgz"),
    ],
)
def test_request_for_a_listed_package_passes(listed: ListedPackages, path: str) -> None:
    assert listed.has(path)


@pytest.mark.parametrize("listed", [PYTHON, NPM], ids=["python", "npm"])
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
def test_attack_request_for_another_package_passes(listed: ListedPackages, path: str) -> None:
    assert not listed.has(path)


@pytest.mark.parametrize(
    "path", ["/evil/lodash-1.zip", "/@evil/x/lodash-1.tar.gz", "/simple/lodash", "/pypi/lodash"]
)
def test_attack_path_that_means_something_else_in_another_kind_of_index_passes(path: str) -> None:
    """Twin: in its own kind it is that package's."""
    assert not NPM.has(path)
    assert PYTHON.has(path)


@pytest.mark.parametrize(
    ("packages", "fault"),
    [
        ({"other": {"npm": ["x"]}}, "other is not an index"),
        ({"own": {}}, "needs one of"),
        ({"own": {"npm": ["x"], "python": ["x"]}}, "needs one of"),
    ],
)
def test_list_of_packages_that_fits_no_index_is_refused(packages: object, fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        GatewaySettings.model_validate({"indexes": {"own": ["a.test"]}, "packages": packages})
