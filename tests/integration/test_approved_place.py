"""An approval is bound to its image and runtime: if either changes, it expires."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import ApprovalState
from fumehood.storage.database import Database, open_database
from support.answers import code_of, error_of
from support.asking import add_approvers, approve
from support.wheels import only_from, write_wheel

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("A2", "S10")]

ASKS = '[[rules]]\nid = "look-first"\ndecision = "ask"\ntools = ["run_python"]\n'


def _engine(home: Path, database: Database, **container: Any) -> Engine:
    policy = home / "policy.toml"
    policy.write_text(ASKS)
    place: Any = {"pool_min": 0, "memory_mb": 128, "images": {"python": "python"}, **container}
    packages: Any = {"allow": ["*"]}
    config = Config(home=home, policy_file=policy, container=place, packages=packages)
    return Engine(config=config, database=database)


@pytest.mark.parametrize(
    ("changed", "ends"),
    [
        pytest.param({}, ApprovalState.DONE, id="unchanged"),
        pytest.param({"images": {"python": "python-data"}}, ApprovalState.EXPIRED, id="image"),
        pytest.param(
            {"runtime": "runsc"}, ApprovalState.EXPIRED, id="runtime",
            marks=pytest.mark.needs("runsc"),
        ),
    ],
)  # fmt: skip
async def test_approval_expires_if_image_or_runtime_changed_since_the_request(
    home: Path, changed: dict[str, Any], ends: ApprovalState
) -> None:
    """The program's definition, arguments and limits stay what they were."""
    database = open_database(home / "state.db")
    try:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            asked = await engine.call("run_python", {"code": "print(6 * 7)"})
            approval_id = error_of(asked).approval_id or ""
            shown = (await engine.approvals.show(approval_id)).binding
            assert shown is not None
            assert shown["place"]["image"] == "python"
            assert shown["place"]["image_digest"].startswith("sha256:")
        async with _engine(home, database, **changed) as engine:
            one = await approve(engine, approval_id)
            answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    finally:
        database.close()
    assert one.state is ends
    assert answer is not None
    if ends is ApprovalState.DONE:
        assert answer.data["stdout"] == "42\n"
        return
    assert code_of(answer) == "APPROVAL_EXPIRED"
    assert answer.error.details == {"changed": ["place"]}


@pytest.mark.parametrize(
    ("newer", "ends"), [(False, ApprovalState.DONE), (True, ApprovalState.EXPIRED)]
)
async def test_approval_expires_if_the_index_has_other_versions_since_the_request(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool, ends: ApprovalState
) -> None:
    for name, value in only_from(tmp_path).items():
        monkeypatch.setenv(name, value)
    write_wheel(tmp_path, "tool")
    code = {"code": "import tool; print(tool.VERSION)"}
    database = open_database(home / "state.db")
    try:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            asked = await engine.call("run_python", code, packages=["tool"])
            approval_id = error_of(asked).approval_id or ""
            shown = (await engine.approvals.show(approval_id)).binding
            assert shown is not None
            assert shown["place"]["packages"] == ["tool==1.0"]
        if newer:
            write_wheel(tmp_path, "tool", "2.0")
        async with _engine(home, database) as engine:
            one = await approve(engine, approval_id)
            answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    finally:
        database.close()
    assert one.state is ends
    assert answer is not None
    if ends is ApprovalState.DONE:
        assert answer.data["stdout"] == "1.0\n"
    else:
        assert answer.error is not None
        assert answer.error.details == {"changed": ["place"]}
