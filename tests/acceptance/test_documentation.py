"""The documentation is true: its snippets run, and generated pages are up to date."""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import (
    CLEAN_ENVIRONMENT,
    Daemon,
    StartDaemon,
    make_first_approver,
    ready_image,
)
from fumehood import Client, load_config
from fumehood.cluster.in_engine import node_figures
from fumehood.protocol.messages import encode_envelope
from support.definition_files import DefinitionDirectory
from support.pages import (
    JSON,
    ROOT,
    SET_UP_BY_THE_TEST,
    TOML,
    Snippet,
    json_of,
    read,
    run_snippets,
    write_config,
)
from support.preloaded import PYTHON
from support.wheels import only_from, write_wheel
from upstream import Reply, Upstream

OPEN = frozenset({"data", "details"})
"""Fields of an envelope that have other content for each tool."""


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    "page",
    [
        "docs/tutorial/first-call.md",
        "README.md",
        "docs/howto/repeat-a-call-safely.md",
        "docs/howto/gate-the-tools-of-other-agents.md",
        "docs/howto/cache-results.md",
        "docs/howto/make-many-calls.md",
        "docs/howto/verify-the-audit-log.md",
        "docs/howto/keep-secrets-out-of-answers.md",
        "docs/howto/check-results.md",
        "docs/howto/use-it-from-an-mcp-client.md",
        "docs/howto/review-definitions.md",
        pytest.param("docs/howto/define-a-tool-in-python.md", marks=pytest.mark.needs("landlock")),
        pytest.param("docs/howto/give-a-result-in-parts.md", marks=pytest.mark.needs("landlock")),
        pytest.param(
            "docs/howto/put-your-host-to-the-test.md", marks=pytest.mark.needs("landlock")
        ),
    ],
)
def test_page_snippets_run_against_a_daemon(page: str, shared_daemon: Daemon) -> None:
    ran = list(run_snippets(page, shared_daemon.environment))
    assert len(ran) >= (10 if "tutorial" in page else 1)


@pytest.mark.row("R4", "R1", "T7")
def test_how_to_define_a_tool_in_a_file_snippets_run(
    start_daemon: StartDaemon, definitions: DefinitionDirectory
) -> None:
    daemon = start_daemon(tools_directory=str(definitions.path))
    assert len(list(run_snippets("docs/howto/define-a-tool-in-a-file.md", daemon.environment))) >= 6


@pytest.mark.row("T5", "R4")
def test_how_to_call_a_rest_api_sends_documented_requests(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, tmp_path: Path, upstream: Upstream
) -> None:
    page, replace = "docs/howto/call-a-rest-api.md", {"8765": str(upstream.port)}
    config = tmp_path / "config.toml"
    write_config(page, config, replace)
    upstream.script("/cities/Oslo.json", Reply(body=b'{"city": "Oslo", "degrees": 12.5}'))
    days = [{"date": "2026-01-01", "t": {"max": 3}}]
    listed = {"result": {"days": days, "next": "/days/2.json?page=2"}}
    upstream.script("/days/1.json", Reply(body=json.dumps(listed).encode()))
    upstream.script("/cities/Atlantis.json", Reply(404, b"none", content_type="text/html"))
    daemon = start_daemon(
        variables={"WEATHER_KEY": "key-of-the-weather"},
        config=str(config), tools_directory=str(definitions.path),
    )  # fmt: skip
    ran = run_snippets(page, daemon.environment, tmp_path, replace=replace)
    printed = [snippet.stdout for snippet in ran if snippet.mark not in SET_UP_BY_THE_TEST]
    assert len(printed) == 4
    assert '"degrees": 12.5' in printed[1]
    assert '"status": 404' in printed[2]
    paged = json.loads(printed[3])["data"]
    assert paged["items"] == [{"date": "2026-01-01", "degrees": 3}]
    assert paged["pagination"]["has_more"] is True
    assert upstream.requests[0].target == "/cities/Oslo.json?unit=celsius"
    assert upstream.requests[0].headers["authorization"] == "Bearer key-of-the-weather"


