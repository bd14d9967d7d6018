"""The tool `fetch_url`: one GET request to a URL that the caller chooses.

Host side. Requests and errors are those of `executor.py`. The URL is treated as hostile: it may
lead into networks of this host, or contain data that the caller wants to leak. Invariants:

* Nothing is sent unless the operator has enabled the tool.
* The tool shares no connections with REST tools, so it cannot reach hosts that only they may reach.
* The request contains no secret and no call id.
"""

from __future__ import annotations

import base64
import html
import re
from dataclasses import replace
from functools import partial
from urllib.parse import unquote, urlsplit

import anyio.to_thread
import re2

from fumehood.core.errors import ArgumentsRefused
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import INLINE_BYTES
from fumehood.core.returned_file import FILE_CONTENT
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.outgoing.in_engine import Outgoing
from fumehood.outgoing.secret_values import SecretValues
from fumehood.outgoing.upstreams import UpstreamAnswer, UpstreamRequest
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.registry.definitions import url_faults
from fumehood.registry.index import RegisteredTool
from fumehood.rest.executor import Read, is_json, perform

HTML = frozenset({"text/html", "application/xhtml+xml"})
HEADERS = (
    ("accept", "text/html, application/json;q=0.9, text/*;q=0.9, */*;q=0.5"),
    ("user-agent", "fumehood"),
)

