"""A gateway without an engine, to attack it: by default rules, and nobody says yes.

Host side, used by `attack`. Programs get what an engine's programs get.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from fumehood.core.errors import EngineError, PermissionDenied
from fumehood.core.json_types import JsonObject
from fumehood.gateway.door import Send
from fumehood.gateway.service import ENVIRONMENT, Gateway
from fumehood.gateway.settings import GatewaySettings
from fumehood.observe.log import quiet_logger
from fumehood.policy.model import CallFacts, Decision, Verdict
from fumehood.redaction.redactor import Redactor
from fumehood.registry.secrets import SecretBindings, SecretSettings
from fumehood.sandbox.wall import CallPort, Network

OF_THE_SECRET = "SECRET"
"""The variable of programs with the placeholder."""


@asynccontextmanager
async def trial_gateway(
    hosts: Sequence[str], allowed: Sequence[str], secret: str
) -> AsyncIterator[tuple[Network, Mapping[str, str]]]:
    """Yield a network to `hosts`, and the variables of its programs. Of these hosts, `allowed` may
    be at addresses that are not public, and get the secret in the engine's variable `secret`.
    """
    settings = GatewaySettings.model_validate({"hosts": hosts, "allowed_hosts": allowed})
    bound = SecretSettings(env=secret, hosts=settings.allowed_hosts, inside=OF_THE_SECRET)
    gateway = Gateway(
        settings, _by_default, None, SecretBindings({"trial": bound}), _forget, quiet_logger()
    )
    async with gateway.door(
        settings.hosts, _refuse, Redactor(), tool="run_python", call_id="trial",
        principal_id="attack", agent_id=None, session_id=None,
    ) as (door, network):  # fmt: skip
        yield network, {**ENVIRONMENT, **door.placeholders.environment}


def _by_default(facts: CallFacts) -> Decision:
    return Decision(Verdict.ASK, "default: nothing was set")


async def _refuse(arguments: JsonObject, send: Send, port: CallPort) -> EngineError | None:
    return PermissionDenied("Nobody says yes here.")


async def _forget(kind: str, fields: JsonObject) -> None:
    pass