@pytest.mark.row("D3")
def test_how_to_use_an_mcp_server_prints_documented_output(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    page, config = "docs/howto/use-an-mcp-server.md", tmp_path / "config.toml"
    replace = {"/srv": str(tmp_path)}
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_CONFIG": str(config)}
    printed: list[Any] = []
    for snippet in run_snippets(page, environment, tmp_path, replace=replace):
        if snippet.mark == "daemon":
            written = config.read_text(encoding="utf-8")
            assert written == write_config(page, config, replace)
            environment |= start_daemon(config=str(config)).environment
        elif snippet.stdout.startswith("{"):
            printed.append(json.loads(snippet.stdout))
    shown = json_of(page)
    assert len(shown) == len(printed) == 2
    assert all(is_part_of(*pair) for pair in zip(shown, printed, strict=True))


@pytest.mark.row("T5", "E5")
def test_web_tools_reference_prints_documented_output(
    start_daemon: StartDaemon, tmp_path: Path, upstream: Upstream
) -> None:
    page, replace = "docs/reference/web-tools.md", {"8765": str(upstream.port)}
    config = tmp_path / "config.toml"
    write_config(page, config, replace)
    html = b"<title>Fume hoods</title><style>p {}</style><p>A <b>fume hood</b> has a sash.</p>"
    upstream.script("/page.html", Reply(body=html, content_type="text/html"))
    hit = {"title": "Fume hoods", "url": "https://example.org/hoods", "description": "A sash."}
    upstream.script("/search", Reply(body=json.dumps({"web": {"results": [hit]}}).encode()))
    daemon = start_daemon(variables={"SEARCH_KEY": "key-of-the-search"}, config=str(config))
    _, fetch, search = run_snippets(page, daemon.environment, tmp_path, replace=replace)
    shown = JSON.findall(read(page).replace("8765", str(upstream.port)))
    assert json.loads(fetch.stdout)["data"] == json.loads(shown[0])["data"]
    found = json.loads(search.stdout)["data"]
    assert found["items"] == [{"title": "Fume hoods", "url": hit["url"], "snippet": "A sash."}]
    assert found["pagination"]["has_more"] is True
    assert upstream.requests[1].query == "q=fume%20hood&count=2"
    assert upstream.requests[1].headers["x-subscription-token"] == "key-of-the-search"
    assert "key-of-the-search" not in str(upstream.requests[0])


@pytest.mark.row("A1")
def test_how_to_write_a_policy_snippets_run(start_daemon: StartDaemon, home: Path) -> None:
    environment = {**CLEAN_ENVIRONMENT, "HOME": str(home), "FUMEHOOD_HOME": str(home)}
    ran = 0
    for snippet in run_snippets("docs/howto/write-a-policy.md", environment):
        if snippet.mark == "daemon":
            start_daemon(policy_file=str(home / "fumehood-rules" / "policy.toml"))
            continue
        if "wrong.toml" in snippet.text:
            assert "did you mean 'run_shell'?" in snippet.stderr
        ran += 1
    assert ran >= 7


@pytest.mark.row("R4", "T5")
def test_how_to_import_an_openapi_document_prints_documented_output(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, tmp_path: Path, upstream: Upstream
) -> None:
    """The upstream serves the files shown on the page."""
    page, replace = "docs/howto/import-an-openapi-document.md", {"8765": str(upstream.port)}
    config = tmp_path / "config.toml"
    text = write_config(page, config, replace)
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_TOOLS_DIRECTORY": str(definitions.path)}
    printed: list[str] = []
    for snippet in run_snippets(page, environment, tmp_path, replace=replace):
        if snippet.mark == "service":
            served = tmp_path / "weather-service"
            for path in ("/openapi.yaml", "/v1/cities/Oslo.json"):
                upstream.script(path, Reply(body=(served / path[1:]).read_bytes()))
        elif snippet.mark == "daemon":
            environment |= start_daemon(
                variables={"WEATHER_KEY": "key-of-the-weather"},
                config=str(config), tools_directory=str(definitions.path),
            ).environment  # fmt: skip
        else:
            printed.append(snippet.stdout)
        if snippet.mark == "import":
            assert text in snippet.stderr
            assert "  POST /photos: its body is 'image/jpeg'" in snippet.stderr
    shown = json_of(page)
    answers = [json.loads(output.partition("\nexit status")[0]) for output in printed[2:]]
    assert len(shown) == len(answers) == 2
    assert all(is_part_of(*pair) for pair in zip(shown, answers, strict=True))
    asked = upstream.requests[-1]
    assert asked.target == "/v1/cities/Oslo.json?unit=celsius"
    assert asked.headers["authorization"] == "Bearer key-of-the-weather"


@pytest.mark.row("T8", "P10")
def test_how_to_give_the_tools_to_a_model_prints_documented_output(
    shared_daemon: Daemon,
) -> None:
    page = "docs/howto/give-the-tools-to-a-model.md"
    answer, losses = [
        json.loads(snippet.stdout)
        for snippet in run_snippets(page, shared_daemon.environment)
        if "curl" in snippet.text or "--explain" in snippet.text
    ]
    shown = json_of(page)
    assert answer["data"]["messages"] == shown[0]["data"]["messages"]
    envelopes = shown[0]["data"]["envelopes"]
    pairs = list(zip(envelopes, answer["data"]["envelopes"], strict=True))
    assert len(pairs) == 2
    assert all(is_part_of(*pair) for pair in pairs)
    assert shown[1][0] in losses


@pytest.mark.row("T7", "A6")
@pytest.mark.parametrize(
    ("page", "number"),
    [("docs/reference/tool-definition.md", 2), ("docs/howto/approve-by-webhook.md", 1)],
)
def test_python_snippets_run_without_a_daemon(page: str, number: int) -> None:
    assert len(list(run_snippets(page, CLEAN_ENVIRONMENT))) >= number


@pytest.mark.row("D5")
def test_how_to_watch_in_the_browser_snippet_prints_documented_output(
    start_daemon: StartDaemon, home: Path
) -> None:
    credential = make_first_approver(home)
    page, daemon = "docs/howto/watch-in-the-browser.md", start_daemon()
    (snippet,) = run_snippets(page, daemon.environment, stdin=f"{credential}\n")
    assert snippet.stdout.startswith("calculator 0 of 1 calls failed")
    assert "'execute': " in snippet.stdout
    assert "1 of 1 calls would need approval" in snippet.stdout


@pytest.mark.row("P6", "P7")
def test_how_to_survive_a_bad_upstream_prints_documented_output(tmp_path: Path) -> None:
    page = "docs/howto/survive-a-bad-upstream.md"
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(tmp_path)}
    printed: list[Any] = []
    for snippet in run_snippets(page, environment):
        printed += documents_in(snippet.stdout)
    shown = json_of(page)
    assert len(shown) == 3
    for document in shown:
        assert any(is_part_of(document, whole) for whole in printed), document