# Name of an encoding → Python's codec. *Source*: the WHATWG's Encoding Standard. Python's other
# codecs are not for web pages. Some of them are very slow, and some decompress.
_CODECS = {
    **dict.fromkeys(("ascii", "us-ascii", "iso-8859-1", "latin1", "windows-1252"), "windows-1252"),
    **{name: name for name in ("utf-8", "utf-16", "utf-16le", "utf-16be", "big5", "euc-jp")},
    **{name: name for name in ("euc-kr", "shift_jis", "iso-2022-jp", "koi8-r", "koi8-u")},
    **dict.fromkeys(("gb2312", "gbk", "gb18030"), "gb18030"),
    **{f"windows-{number}": f"windows-{number}" for number in range(1250, 1259)},
    "windows-874": "cp874",
    **{f"iso-8859-{part}": f"iso-8859-{part}" for part in (*range(2, 9), 10, 13, 14, 15, 16)},
}
_CHARSET = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9_-]{1,30})""", re.IGNORECASE)
_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class FetchExecutor(Executor):
    """Runs the tool `fetch_url`."""

    place = Placement(
        "host",
        "host",
        "the executor 'http:fetch' sends the request from the engine's own process, to public "
        "addresses and to the hosts that web.allowed_hosts names",
    )

    def sends(
        self,
        tool: RegisteredTool,
        arguments: JsonObject,
        cursors: Cursors,
        principal_id: str,
    ) -> JsonObject | None:
        return fetch_request(arguments).shown

    async def run(self, run: ToolRun) -> Outcome:
        """Fetch the URL in the arguments of the call. Return an outcome with its content as the
        data.
        """

        async def read(answer: UpstreamAnswer, values: SecretValues) -> Read:
            def make() -> JsonObject:
                headers = {name: values.text(text) for name, text in answer.headers.items()}
                body, url = values.data(answer.body), values.text(answer.url)
                clean = replace(answer, headers=headers, body=body, url=url)
                return page_data(clean, raw=raw, start=start)

            return await anyio.to_thread.run_sync(make), frozenset()

        raw, start = bool(run.arguments.get("raw")), run.arguments.get("start") or 0
        outcome = await perform(
            run.tool.definition,
            partial(fetch_request, run.arguments),
            read,
            run.limits,
            run.part(Outgoing).upstreams.fetches,
            run.redactor,
        )
        # The limit was checked when the body was read. In base64, the same body is longer.
        return replace(outcome, max_data_bytes=2 * run.limits.output_bytes)


def fetch_request(arguments: JsonObject) -> UpstreamRequest:
    """Return the request for the argument `url`. The fragment of the URL is left out.

    Raises:
        ArgumentsRefused: the URL is invalid.
    """
    url = str(arguments.get("url", "")).partition("#")[0]
    faults = [fault.removeprefix("endpoint: ") for fault in url_faults(url)]
    if faults:
        raise ArgumentsRefused(f"The arguments are wrong: url {faults[0]}.", fields=["url"])
    return UpstreamRequest(method="GET", url=url, headers=HEADERS)


def page_data(answer: UpstreamAnswer, *, raw: bool, start: int) -> JsonObject:
    """Return the result of the tool for a fetched page.

    If the body is JSON and not too long, the result contains it parsed. Otherwise, if the body is
    text, the result contains this text from the character `start` on. Any other body becomes a
    file. If `raw` is True, JSON and HTML are returned as unchanged text.
    """
    data: JsonObject = {
        "url": answer.url,
        "status": answer.status,
        "content_type": answer.headers.get("content-type", "") or None,
    }
    # Longer JSON becomes text, because text can be shortened.
    if is_json(answer) and not raw and len(answer.body) <= INLINE_BYTES:
        try:
            return {
                **data,
                "json": strict_json.loads(answer.body, max_depth=strict_json.MAX_VALUE_DEPTH),
            }
        except strict_json.StrictJsonError:
            pass
    text = _text(answer)
    if text is None:
        content = base64.b64encode(answer.body).decode()
        return {
            **data,
            "files": [
                {
                    "filename": file_name(answer.url),
                    "content_type": answer.content_type or "application/octet-stream",
                    "size": len(answer.body),
                    FILE_CONTENT: content,
                }
            ],
        }
    if answer.content_type in HTML and not raw:
        text = readable_text(text)
    return {**data, "text": text[start:], "characters": len(text)}


def file_name(url: str) -> str:
    """Return a name for a file with the content of `url`. The name is never a path, never hidden
    and never empty.
    """
    last = unquote(urlsplit(url).path).rpartition("/")[2]
    return _NOT_OF_A_NAME.sub("_", last).lstrip("._")[:100] or "download"


def _text(answer: UpstreamAnswer) -> str | None:
    """Return the body of an answer as text, or None if it is not text."""
    found = _CHARSET.search(answer.headers.get("content-type", ""))
    codec = _CODECS.get(found[1].lower()) if found is not None else None
    is_marked = answer.body != strict_json.unmarked(answer.body)
    if codec is not None and codec != "utf-8" and not is_marked:
        return answer.body.decode(codec, "replace").removeprefix(strict_json.BYTE_ORDER_MARK)
    try:
        text = strict_json.decoded(answer.body)
    except UnicodeDecodeError:
        is_text = codec is not None or answer.content_type.startswith("text/")
        return answer.body.decode("windows-1252", "replace") if is_text else None
    return None if "\0" in text else text


# -- the readable text of a page ---------------------------------------------------------

_INVISIBLE = ("script", "style", "template", "noscript", "svg", "iframe", "object")
_DROPPED = re2.compile(
    "(?is)<!--.*?(?:-->|\\z)|"
    + "|".join(rf"<{name}\b.*?(?:</{name}\s*>|\z)" for name in _INVISIBLE)
)
_QUOTED = r"(?:[^<>\"']++|\"[^\"<]*+\"|'[^'<]*+')*+"
_BREAK = re.compile(
    r"</?(?:address|article|aside|blockquote|body|br|dd|div|dl|dt|fieldset|figure|footer|form"
    r"|h[1-6]|head|header|hr|li|main|nav|ol|option|p|pre|section|table|td|th|title|tr|ul)"
    rf"(?![\w-]){_QUOTED}>",
    re.IGNORECASE,
)
_TAG = re.compile(rf"<[a-z/!?]{_QUOTED}>", re.IGNORECASE)
_OPEN_QUOTE = re.compile(r"<[a-z/!?][^<>]*+>", re.IGNORECASE)
"""Matches a tag with a quote that is not closed."""


def readable_text(page: str) -> str:
    """Return the visible text of an HTML page. Each block of the page becomes one line."""
    text = _DROPPED.sub(" ", page)
    text = _OPEN_QUOTE.sub("", _TAG.sub("", _BREAK.sub("\n", text)))
    lines = (" ".join(line.split()) for line in _unescaped(text).splitlines())
    return "\n".join(line for line in lines if line)


def _unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character reference has more digits than Python parses
        return text
