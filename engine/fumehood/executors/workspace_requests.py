"""What the guest's program `files` is asked to do for a tool that changes a workspace.

Host side, pure. The survey before a decision and the action after it are made from one request, so
that they cannot be of different things.
"""

from __future__ import annotations

import base64

from fumehood.core.json_types import JsonObject


def write_request(arguments: JsonObject) -> JsonObject:
    """Of `write_file`."""
    return {
        "do": "write",
        "path": arguments["path"],
        "content_base64": base64.b64encode(content_of(arguments)).decode("ascii"),
        "mode": arguments.get("mode") or "create",
    }


def content_of(arguments: JsonObject) -> bytes:
    """What `write_file` is to write."""
    text = arguments.get("content")
    return base64.b64decode(arguments["content_base64"]) if text is None else text.encode()


def delete_request(arguments: JsonObject) -> JsonObject:
    """Of `delete_files`. A path that is named twice counts once."""
    paths = list(dict.fromkeys(arguments["paths"]))
    return {"do": "delete", "paths": paths, "recursive": arguments.get("recursive") or False}
