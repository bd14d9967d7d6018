"""`fumehood` without arguments: shows the engine's state, and suggests the next command.

The command needs no credential, and imports little so that it starts quickly. It shows the
approvals, calls and budgets of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from fumehood.cli.exits import say
from fumehood.cli.reach import caller_token, find_socket
from fumehood.cli.show import show_json, wants_json
from fumehood.client.api_request import ApiRequest, DaemonUnavailable, address, query_text
from fumehood.client.once import Connection, send_once
from fumehood.core.json_types import JsonObject

NEARLY_FULL = Decimal("0.8")
"""A budget is shown if at least this share of the budget is used."""

COUNTED = 20
"""Maximum number of pending approvals to count. The engine sends each of them with its
arguments."""

FIRST_CALL = """fumehood call calculator '{"expression": "2 + 2"}'"""


def show_overview() -> None:
    """Print the engine's state and the next command to run, as JSON if standard output is not a
    terminal.
    """
    found = overview(find_socket())
    if wants_json(False):
        show_json(found)
        return
    for name, text in _lines(found):
        say(f"{name:<11}{text}")


def overview(path: Path) -> JsonObject:
    """Return the state of the engine that listens on the socket `path` and, as `next`, the next
    command to run.

    If the engine does not answer, the field `engine` contains the reason.
    """
    found: JsonObject = {"engine": "ready", "socket": str(path)}
    try:
        Connection(path).close()
        found |= _state(path)
        return found | {"next": _next_step(found)}
    except PermissionError as refused:
        said = f"closed to you ({refused.strerror or refused})"
    except DaemonUnavailable as away:
        said = str(away)
    except (LookupError, TypeError, AttributeError, ArithmeticError):
        said = "not of this version"
    except OSError:
        is_service_s = path.is_relative_to("/run") and not path.is_relative_to("/run/user")
        start = "systemctl start fumehood" if is_service_s else "fumehood serve"
        return found | {"engine": "not running", "next": start}
    return found | {"engine": said, "next": "fumehood doctor"}


def share_of(spent: str | int, held: str | int, limit: str | int) -> Decimal:
    """Return the fraction of the budget `limit` that is spent or `held` for running calls. The
    result is 1 if all of the budget is used, or if `limit` is 0.
    """
    return (Decimal(spent) + Decimal(held)) / Decimal(limit) if Decimal(limit) else Decimal(1)


def _state(path: Path) -> JsonObject:
    ready = _ask(path, "ready", {})
    container = ready["walls"].get("container", {"ready": False, "missing": []})
    page = _ask(path, "approvals", {"state": "pending", "limit": COUNTED})["data"]
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    usage = _ask(path, "usage", {"since": hour_ago})["data"]
    shares = [(share_of(one["spent"], one["held"], one["limit"]), one) for one in usage["budgets"]]
    return {
        "engine": "ready" if ready["status"] == "ready" else "not ready",
        "pending_approvals": len(page["items"]),
        "has_more_approvals": page["pagination"]["has_more"],
        "calls_last_hour": usage["total"]["calls"],
        "errors_last_hour": usage["total"]["errors"],
        "budgets_near_limit": [
            {key: one[key] for key in ("budget", "subject", "unit", "limit")}
            | {"share": f"{share:.2f}"}
            | ({"currency": usage["currency"]} if one["unit"] == "money" else {})
            for share, one in shares
            if share >= NEARLY_FULL
        ],
        "containers": container["ready"],
        "missing_images": container["missing"],
    }


def _ask(path: Path, what: str, query: JsonObject) -> Any:
    """Send a GET request for the resource `what`, with `query`, to the engine that listens on the
    socket `path`. Return the answer. Raises PermissionError if the engine refuses the request.
    """
    request = ApiRequest("GET", address(what) + query_text(query), json.loads)
    answer = send_once(path, request, caller_token())
    if answer.get("error") is not None:
        raise PermissionError(answer["error"]["code"])
    return answer


def _next_step(found: JsonObject) -> str:
    if found["engine"] != "ready":
        return "fumehood doctor"
    if found["pending_approvals"]:
        return "fumehood approvals watch"
    if found["missing_images"]:
        return "fumehood images build"
    if found["budgets_near_limit"]:
        return "fumehood usage"
    return "fumehood calls tail" if found["calls_last_hour"] else FIRST_CALL


def _lines(found: JsonObject) -> Iterator[tuple[str, str]]:
    yield "engine", f"{found['engine']}, {found['socket']}"
    if "calls_last_hour" in found:
        more = " or more" if found["has_more_approvals"] else ""
        yield "approvals", f"calls of yours that wait: {found['pending_approvals']}{more}"
        calls, errors = found["calls_last_hour"], found["errors_last_hour"]
        yield "last hour", f"calls of yours: {calls}; with an error: {errors}"
        for one in found["budgets_near_limit"]:
            name = " of ".join([one["budget"], *map(str, one["subject"].values())])
            unit = one.get("currency", one["unit"])
            yield "budget", f"{name}: {Decimal(one['share']):.0%} of {one['limit']} {unit}"
        if found["containers"] or found["missing_images"]:
            yield "images", "; ".join(map(str, found["missing_images"])) or "present"
        else:
            yield "containers", "unavailable; for the reason: fumehood doctor"
    yield "next", found["next"]
    yield "", "All commands: fumehood --help"
