"""A call as it comes in: what is wrong with it is said so that it can be mended."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import InvalidParams
from fumehood.pipeline.incoming import parse_call_body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"options": {"timout_seconds": 1}}, "options.timout_seconds: .* 'timeout_seconds'"),
        ({"options": {"memory_mb": 1}}, "options.memory_mb: .* 'memory_limit_mb'"),
        ({"argumnets": {}}, "argumnets: .* 'arguments'"),
    ],
)
def test_misspelt_key_is_told_the_near_ones(body: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParams, match=says):
        parse_call_body(body)


def test_key_that_is_near_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(InvalidParams) as refused:
        parse_call_body({"options": {"zzz": 1, "x" * 5000: 2}})
    assert "Did you mean" not in str(refused.value)
    assert len(str(refused.value)) < 1000
