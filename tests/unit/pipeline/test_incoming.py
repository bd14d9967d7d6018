"""Request bodies from JSON: integral numbers are integers, and arguments stay unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fumehood.batches.batch import parse_batch, parse_batch_call
from fumehood.batches.model import BatchOptions
from fumehood.call_options import CallOptions
from fumehood.core.errors import InvalidParams
from fumehood.pipeline.incoming import parse_call_body, parse_own_call


def test_integral_float_is_an_integer_in_options_and_unchanged_in_arguments() -> None:
    given = {"arguments": {"n": 2.0}, "options": {"memory_limit_mb": 269.0, "max_length": 1e3}}
    body = parse_call_body(given)
    assert (body.options.memory_limit_mb, body.options.max_length) == (269, 1000)
    assert json.dumps(body.arguments) == '{"n": 2.0}'
    assert parse_batch({"calls": [2.0], "options": {"max_parallel": 4.0}}).options.max_parallel == 4
    _, own = parse_own_call("calculator", {}, {"max_length": 7.0})
    assert own.options.max_length == 7


@pytest.mark.parametrize("wrong", [0.5, 0.0, -1.0, True, "2", 1e300])
def test_invalid_number_option_is_refused_by_name(wrong: object) -> None:
    options = {"max_length": 2.0, "memory_limit_mb": wrong}
    with pytest.raises(InvalidParams) as refused:
        parse_call_body({"arguments": {}, "options": options})
    assert refused.value.fields == ("options.memory_limit_mb",)


MISPLACED = [
    *((parse_call_body, {"arguments": {}}, name) for name in CallOptions.model_fields),
    *((parse_batch_call, {"tool": "calculator"}, name) for name in CallOptions.model_fields),
    *((parse_batch, {"calls": [1]}, name) for name in BatchOptions.model_fields),
]


@pytest.mark.parametrize(("parse", "body", "name"), MISPLACED)
def test_option_beside_options_is_told_where_it_belongs(
    parse: Callable[[Any], object], body: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        parse({**body, name: 1})
    assert f" is wrong: {name}: It is an option: put it into `options`." in refused.value.message
    assert refused.value.fields == (name,)


def test_twin_unknown_key_is_no_option() -> None:
    for body, path in (({"sesion_id": "x"}, "sesion_id"), ({"options": {"x": 1}}, "options.x")):
        with pytest.raises(InvalidParams, match=f"{path}: Extra inputs are not permitted"):
            parse_call_body(body)
