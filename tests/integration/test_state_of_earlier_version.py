"""A state directory of an earlier version: every stored promise is kept.

`data/state-before-packages` was written by a daemon of commit d193206, at `WRITTEN_AT`, under a
policy that asks about sums starting with 2: a pending call, one denied, one approved and done,
one answered under an idempotency key, a session that was ended, and the audit chain of all that.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import ApprovalQuery, ApprovalState, NewDecision
from fumehood.call_options import CallBody
from fumehood.executors.base import CallHandle
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import ManualClock

WRITTEN = Path(__file__).parent / "data" / "state-before-packages"
WRITTEN_AT = datetime(2026, 11, 22, 14, 36, tzinfo=UTC)
CREDENTIAL = "fha_ae76c89a7e09d521_Q17K9o46NNwepDghDrmgTW488XLlbv3v7CkWWfywGuY"
CALLER = 0
"""The uid that made the calls."""

WAITING, DENIED, DONE = (
    "apr_fd2ba82c883d214e1812151e", "apr_3c81ee8df71890e7002bb1a4", "apr_84774ccf5841f91b4350e465",
)  # fmt: skip
SESSION = "sess_9a510cabade6e9bfdf85bcd34a39180b"
ANSWERED_CALL = "call_58dbf60185fd491d5d0126d1"
POLICY = """
[[rules]]
id = "ask-for-sums"
decision = "ask"
tools = ["calculator"]
reason = "Sums are looked at."
[[rules.when]]
argument = "/expression"
prefix = "2"
"""


@pytest.fixture
def config(home: Path) -> Config:
    for file in WRITTEN.iterdir():
        shutil.copyfile(file, home / file.name)
        (home / file.name).chmod(0o600)
    policy = home / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    policy.chmod(0o600)
    return Config(home=home, policy_file=policy)


@pytest.mark.anyio
async def test_state_of_an_earlier_version_keeps_approvals_keys_sessions_and_audit(
    config: Config,
) -> None:
    database = open_database(config.home / FILE_NAME)
    clock = ManualClock(WRITTEN_AT)
    async with Engine(config=config, clock=clock, database=database) as engine:
        assert (await engine.audit.verify()).intact
        page = await engine.approvals.list(ApprovalQuery())
        states = {item.id: item.state for item in page.items}
        assert states == {
            WAITING: ApprovalState.PENDING, DENIED: ApprovalState.DENIED, DONE: ApprovalState.DONE,
        }  # fmt: skip

        caller = engine.principal_of_uid(CALLER)
        body = CallBody.model_validate(
            {
                "arguments": {"expression": "1 + 1"},
                "options": {"idempotency_key": "done-before"},
            }
        )
        again = await engine.run("calculator", body, caller)
        assert again.metadata.call_id == ANSWERED_CALL
        assert again.data["value"] == 2

        assert [record.id for record in engine.sessions.list(caller)] == [SESSION]

        approver = await engine.approvers.principal_of(CREDENTIAL)
        await engine.approvals.decide(
            WAITING, NewDecision(decision="approve"), approver, channel="cli"
        )
        answer = await engine.approvals.requests.wait(WAITING, 10, CallHandle())
        assert answer.data["value"] == 4
        assert (await engine.audit.verify()).intact
    database.close()
