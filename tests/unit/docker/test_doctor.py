"""Findings of `doctor` on Docker and its images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from fumehood.cli.findings import Finding
from fumehood.config import Config
from fumehood.docker import doctor
from fumehood.docker.api import (
    DockerError,
    DockerNotPermitted,
    DockerNotRunning,
    DockerNotSupported,
    DockerTimeout,
)
from fumehood.docker.doctor import image_finding
from fumehood.docker.store import DockerStore
from fumehood.image_store.find import list_images
from fumehood.sandbox.images.catalog import guest_digest
from fumehood.sandbox.images.recipe import read_recipe
from fumehood.sandbox.settings import ContainerSettings, LanguageImages, SessionSettings
from support.docker_images import ListedImages, image_row, write_image_folder

pytestmark = pytest.mark.row("D7")

GOOD: dict[str, Any] = {
    "OSType": "linux", "MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True,
    "SwapLimit": True, "CgroupVersion": "2", "Runtimes": {"runc": {}, "runsc": {}, "io.x": {}},
    "DefaultRuntime": "runc", "SecurityOptions": ["name=seccomp,profile=default"],
    "MemTotal": 8 << 30, "DockerRootDir": "/",
}  # fmt: skip


def both(config: Config) -> Iterator[Finding]:
    yield from doctor.check(config)
    yield from doctor.check_images(config)


def version(**components: str) -> dict[str, Any]:
    parts = [{"Name": name, "Version": number} for name, number in components.items()]
    return {"Version": "29.0.0", "ApiVersion": "1.52", "Components": parts}


class Engine(ListedImages):
    """An engine that says what a test lets it say."""

    def __init__(self, *rows: dict[str, Any], **info: Any) -> None:
        super().__init__(*rows)
        self.said = {**GOOD, **info}
        self.components = version(runc="1.3.6", containerd="2.2.5")

    def version(self) -> dict[str, Any]:
        return self.components

    def info(self) -> dict[str, Any]:
        return self.said

    def close(self) -> None:
        pass


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """Findings on one engine, by check; on a host with swap and 4 GB free."""
    memory = SimpleNamespace(available=4 << 30)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor, "may_swap", lambda is_local: True if is_local else None)
    monkeypatch.delenv("DOCKER_HOST", raising=False)

    def look(engine: Engine, **settings: Any) -> dict[str, Finding]:
        monkeypatch.setattr(doctor, "open_docker", lambda: engine)
        settings.setdefault("images", dict.fromkeys(("python", "shell", "javascript"), "python"))
        return {
            finding.check: finding
            for finding in both(
                Config(
                    container=ContainerSettings(**settings),
                    sessions=SessionSettings(image="python"),
                )
            )
        }

    return look


def fresh_row(**changes: Any) -> dict[str, Any]:
    now = int(datetime.now(UTC).timestamp())
    chosen = {"recipe": read_recipe("python").digest, "guest": guest_digest(), "created": now}
    return image_row("sha256:" + "1" * 64, **(chosen | changes))


def test_doctor_finds_no_fault_in_a_good_docker_with_its_image(findings: Any) -> None:
    found = findings(Engine(fresh_row()))
    assert {finding.verdict for finding in found.values()} == {"ok"}, found
    assert found["docker: runtimes"].found == "runc, runsc (default: runc)"
    assert set(found) >= {"docker", "docker: cgroups", "docker: swap",
                          "docker: memory", "image: python"}  # fmt: skip


@pytest.mark.parametrize(
    ("info", "check", "words"),
    [
        ({"OSType": "windows"}, "docker", "on Linux"),
        ({"MemoryLimit": False}, "docker: cgroups", "controllers"),
        ({"PidsLimit": False}, "docker: cgroups", "controllers"),
        ({"CpuCfsQuota": False}, "docker: cgroups", "controllers"),
        (
            {"MemoryLimit": False, "SecurityOptions": ["name=rootless", "name=seccomp"]},
            "docker: cgroups",
            "delegation",
        ),
        ({"SwapLimit": False}, "docker: swap", "swapoff"),
        ({"SecurityOptions": []}, "docker: seccomp", "seccomp"),
        ({"SecurityOptions": ["name=seccomp,profile=unconfined"]}, "docker: seccomp", "seccomp"),
    ],
)
def test_doctor_warns_about_missing_docker_features_with_a_remedy(
    findings: Any, info: dict[str, Any], check: str, words: str
) -> None:
    found = findings(Engine(fresh_row(), **info))
    assert found[check].verdict == "warning"
    assert words in found[check].cure
    others = {name for name, finding in found.items() if finding.verdict != "ok"}
    assert others == {check}


def test_host_without_swap_needs_no_swap_limit(
    findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "may_swap", lambda is_local: False)
    assert findings(Engine(fresh_row(), SwapLimit=False))["docker: swap"].verdict == "ok"


def test_doctor_does_not_check_local_swap_for_a_remote_docker(
    findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2376")
    found = findings(Engine(fresh_row(), SwapLimit=False))
    assert found["docker: swap"].verdict == "warning"
    assert "unknown" in found["docker: swap"].found


def test_full_memory_is_a_warning(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=100 << 20)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    assert findings(Engine(fresh_row()))["docker: memory"].verdict == "warning"


UNUSABLE = (
    DockerNotRunning, DockerNotPermitted, DockerNotSupported, DockerTimeout, DockerError,
)  # fmt: skip


@pytest.mark.parametrize("failure", UNUSABLE)
def test_each_docker_fault_has_its_own_message_and_remedy(
    monkeypatch: pytest.MonkeyPatch, failure: type[DockerError]
) -> None:
    def refuse() -> None:
        raise failure("It is away.")

    monkeypatch.setattr(doctor, "open_docker", refuse)
    (finding,) = both(Config())
    assert (finding.check, finding.verdict) == ("docker", "warning")
    assert "It is away." in finding.found
    assert finding.cure == failure.remedy
    assert len({each.remedy for each in UNUSABLE}) == len(UNUSABLE)


@pytest.mark.row("S3")
def test_runtime_of_the_configuration_that_docker_lacks_is_a_warning(findings: Any) -> None:
    found = findings(Engine(fresh_row()), runtime="kata")["docker: runtimes"]
    assert (found.verdict, "'kata'" in found.found) == ("warning", True)
    assert "container.runtime" in found.cure
    found = findings(Engine(fresh_row()), runtime="runsc")["docker: runtimes"]
    assert (found.verdict, found.found.endswith("used: runsc")) == ("ok", True)


@pytest.mark.row("S10")
def test_doctor_warns_about_a_configured_image_without_a_recipe(findings: Any) -> None:
    found = findings(Engine(fresh_row()), images={"python": "pyhton"})["image: pyhton"]
    assert (found.verdict, found.cure) == (
        "warning", "Set container.images.python to an existing image: host, node, python, python-data, python-science, shell.",
    )  # fmt: skip


def test_doctor_warns_about_images_that_cannot_be_listed(findings: Any) -> None:
    class Failing(Engine):
        def images(self, *, filters: dict[str, Any]) -> list[dict[str, Any]]:
            raise APIError("500")

    found = findings(Failing())
    assert found["docker"].verdict == "ok"
    assert [name for name in found if name.startswith("image")] == ["image"]
    assert (found["image"].verdict, "cannot be listed" in found["image"].found) == ("warning", True)


def test_doctor_warns_about_a_docker_that_fails_after_its_first_answer(findings: Any) -> None:
    class Failing(Engine):
        def info(self) -> dict[str, Any]:
            raise APIError("500")

    assert set(findings(Failing())) == {"docker"}


@pytest.mark.row("S10")
@pytest.mark.parametrize(
    ("rows", "age", "found", "cure"),
    [
        ([], 0, "not built", "fumehood images build python"),
        ([fresh_row(guest="0" * 64)], 0, "another version", "fumehood images build python"),
        ([fresh_row()], 31, "31 days", "fumehood images build python --force"),
    ],
    ids=["missing", "other guest", "old"],
)
def test_doctor_names_the_command_that_builds_a_missing_image(
    rows: list[dict[str, Any]], age: int, found: str, cure: str
) -> None:
    images = list_images(DockerStore(ListedImages(*rows)), "python")
    finding = image_finding("python", images, datetime.now(UTC) + timedelta(days=age))
    assert finding.verdict == "warning"
    assert found in finding.found
    assert finding.cure.endswith(cure)


@pytest.mark.row("S10")
def test_image_that_the_configuration_does_not_use_may_be_missing(findings: Any) -> None:
    found = findings(Engine(fresh_row()))
    for name in ("python-data", "shell", "node"):
        assert (found[f"image: {name}"].verdict, "not built" in found[f"image: {name}"].found) == (
            "ok", True,
        )  # fmt: skip
        assert found[f"image: {name}"].cure.endswith(f"fumehood images build {name}")
    used = findings(Engine(fresh_row()), images=LanguageImages(python="shell"))["image: shell"]
    assert used.verdict == "warning"


def test_doctor_also_checks_the_operators_own_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_image_folder(tmp_path, "mine") / "mine"
    (folder / "requirements.in").write_text("", encoding="utf-8")
    monkeypatch.setattr(doctor, "open_docker", lambda: Engine(fresh_row()))
    config = Config(
        container=ContainerSettings(images=LanguageImages(python="mine")),
        sessions=SessionSettings(image="mine"),
        images_directory=folder.parent,
    )
    found = both(config)
    assert {f.check: f.verdict for f in found}["image: mine"] == "warning"


# -- known faults -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "verdict"),
    [
        ({"Name": "runc", "Version": "1.1.5", "Details": {"GitCommit": "v1.1.5-0-g123"}}, "warning"),
        ({"Name": "runc", "Version": "1.1.5+ds1",
          "Details": {"GitCommit": "1.1.5+ds1-1+deb12u1"}}, "warning"),
        ({"Name": "runc", "Version": "1.1.15+ds1",
          "Details": {"GitCommit": "1.1.15+ds1-2+deb13u2"}}, "ok"),
        ({"Name": "runc", "Version": "1.3.6"}, "ok"),
        ({"Name": "runc"}, "ok"),
    ],
)  # fmt: skip
def test_known_faults_of_a_component_are_named(
    component: dict[str, Any], verdict: str, findings: Any
) -> None:
    engine = Engine(fresh_row())
    engine.components = {**version(), "Components": [component]}
    found = findings(engine)["docker: known faults"]
    assert found.verdict == verdict
    if verdict == "warning":
        assert component["Details"]["GitCommit"] in found.found or "runc 1.1.5 " in found.found
        assert "CVE-2025-31133" in found.found
        assert "direct" in found.cure


def test_version_of_a_configured_runtime_is_asked_of_its_program(
    findings: Any, tmp_path: Path
) -> None:
    program = tmp_path / "runsc"
    program.write_text("#!/bin/sh\necho runsc version 0.0~20221219.0\necho spec: 1.0\n")
    program.chmod(0o700)
    runtimes = {"runc": {}, "runsc": {"path": str(program)}}
    engine = Engine(fresh_row(), Runtimes=runtimes)
    assert findings(engine)["docker: known faults"].verdict == "ok"
    found = findings(engine, runtime="runsc")["docker: known faults"]
    assert "runsc 0.0~20221219.0 has ptrace" in found.found
    program.unlink()
    assert findings(engine, runtime="runsc")["docker: known faults"].verdict == "ok"


def test_program_that_a_remote_docker_names_is_not_run(
    findings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, program = tmp_path / "ran", tmp_path / "runsc"
    program.write_text(f"#!/bin/sh\ntouch {ran}\necho runsc version 0.0~20221219.0\n")
    program.chmod(0o700)
    engine = Engine(fresh_row(), Runtimes={"runsc": {"path": str(program)}}, DefaultRuntime="runsc")
    findings(engine)
    assert ran.exists()  # the twin
    ran.unlink()
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    assert findings(engine)["docker: known faults"].verdict == "ok"
    assert not ran.exists()
