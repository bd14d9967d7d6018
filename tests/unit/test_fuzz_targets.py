"""The targets of `make fuzz` hold for many inputs, and fail where a promise is broken."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fumehood.gateway.request import Place, read_request
from fumehood.streams import sse
from fuzz import targets

MUTATIONS = 200


@pytest.mark.parametrize("name", targets.TARGETS)
def test_target_holds_for_its_examples_and_for_what_is_near_them(name: str) -> None:
    target, examples = targets.TARGETS[name]
    chance = random.Random(name)
    for example in examples:
        target(example)
        for _ in range(MUTATIONS):
            changed = bytearray(example)
            for _ in range(chance.randint(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            target(bytes(changed[: chance.randint(1, len(changed))]))


def test_gateway_target_fails_for_an_unclear_host(monkeypatch: pytest.MonkeyPatch) -> None:
    target, (example, *_) = targets.TARGETS["gateway"]
    target(example)

    def unclear(*given: object) -> object:
        return replace(read_request(*given), place=Place("http", "Example.com", 80))  # type: ignore[arg-type]

    monkeypatch.setattr(targets, "read_request", unclear)
    with pytest.raises(AssertionError):
        target(example)


def test_events_target_fails_for_a_decoder_that_loses_what_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, (example,) = targets.TARGETS["events"]

    whole = sse.Decoder

    class Forgetful(whole):  # type: ignore[misc, valid-type]
        def feed(self, chunk: bytes) -> list[sse.Frame]:
            return whole().feed(chunk)

    monkeypatch.setattr(targets.sse, "Decoder", Forgetful)
    with pytest.raises(AssertionError):
        target(example * 20)
