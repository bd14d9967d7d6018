"""A thousand tools as each provider takes them: converted, kept, and over the socket."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.line import Line
from fumehood import Config, Engine
from fumehood.formats.exports import Exports
from fumehood.formats.model import FormatName
from fumehood.protocol.messages import encode_envelope
from fumehood.registry.definitions import parse_definition

TOOLS = 1000
TIMES = 7
TARGET_MS = 100


def format_lines() -> Iterator[Line]:
    """Converting, giving again what was kept, and the bytes of the answer."""
    documents = [_document(number) for number in range(TOOLS)]
    definitions = [parse_definition(document) for document in documents]
    with tempfile.TemporaryDirectory(prefix="fh-bench-", dir="/tmp") as home:
        Path(home).chmod(0o700)
        engine = Engine(documents, config=Config(home=Path(home)))
        for name in get_args(FormatName):
            new_ms = _median_ms(lambda n=name: Exports().of_all(n, definitions))  # type: ignore[misc]
            yield Line(
                f"{TOOLS} tools exported as {name}", f"≤ {TARGET_MS} ms", f"{new_ms:.1f} ms",
                new_ms <= TARGET_MS,
            )  # fmt: skip
        engine.export_for(engine.owner, "openai")
        again_ms = _median_ms(lambda: engine.export("openai"))
        yield Line(
            "the same again, as a program's own to change", f"≤ {TARGET_MS} ms",
            f"{again_ms:.1f} ms", again_ms <= TARGET_MS,
        )  # fmt: skip
        answer_ms = _median_ms(lambda: _answer(engine))
        yield Line(
            "the same again, as the bytes of the answer", f"≤ {TARGET_MS} ms",
            f"{answer_ms:.1f} ms", answer_ms <= TARGET_MS,
        )  # fmt: skip
        engine.database.close()


def _answer(engine: Engine) -> bytes:
    exported = engine.export_for(engine.owner, "openai")
    return encode_envelope(engine.answer(exported.model_dump(mode="json")))


def _median_ms(run: Any) -> float:
    took = []
    for _ in range(TIMES):
        before = time.perf_counter()
        run()
        took.append(1000 * (time.perf_counter() - before))
    return median(took)


def _document(number: int) -> dict[str, Any]:
    """A tool of the usual size: six parameters, of which one is an object and one a list."""
    place = {
        "type": "object", "required": ["city"], "additionalProperties": False,
        "properties": {"city": {"type": "string"}, "country": {"enum": ["NO", "SE", "DK"]}},
    }  # fmt: skip
    return {
        "name": f"find_{number}", "type": "MCP", "read_only": True,
        "description": f"Find orders of the kind {number}. It only reads.",
        "input_examples": [{"query": "open orders"}],
        "parameters": {
            "properties": {
                "query": {"type": "string", "minLength": 2, "maxLength": 300},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 5},
                "state": {"type": "string", "enum": ["open", "closed", "any"]},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 9},
                "since": {"type": ["string", "null"], "format": "date", "default": None},
                "place": place,
            },
            "required": ["query"], "additionalProperties": False,
        },
    }  # fmt: skip
