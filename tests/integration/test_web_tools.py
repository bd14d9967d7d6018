"""`fetch_url` and `search_web` of an engine, against a scripted upstream service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from fumehood import Config, Engine, Envelope
from fumehood.core.json_types import JsonObject
from fumehood.registry.secrets import RestSettings, SecretSettings
from fumehood.registry.settings import SearchSettings, WebToolSettings
from upstream import Received, Reply, Upstream, redirect

pytestmark = [pytest.mark.anyio, pytest.mark.row("T5")]

KEY = "canary-key-of-the-search"


async def fetch(upstream: Upstream, home: Path, path: str, **arguments: Any) -> Envelope:
    web = WebToolSettings(fetch_url=True, allowed_hosts=(upstream.authority,))
    async with Engine(config=Config(home=home, web=web)) as engine:
        return await engine.call("fetch_url", {"url": upstream.url + path, **arguments})


@pytest.mark.row("E6", "E1")
async def test_html_page_is_fetched_as_text_and_its_full_text_is_kept(
    upstream: Upstream, home: Path
) -> None:
    page = "<title>Words</title><p>" + "words " * 4000 + "</p><script>bad()</script>"
    upstream.script("/page", redirect("/moved"))
    upstream.script("/moved", Reply(body=page.encode(), content_type="text/html"))
    envelope = await fetch(upstream, home, "/page#part")
    data = envelope.data
    assert (data["url"], data["status"]) == (f"{upstream.url}/moved", 200)
    assert data["content_type"] == "text/html"
    assert data["characters"] == len("Words\n" + "words " * 4000) - 1
    assert data["truncated"] is True
    assert data["resource_url"]
    assert data["text"].startswith("Words\nwords words")
    assert "bad" not in data["text"]
    further = await fetch(upstream, home, "/page", start=data["characters"] - 5)
    assert further.data["text"] == "words"
    sandbox = envelope.metadata.sandbox
    assert (sandbox.placement, envelope.metadata.performance.network_ms > 0) == ("host", True)


async def test_server_error_is_retried_but_404_is_not(upstream: Upstream, home: Path) -> None:
    upstream.script("/now", Reply(500), Reply(reset=True), Reply(body=b"[1]"))
    envelope = await fetch(upstream, home, "/now")
    assert (envelope.data["json"], envelope.metadata.retry_count) == ([1], 2)
    upstream.script("/none", Reply(404, b"<p>none", content_type="text/html"))
    refused = await fetch(upstream, home, "/none")
    assert (refused.error.code, refused.error.retryable) == ("EXECUTION_ERROR", False)
    assert refused.error.details["status"] == 404
    assert upstream.count("/none") == 1


async def test_failures_of_one_url_open_no_circuit_for_another(
    upstream: Upstream, home: Path
) -> None:
    upstream.script("/bad", Reply(500))
    web = WebToolSettings(fetch_url=True, allowed_hosts=(upstream.authority,))
    async with Engine(config=Config(home=home, web=web)) as engine:
        for _ in range(8):
            bad = {"url": f"{upstream.url}/bad"}
            assert not (await engine.call("fetch_url", bad, enable_retry=False)).success
        assert (await engine.call("fetch_url", {"url": f"{upstream.url}/good"})).success


async def test_fetch_dry_run_sends_nothing_and_names_the_missing_permission(
    upstream: Upstream, home: Path
) -> None:
    web = WebToolSettings(fetch_url=True)
    async with Engine(config=Config(home=home, web=web)) as engine:
        planned = await engine.call("fetch_url", {"url": upstream.url}, dry_run=True)
    assert "web.allowed_hosts" in json.dumps(planned.data)
    assert upstream.connections == 0


# -- search --------------------------------------------------------------------------------

HITS = {"title": "/title", "url": "/link/href", "snippet": "/text"}


def results(request: Received) -> Reply:
    query = dict(parse_qsl(request.query))
    first, count = int(query.get("offset", "0")), int(query["count"])
    found: list[JsonObject] = [
        {"title": f"Hit {number}", "link": {"href": f"https://example.org/{number}"}, "more": 1}
        for number in range(first, min(first + count, 5))
    ]
    return Reply(body=json.dumps({"web": {"results": found, "total": 5}}).encode())


def search_config(upstream: Upstream, home: Path, **changes: Any) -> Config:
    search = {
        "endpoint": f"{upstream.url}/search?q={{query}}&count={{limit}}&lang=en",
        "headers": {"x-subscription-token": "${secret:search_key}"},
        "response": {
            "items": "/web/results",
            "fields": HITS,
            "total_count": "/web/total",
            "cursor_parameter": "offset",
            "counts": "items",
        },
        **changes,
    }
    (home / "key").write_text(KEY)
    (home / "key").chmod(0o600)
    secret = SecretSettings(file=home / "key", tools=("search_web",), hosts=("127.0.0.1",))
    return Config(
        home=home,
        web=WebToolSettings(search=SearchSettings.model_validate(search)),
        rest=RestSettings(allowed_hosts=(upstream.authority,)),
        secrets={"search_key": secret},
    )


@pytest.mark.row("E5", "T5")
async def test_search_queries_the_configured_service_page_by_page(
    upstream: Upstream, home: Path
) -> None:
    upstream.script("/search", results)
    async with Engine(config=search_config(upstream, home)) as engine:
        first = await engine.call("search_web", {"query": "a & b", "limit": 2})
        everything = await engine.fetch_all("search_web", {"query": "a & b", "limit": 2})
        fetched = await engine.call("fetch_url", {"url": upstream.url})
    assert first.data["items"][0] == {
        "title": "Hit 0", "url": "https://example.org/0", "snippet": None
    }  # fmt: skip
    assert first.data["pagination"]["total_count"] == 5
    assert [item["title"] for item in everything] == [f"Hit {number}" for number in range(5)]
    assert upstream.requests[0].query == "q=a%20%26%20b&count=2&lang=en"
    assert upstream.requests[2].query == "q=a%20%26%20b&count=2&lang=en&offset=2"
    assert {request.headers["x-subscription-token"] for request in upstream.requests} == {KEY}
    assert KEY not in first.model_dump_json()
    assert fetched.error.code == "TOOL_DISABLED"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"headers": {"x-api-key": "literal-key-1"}}, "looks like a credential"),
        ({"headers": {"x-api-key": "${secret:other}"}}, "has no secret 'other'"),
        ({"endpoint": "https://evil.example/?q={query}"}, "not bound to the endpoint's host"),
        ({"endpoint": "https://me:pw@a.example/?q={query}"}, "user name or password"),
    ],
)
async def test_misconfigured_search_is_not_registered_and_its_reason_reported(
    upstream: Upstream, home: Path, changes: JsonObject, reason: str
) -> None:
    engine = Engine(config=search_config(upstream, home, **changes))
    (fault,) = engine.load_faults
    assert reason in fault.reason
    async with engine:
        called = await engine.call("search_web", {"query": "x"})
    assert called.error.code == "TOOL_NOT_FOUND"
    assert upstream.connections == 0


@pytest.mark.parametrize(
    "response",
    [{"fields": HITS}, {"items": "/x"}, {"items": "/x", "fields": {**HITS, "more": "/more"}}],
)
def test_search_settings_without_the_three_fields_are_refused(response: JsonObject) -> None:
    with pytest.raises(ValueError, match="title, url and snippet"):
        SearchSettings.model_validate({"endpoint": "https://a.example/", "response": response})
