"""Request bodies from JSON: integral numbers are integers, and arguments stay unchanged."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from fumehood.core.call import MAX_KEYS, CallBody
from fumehood.core.errors import InvalidParams
from fumehood.pipeline.incoming import parse_batch, parse_call_body, parse_own_call


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


def test_argument_key_limit_matches_the_json_schema() -> None:
    validator = Draft202012Validator(CallBody.model_json_schema())
    for many in (MAX_KEYS, MAX_KEYS + 1):
        body = {"arguments": {f"k{number}": 1 for number in range(many)}}
        assert validator.is_valid(body) is (many == MAX_KEYS)
        if many == MAX_KEYS:
            parse_call_body(body)
        else:
            with pytest.raises(InvalidParams, match="more than 1000 keys"):
                parse_call_body(body)
