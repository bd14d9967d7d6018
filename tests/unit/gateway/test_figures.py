"""The gateway's metrics are sums over the calls that have ended."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.envelope import NetworkReport
from fumehood.gateway.in_engine import GatewayPart
from fumehood.observe.ended_call import EndedCall

pytestmark = pytest.mark.row("D5")


def ended(network: NetworkReport | None) -> EndedCall:
    return EndedCall("t", "OK", duration_s=1.0, is_fault=False, retries=0, network=network)


def test_requests_of_ended_calls_are_summed() -> None:
    unused: Any = None
    part = GatewayPart(unused)
    use = NetworkReport(
        requests=3, denied=1, held=2, bytes_in=10, bytes_out=20, hosts={"a.test": 3}, misused=1
    )
    for report in (use, None, use):
        part.on_call(ended(report))
    assert {one.name: one.value for one in part.figures()} == {
        "gateway_requests": 6, "gateway_denied": 2, "gateway_held": 4, "gateway_misused": 2,
        "gateway_bytes": {"in": 20.0, "out": 40.0},
    }  # fmt: skip
    assert {one.kind for one in part.figures()} == {"counter"}