@pytest.mark.row("E1", "D1")
def test_whole_envelopes_on_pages_have_the_fields_of_real_ones(shared_daemon: Daemon) -> None:
    def fields(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        return {name: None if name in OPEN else fields(one) for name, one in value.items()}

    with Client(shared_daemon.socket) as client:
        success = client.call("calculator", {"expression": "5! + 2**10"})
        endless = {"code": "while True:\n    pass"}
        error = client.call("run_restricted_python", endless, timeout_seconds=0.3)
    real = [json.loads(encode_envelope(one)) for one in (success, error)]
    texts = [*JSON.findall(read("README.md")), *JSON.findall(read("docs/reference/envelope.md"))]
    whole = [json.loads(text) for text in texts if '"metadata"' in text]
    results = [one for one in json_of("docs/howto/use-it-from-an-mcp-client.md") if "_meta" in one]
    whole += [{**one["_meta"]["fumehood/envelope"], "data": {}} for one in results]
    assert [one["success"] for one in whole] == [True, True, False, True]
    for one in whole:
        assert fields(one) == fields(real[0 if one["success"] else 1])


def documents_in(text: str) -> list[Any]:
    """Parse concatenated JSON documents."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


def is_part_of(part: Any, whole: Any) -> bool:
    """Whether every field of `part` is in `whole`, with the same value."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part_of(part[key], whole[key]) for key in part)
    return bool(part == whole)


@pytest.mark.row("D1")
def test_python_client_reference_snippets_run(administered_daemon: Daemon) -> None:
    """Each snippet receives a credential on stdin, which calls do not need."""
    environment, credential = administered_daemon.environment, administered_daemon.credential
    page = "docs/reference/python-client.md"
    assert len(list(run_snippets(page, environment, stdin=f"{credential}\n"))) == 4


def run_with_credential(
    page: str, start_daemon: StartDaemon, home: Path, directory: Path
) -> list[Snippet]:
    """Run a page's snippets. Their `credential` command prints the output of `approvers init`."""
    command, ran = directory / "credential", []
    for snippet in run_snippets(page, {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}, directory):
        if snippet.mark == "daemon":
            start_daemon()
            continue
        if snippet.mark == "init":
            command.write_text(f"#!/bin/sh\necho {snippet.stdout.strip()}\n")
            command.chmod(0o700)
        ran.append(snippet)
    return ran


@pytest.mark.row("R3", "D4")
def test_how_to_give_an_agent_its_tools_snippets_run(
    start_daemon: StartDaemon, home: Path, tmp_path: Path
) -> None:
    page = "docs/howto/give-an-agent-its-tools.md"
    ran = run_with_credential(page, start_daemon, home, tmp_path)
    assert any("10 / 3" in snippet.text and '"3.33"' in snippet.stdout for snippet in ran)
    assert len(ran) >= 7


@pytest.mark.row("R3", "S6")
@pytest.mark.needs("docker")
def test_how_to_give_agents_presets_snippets_run(
    start_daemon: StartDaemon, home: Path, tmp_path: Path
) -> None:
    page, config = "docs/howto/give-agents-presets.md", tmp_path / "config.toml"
    write_config(page, config)
    ready_image("python")
    with_config = partial(start_daemon, config=str(config))
    ran = run_with_credential(page, with_config, home, tmp_path)
    printed = [snippet.stdout for snippet in ran]
    assert "UTC monday" in printed[1]
    assert "UTC None" in printed[2]
    refused = "PERMISSION_DENIED: The agent clerk is bound to presets: reports, scratch."
    assert ran[3].stderr.count(refused) == 2
    assert len(ran) == 4


@pytest.mark.row("D5")
def test_how_to_watch_with_prometheus_names_existing_metrics_and_alerts(
    start_daemon: StartDaemon, home: Path, tmp_path: Path
) -> None:
    page = "docs/howto/watch-with-prometheus.md"
    ran = run_with_credential(page, start_daemon, home, tmp_path)
    _, _, metrics, alerts, spans = (snippet.stdout for snippet in ran)
    assert 'fumehood_tool_calls_total{code="OK",tool="calculator"} 1.0' in metrics
    (shown,), answer = json_of(page), json.loads(alerts)
    assert is_part_of(shown["data"]["alerts"][0], answer["data"]["alerts"][0])
    assert list(shown["data"]) == list(answer["data"])
    assert '"name": "execute_tool calculator"' in spans
    assert '"trace_id": "0x0af7651916cd43dd8448eb211c80319c"' in spans
    existing = set(
        re.findall(
            r"^(?:fumehood|process)_\w+", (tmp_path / "fumehood.prom").read_text(), re.MULTILINE
        )
    )
    named = set(re.findall(r"`(fumehood_\w+)`", read(page))) - {"fumehood_traces_left_out_total"}
    known = {re.sub("_(bucket|count|sum)$", "", name) for name in existing}
    assert len(named) > 12
    of_a_cluster = {f"fumehood_{figure.name}" for figure in node_figures([])}
    assert named <= known | of_a_cluster | {"fumehood_budget_used_ratio"}


@pytest.mark.row("E4")
def test_how_to_limit_what_agents_spend_refuses_call_over_budget(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    page, config = "docs/howto/limit-what-agents-spend.md", tmp_path / "config.toml"
    write_config(page, config)
    daemon = start_daemon(config=str(config))
    _, calls, usage = run_snippets(page, daemon.environment, tmp_path)
    assert calls.stdout.count("QUOTA_EXCEEDED") == 1
    assert '"budget": "few-programs"' in usage.stdout
    assert "run_restricted_python" in (tmp_path / "usage.csv").read_text(encoding="utf-8")


@pytest.mark.row("P5")
def test_how_to_limit_how_often_tools_run_prints_documented_error(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    page, config = "docs/howto/limit-how-often-tools-run.md", tmp_path / "config.toml"
    write_config(page, config)
    daemon = start_daemon(config=str(config))
    _, calls, other = run_snippets(page, daemon.environment, tmp_path)
    *_, last = re.finditer(r'^\{\s*"success"', calls.stdout, re.MULTILINE)
    refused = json.loads(calls.stdout[last.start() :])["error"]
    (shown,) = json_of(page)
    promised = shown["error"]
    assert refused["details"] == promised["details"]
    words = "Too many calls: the rate limit of calculator allows 1 call in 60 s for each principal."
    assert refused["message"].startswith(words)
    assert promised["message"].startswith(words)
    assert set(promised) <= set(refused)
    assert "RATE_LIMITED" in other.stdout


@pytest.mark.row("S10", "D1")
@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
def test_how_to_make_your_own_image_builds_reuses_and_removes_it(
    home: Path, tmp_path: Path
) -> None:
    """Uses a directory with one package as the package index."""
    write_wheel(tmp_path / "packages", "humanize", "4.1")
    environment = {
        **CLEAN_ENVIRONMENT, **only_from(tmp_path / "packages"), "FUMEHOOD_HOME": str(home),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    page = "docs/howto/make-your-own-image.md"
    made, again, removed = run_snippets(page, environment, tmp_path, timeout_s=200)
    assert '"name": "tools"' in made.stdout
    assert "is up to date" in again.stderr
    assert "2 removed" in removed.stderr


@pytest.mark.needs("docker")
@pytest.mark.row("B3")
@pytest.mark.usefixtures("python_image")
def test_how_to_call_tools_from_a_program_prints_documented_output(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    page = "docs/howto/call-tools-from-a-program.md"
    called, _, _ = run_snippets(page, shared_daemon.environment, tmp_path, timeout_s=120)
    (shown,) = json_of(page)
    assert json.loads(called.stdout)["data"] == shown


@pytest.mark.needs("docker")
@pytest.mark.row("S6", "S7", "E7")
def test_notebook_tutorial_prints_and_saves_documented_output(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    ready_image("python-data")
    data = {"container__images__python": "python-data", "sessions__image": "python-data"}
    environment, page = start_daemon(**data).environment, "docs/tutorial/a-notebook.md"
    printed = [
        snippet.stdout + snippet.stderr
        for snippet in run_snippets(page, environment, tmp_path, timeout_s=120)
        if snippet.mark not in SET_UP_BY_THE_TEST
    ]
    assert len(printed) == 7
    assert "6 rows" in printed[2]
    assert (tmp_path / "results/figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert "TIMEOUT" in printed[4]
    assert "value: 6" in printed[4]
    assert "2026-02,north,150" in printed[5]


@pytest.mark.row("D6")
@pytest.mark.parametrize(
    "page",
    [
        "docs/howto/run-as-a-service.md",
        "docs/howto/run-on-two-machines.md",
        "docs/reference/configuration.md",
        "docs/howto/approve-by-webhook.md",
        "docs/howto/survive-a-bad-upstream.md",
        "docs/howto/watch-with-prometheus.md",
    ],
)
def test_configuration_examples_of_page_are_valid(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = TOML.findall(read(page))
    for text in examples:
        file = tmp_path / "config.toml"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setenv("FUMEHOOD_CONFIG", str(file))
        load_config()
    assert examples


@pytest.mark.row("E1")
def test_generated_reference_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [PYTHON, "-c", "import runpy; runpy.run_path('scripts/make_reference.py', run_name='__main__')",
         "--check"], cwd=ROOT, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode()
