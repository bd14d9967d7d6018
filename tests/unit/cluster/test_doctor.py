"""What `doctor` says about a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.cli.doctor import show_findings
from fumehood.cli.findings import Finding
from fumehood.cluster import doctor, ray_membership
from fumehood.cluster.doctor import check
from fumehood.cluster.options import with_nodes
from fumehood.config import Config

HEAD = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("refused", "token", "address", "allows", "verdict", "words"),
    [
        (("disabled",), "secret", HEAD, False, "ok", "requires its token"),
        (("disabled",), "", HEAD, False, "warning", "Copy it from the head"),
        (("disabled", "token"), "wrong", HEAD, False, "warning", "Copy it from the head"),
        ((), "", HEAD, False, "warning", "RAY_AUTH_MODE=token"),
        ((), "", HEAD, True, "warning", "RAY_AUTH_MODE=token"),
        ((), "", "127.0.0.1:6379", False, "ok", "loopback only"),
        (None, "", HEAD, False, "warning", "Start it"),
    ],
)
def test_doctor_says_whether_the_cluster_can_be_used_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: tuple[str, ...] | None, token: str,
    address: str, allows: bool, verdict: str, words: str,
) -> None:  # fmt: skip
    def ran(asked: str, mode: str, on_start: object) -> str:
        if refused is None:
            raise OSError
        return f"{asked}\n{'refused' * (mode in refused)}"

    monkeypatch.setattr(ray_membership, "_ran", ran)
    monkeypatch.setattr(ray_membership, "_is_open", lambda host, port: False)
    monkeypatch.setattr(doctor, "find_spec", lambda _: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    settings = {"address": address, "allow_unauthenticated": allows}
    (found,) = check(Config.model_validate({"cluster": settings}))
    assert (found.check, found.verdict) == ("cluster", verdict)
    assert words in f"{found.found} {found.cure}"


def test_doctor_names_the_extra_if_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    (found,) = check(Config.model_validate({"cluster": {"address": "auto"}}))
    assert (found.verdict, "'PATH_OF_THE_CHECKOUT[cluster]'" in found.cure) == ("missing", True)
    assert list(check(Config())) == []


def test_cluster_is_a_group_between_the_limits_and_docker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("docker", "cluster", "jail: memory", "policy")
    show_findings([Finding(name, "ok", "well") for name in names], verbose=False)
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert lines == [
        "Authority: 1 of 1 ok: policy",
        "Limits: 1 of 1 enforced",
        "Cluster: 1 of 1 ok: cluster",
        "Docker: 1 of 1 ok: docker",
    ]


def test_option_of_serve_sets_the_address() -> None:
    assert with_nodes("10.0.0.1:6379") == {"cluster": {"address": "10.0.0.1:6379"}}
    assert with_nodes(None) is None
