"""`fumehood` without arguments: the state of the engine, and the next sensible step.

It needs no credential, and imports very little: it is for a glance. Figures are the caller's own.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from fumehood.cli.escaping import say
from fumehood.cli.reach import caller_token
from fumehood.cli.settings import find_socket
from fumehood.cli.show import show_json, wants_json
from fumehood.client.api_request import ApiRequest, DaemonUnavailable, address, query_text
from fumehood.client.once import send_once
from fumehood.core.json_types import JsonObject

NEARLY_FULL = Decimal("0.8")
"""The part of a budget from which on it is worth a word."""

COUNTED = 20
"""Pending approvals that are fetched to be counted: each comes with its arguments."""

FIRST_CALL = """fumehood call calculator '{"expression": "2 + 2"}'"""


def show_overview() -> None:
    """Print the overview; as JSON if standard output is not a terminal."""
    found = overview(find_socket())
    if wants_json(False):
        show_json(found)
        return
    for name, text in _lines(found):
        say(f"{name:<11}{text}")


def overview(path: Path) -> JsonObject:
    """Ask the engine for its state; without an answer, `engine` says so."""
    found: JsonObject = {"engine": "ready", "socket": str(path)}
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except PermissionError:
        return found | {"engine": "closed to this user", "next": "fumehood doctor"}
    except OSError:
        is_service_s = path.is_relative_to("/run") and not path.is_relative_to("/run/user")
        start = "systemctl start fumehood" if is_service_s else "fumehood serve"
        return found | {"engine": "not running", "next": start}
    try:
        found |= _state(path)
    except (DaemonUnavailable, LookupError, TypeError, AttributeError, ArithmeticError) as fault:
        said = str(fault) if isinstance(fault, DaemonUnavailable) else "not of this version"
        return found | {"engine": f"no answer: {said}", "next": "fumehood doctor"}
    return found | {"next": _next_step(found)}


def share_of(spent: str | int, held: str | int, limit: str | int) -> Decimal:
    """Return how much of a budget is spent or reserved: 1 is all of it."""
    return (Decimal(spent) + Decimal(held)) / Decimal(limit) if Decimal(limit) else Decimal(1)


def _state(path: Path) -> JsonObject:
    ready = _ask(path, address("ready"))
    container = ready["walls"].get("container", {"ready": False, "missing": []})
    found: JsonObject = {
        "engine": "ready" if ready["status"] == "ready" else "not ready",
        "containers": container["ready"],
        "missing_images": container["missing"],
    }
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    waiting = _ask(path, address("approvals") + query_text({"state": "pending", "limit": COUNTED}))
    usage = _ask(path, address("usage") + query_text({"since": hour_ago.isoformat()}))
    for answer in (waiting, usage):
        if answer["error"] is not None:
            return found | {"refused": answer["error"]["code"]}
    budgets = [
        {name: one[name] for name in ("budget", "subject", "unit", "limit")}
        | {"share": f"{share:.2f}"}
        for one in usage["data"]["budgets"]
        if (share := share_of(one["spent"], one["held"], one["limit"])) >= NEARLY_FULL
    ]
    total = usage["data"]["total"]
    return found | {
        "pending_approvals": len(waiting["data"]["items"]),
        "has_more_approvals": waiting["data"]["pagination"]["has_more"],
        "calls_last_hour": total["calls"],
        "errors_last_hour": total["errors"],
        "budgets_near_limit": budgets,
    }


def _ask(path: Path, target: str) -> Any:
    return send_once(path, ApiRequest("GET", target, json.loads), caller_token())


def _next_step(found: JsonObject) -> str:
    if found["engine"] != "ready" or "refused" in found:
        return "fumehood doctor"
    if found["pending_approvals"]:
        return "fumehood approvals watch"
    if found["missing_images"]:
        return "fumehood images build"
    if found["budgets_near_limit"]:
        return "fumehood usage --plot"
    return "fumehood calls tail" if found["calls_last_hour"] else FIRST_CALL


def _lines(found: JsonObject) -> Iterator[tuple[str, str]]:
    yield "engine", f"{found['engine']}, {found['socket']}"
    if "refused" in found:
        yield "calls", f"refused to you: {found['refused']}"
    if "calls_last_hour" in found:
        more = " or more" if found["has_more_approvals"] else ""
        yield "approvals", f"calls of yours that wait: {found['pending_approvals']}{more}"
        calls, errors = found["calls_last_hour"], found["errors_last_hour"]
        yield "last hour", f"calls of yours: {calls}; with an error: {errors}"
        for one in found["budgets_near_limit"]:
            whose = ", ".join(map(str, one["subject"].values()))
            name = f"{one['budget']} ({whose})" if whose else one["budget"]
            yield "budget", f"{name}: {Decimal(one['share']):.0%} of {one['limit']} {one['unit']}"
    if "containers" in found:
        missing = "; ".join(map(str, found["missing_images"]))
        yield "images", missing or ("present" if found["containers"] else "no containers now")
    yield "next", found["next"]
    yield "", "All commands: fumehood --help"
