"""The documents are true: their snippets run, and what is made from the code is up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conftest import (
    CLEAN_ENVIRONMENT,
    Daemon,
    StartDaemon,
    make_first_approver,
    ready_image,
    shell_path,
)
from fumehood import load_config
from support.definition_files import DefinitionDirectory
from support.preloaded import PYTHON
from support.wheels import only_from, write_wheel
from upstream import Reply, Upstream

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(sh|python)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
JSON = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = re.compile(r"(?:fumehood|CHECKOUT)\[([\w,-]+)\]|[Nn]eeds the extra `([\w-]+)`")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def snippets(page: str) -> list[tuple[str, str, str]]:
    """Language, the rest of the fence's line, and text of every snippet that can be run."""
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


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
        "docs/howto/give-the-tools-to-a-model.md",
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
def test_snippets_run_as_they_stand(page: str, shared_daemon: Daemon) -> None:
    ran = 0
    for language, mark, text in snippets(page):
        if mark.strip() == "daemon":
            assert text.strip() == "fumehood serve"  # what the fixture started
            continue
        interpreter = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [PYTHON, "-c"]
        environment = {
            **shared_daemon.environment,
            "PATH": shell_path(),
        }
        done = subprocess.run(
            [*interpreter, text], cwd=ROOT, env=environment, capture_output=True, timeout=60
        )
        assert done.returncode == 0, (text, done.stderr.decode())
        ran += 1
    assert ran >= (10 if "tutorial" in page else 1)


@pytest.mark.row("R4", "R1", "T7")
def test_how_to_define_a_tool_in_a_file_runs_as_it_stands(
    start_daemon: StartDaemon, definitions: DefinitionDirectory
) -> None:
    daemon = start_daemon(tools_directory=str(definitions.path))
    path = shell_path()
    ran = 0
    for language, mark, text in snippets("docs/howto/define-a-tool-in-a-file.md"):
        assert language == "sh"
        if mark.strip() == "daemon":
            assert text.strip() == "fumehood serve"  # what the fixture started
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=ROOT, env={**daemon.environment, "PATH": path}, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr.decode())
        ran += 1
    assert ran >= 5


@pytest.mark.row("T5", "R4")
def test_how_to_call_a_rest_api_runs_as_it_stands(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, tmp_path: Path, upstream: Upstream
) -> None:
    """Its service is one of ours at another port."""
    page = "docs/howto/call-a-rest-api.md"
    (text,) = TOML.findall((ROOT / page).read_text(encoding="utf-8"))
    config = tmp_path / "config.toml"
    config.write_text(text.replace("8765", str(upstream.port)), encoding="utf-8")
    upstream.script("/cities/Oslo.json", Reply(body=b'{"city": "Oslo", "degrees": 12.5}'))
    days = [{"date": "2026-01-01", "t": {"max": 3}}]
    listed = {"result": {"days": days, "next": "/days/2.json?page=2"}}
    upstream.script("/days/1.json", Reply(body=json.dumps(listed).encode()))
    upstream.script("/cities/Atlantis.json", Reply(404, b"none", content_type="text/html"))
    daemon = start_daemon(
        variables={"WEATHER_KEY": "key-of-the-weather"},
        config=str(config), tools_directory=str(definitions.path),
    )  # fmt: skip
    path = shell_path()
    said: list[str] = []
    for language, mark, snippet in snippets(page):
        assert language == "sh"
        if mark.strip() in ("daemon", "service"):
            continue  # the fixtures have started them
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet.replace("8765", str(upstream.port))],
            cwd=tmp_path, env={**daemon.environment, "PATH": path}, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (snippet, done.stderr.decode())
        said.append(done.stdout.decode())
    assert len(said) == 4
    assert '"degrees": 12.5' in said[1]
    assert '"status": 404' in said[2]
    paged = json.loads(said[3])["data"]
    assert paged["items"] == [{"date": "2026-01-01", "degrees": 3}]
    assert paged["pagination"]["has_more"] is True
    assert upstream.requests[0].target == "/cities/Oslo.json?unit=celsius"
    assert upstream.requests[0].headers["authorization"] == "Bearer key-of-the-weather"


@pytest.mark.row("D3")
def test_how_to_use_an_mcp_server_runs_as_it_stands(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    page = "docs/howto/use-an-mcp-server.md"
    content = (ROOT / page).read_text(encoding="utf-8")
    (text,) = TOML.findall(content)
    config = tmp_path / "config.toml"
    environment = {**CLEAN_ENVIRONMENT, "PATH": shell_path(), "FUMEHOOD_CONFIG": str(config)}
    said: list[Any] = []
    for language, mark, snippet in snippets(page):
        assert language == "sh"
        if mark.strip() == "daemon":
            assert config.read_text(encoding="utf-8") == text.replace("/srv", str(tmp_path))
            environment |= start_daemon(config=str(config)).environment
            environment["PATH"] = shell_path()
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet.replace("/srv", str(tmp_path))],
            cwd=tmp_path, env=environment, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (snippet, done.stderr.decode())
        said += [json.loads(done.stdout)] if done.stdout.startswith(b"{") else []
    shown = [json.loads(text) for text in JSON.findall(content)]
    assert len(shown) == len(said) == 2
    assert all(is_part_of(*pair) for pair in zip(shown, said, strict=True))


@pytest.mark.row("T5", "E5")
def test_page_of_the_tools_for_the_web_runs_as_it_stands(
    start_daemon: StartDaemon, tmp_path: Path, upstream: Upstream
) -> None:
    page = "docs/reference/web-tools.md"
    (text,) = TOML.findall((ROOT / page).read_text(encoding="utf-8"))
    config = tmp_path / "config.toml"
    config.write_text(text.replace("8765", str(upstream.port)), encoding="utf-8")
    html = b"<title>Fume hoods</title><style>p {}</style><p>A <b>fume hood</b> has a sash.</p>"
    upstream.script("/page.html", Reply(body=html, content_type="text/html"))
    hit = {"title": "Fume hoods", "url": "https://example.org/hoods", "description": "A sash."}
    upstream.script("/search", Reply(body=json.dumps({"web": {"results": [hit]}}).encode()))
    daemon = start_daemon(variables={"SEARCH_KEY": "key-of-the-search"}, config=str(config))
    path = shell_path()
    said: list[dict[str, Any]] = []
    for language, mark, snippet in snippets(page):
        assert language == "sh"
        if mark.strip() == "daemon":
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet.replace("8765", str(upstream.port))],
            cwd=tmp_path, env={**daemon.environment, "PATH": path}, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (snippet, done.stderr.decode())
        said.append(json.loads(done.stdout)["data"])
    fetched, found = said
    shown = JSON.findall(
        (ROOT / page).read_text(encoding="utf-8").replace("8765", str(upstream.port))
    )
    assert fetched == json.loads(shown[0])["data"]
    assert found["items"] == [{"title": "Fume hoods", "url": hit["url"], "snippet": "A sash."}]
    assert found["pagination"]["has_more"] is True
    assert upstream.requests[1].query == "q=fume%20hood&count=2"
    assert upstream.requests[1].headers["x-subscription-token"] == "key-of-the-search"
    assert "key-of-the-search" not in str(upstream.requests[0])


@pytest.mark.row("A1")
def test_how_to_write_a_policy_runs_as_it_stands(start_daemon: StartDaemon, home: Path) -> None:
    environment = {
        **CLEAN_ENVIRONMENT,
        "HOME": str(home),
        "FUMEHOOD_HOME": str(home),
        "PATH": shell_path(),
    }
    ran = 0
    for language, mark, text in snippets("docs/howto/write-a-policy.md"):
        assert language == "sh"
        if mark.strip() == "daemon":
            assert text.strip() == "fumehood serve"
            start_daemon(policy_file=str(home / "fumehood-rules" / "policy.toml"))
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=ROOT, env=environment, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stdout.decode(), done.stderr.decode())
        if "wrong.toml" in text:
            assert "did you mean 'run_shell'?" in done.stderr.decode()
        ran += 1
    assert ran >= 7


@pytest.mark.row("R4", "T5")
def test_how_to_import_an_openapi_document_runs_as_it_stands(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, tmp_path: Path, upstream: Upstream
) -> None:
    """Its service is one of ours at another port, which answers with the page's own files."""
    page = "docs/howto/import-an-openapi-document.md"
    own = str(upstream.port)
    (text,) = TOML.findall((ROOT / page).read_text(encoding="utf-8").replace("8765", own))
    config = tmp_path / "config.toml"
    config.write_text(text, encoding="utf-8")
    environment = {
        **CLEAN_ENVIRONMENT,
        "PATH": shell_path(),
        "FUMEHOOD_TOOLS_DIRECTORY": str(definitions.path),
    }
    said: list[str] = []
    for language, mark, snippet in snippets(page):
        assert language == "sh"
        if mark.strip() == "service":
            served = tmp_path / "weather-service"
            for path in ("/openapi.yaml", "/v1/cities/Oslo.json"):
                upstream.script(path, Reply(body=(served / path[1:]).read_bytes()))
            continue
        if mark.strip() == "daemon":
            daemon = start_daemon(
                variables={"WEATHER_KEY": "key-of-the-weather"},
                config=str(config), tools_directory=str(definitions.path),
            )  # fmt: skip
            environment |= daemon.environment | {"PATH": environment["PATH"]}
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet.replace("8765", own)],
            cwd=tmp_path, env=environment, capture_output=True, timeout=60, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (snippet, done.stderr)
        said.append(done.stdout)
        if mark.strip() == "import":
            assert text in done.stderr
            assert "  POST /photos: its body is 'image/jpeg'" in done.stderr
    shown = [json.loads(text) for text in JSON.findall((ROOT / page).read_text(encoding="utf-8"))]
    answers = [json.loads(output.partition("\nexit status")[0]) for output in said[2:]]
    assert len(shown) == len(answers) == 2
    assert all(is_part_of(*pair) for pair in zip(shown, answers, strict=True))
    asked = upstream.requests[-1]
    assert asked.target == "/v1/cities/Oslo.json?unit=celsius"
    assert asked.headers["authorization"] == "Bearer key-of-the-weather"


@pytest.mark.row("T8", "P10")
def test_how_to_give_the_tools_to_a_model_shows_what_its_snippets_print(
    shared_daemon: Daemon,
) -> None:
    """The page itself is among those that run as they stand."""
    page = "docs/howto/give-the-tools-to-a-model.md"
    shown = [json.loads(text) for text in JSON.findall((ROOT / page).read_text(encoding="utf-8"))]
    environment = {**shared_daemon.environment, "PATH": shell_path()}
    printed = [
        json.loads(
            subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                env=environment, capture_output=True, timeout=60, check=True,
            ).stdout
        )
        for language, _, text in snippets(page)
        if language == "sh" and ("curl" in text or "--explain" in text)
    ]  # fmt: skip
    answer, losses = printed
    assert answer["data"]["messages"] == shown[0]["data"]["messages"]
    envelopes = shown[0]["data"]["envelopes"]
    pairs = list(zip(envelopes, answer["data"]["envelopes"], strict=True))
    assert len(pairs) == 2
    assert all(is_part_of(*pair) for pair in pairs)
    assert shown[1][0] in losses


@pytest.mark.row("T7")
def test_python_snippets_of_the_definition_page_run_as_they_stand() -> None:
    ran = 0
    for language, _, text in snippets("docs/reference/tool-definition.md"):
        if language == "python":
            done = subprocess.run(
                [PYTHON, "-c", text], cwd=ROOT, env=CLEAN_ENVIRONMENT,
                capture_output=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, (text, done.stderr.decode())
            ran += 1
    assert ran >= 2


@pytest.mark.row("D5")
def test_how_to_watch_in_the_browser_runs_as_it_stands(
    start_daemon: StartDaemon, home: Path
) -> None:
    credential = make_first_approver(home)
    daemon = start_daemon()
    ((language, _, text),) = snippets("docs/howto/watch-in-the-browser.md")
    assert language == "python"
    done = subprocess.run(
        [sys.executable, "-c", text], env=daemon.environment, capture_output=True, timeout=60,
        text=True, input=f"{credential}\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("calculator 0 of 1 calls failed")
    assert "'execute': " in done.stdout
    assert "1 of 1 calls would need approval" in done.stdout


@pytest.mark.row("A6")
def test_how_to_check_the_signature_of_a_webhook_runs_as_it_stands() -> None:
    ((language, _, text),) = snippets("docs/howto/approve-by-webhook.md")
    assert language == "python"
    done = subprocess.run(
        [PYTHON, "-c", text], env=CLEAN_ENVIRONMENT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.row("P6", "P7")
def test_how_to_survive_a_bad_upstream_shows_what_its_snippets_print(tmp_path: Path) -> None:
    page = "docs/howto/survive-a-bad-upstream.md"
    shown = [json.loads(text) for text in JSON.findall((ROOT / page).read_text(encoding="utf-8"))]
    printed: list[Any] = []
    for language, _, text in snippets(page):
        assert language == "python"
        done = subprocess.run(
            [PYTHON, "-c", text], cwd=ROOT, capture_output=True, timeout=60,
            env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr.decode())
        printed += documents_in(done.stdout.decode())
    assert len(shown) == 3
    for document in shown:
        assert any(is_part_of(document, whole) for whole in printed), document


def documents_in(text: str) -> list[Any]:
    """JSON documents, one after the other."""
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
def test_snippets_of_the_clients_run_as_they_stand(administered_daemon: Daemon) -> None:
    """Each gets a credential on its standard input; those that call need none."""
    ran = 0
    for language, _, text in snippets("docs/reference/python-client.md"):
        assert language == "python"
        done = subprocess.run(
            [PYTHON, "-c", text],
            env=administered_daemon.environment, capture_output=True, timeout=60,
            input=f"{administered_daemon.credential}\n".encode(),
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr.decode())
        ran += 1
    assert ran == 4


@pytest.mark.row("R3", "D4")
def test_how_to_give_an_agent_its_tools_runs_as_it_stands(
    start_daemon: StartDaemon, home: Path, tmp_path: Path
) -> None:
    """`credential` is a command of the reader's; here it prints what `approvers init` showed."""
    command = tmp_path / "credential"
    environment = {
        **CLEAN_ENVIRONMENT,
        "FUMEHOOD_HOME": str(home),
        "PATH": f"{tmp_path}:{shell_path()}",
    }
    ran = 0
    for language, mark, text in snippets("docs/howto/give-an-agent-its-tools.md"):
        assert language == "sh"
        if mark.strip() == "daemon":
            assert text.strip() == "fumehood serve"
            start_daemon()
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stdout.decode(), done.stderr.decode())
        if mark.strip() == "init":
            command.write_text(f"#!/bin/sh\necho {done.stdout.decode().strip()}\n")
            command.chmod(0o700)
        if "10 / 3" in text:
            assert '"3.33"' in done.stdout.decode()
        ran += 1
    assert ran >= 7


@pytest.mark.row("D5")
def test_how_to_watch_with_prometheus_runs_as_it_stands(
    start_daemon: StartDaemon, home: Path, tmp_path: Path
) -> None:
    """`credential` prints what `approvers init` showed, as above."""
    page, command = "docs/howto/watch-with-prometheus.md", tmp_path / "credential"
    environment = {
        **CLEAN_ENVIRONMENT,
        "FUMEHOOD_HOME": str(home),
        "PATH": f"{tmp_path}:{shell_path()}",
    }
    said: list[str] = []
    for language, mark, text in snippets(page):
        if mark.strip() == "daemon":
            start_daemon()
            continue
        run = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*run, text], cwd=tmp_path, env=environment, capture_output=True, timeout=60
        )
        assert done.returncode == 0, (text, done.stdout.decode(), done.stderr.decode())
        said.append(done.stdout.decode())
        if mark.strip() == "init":
            command.write_text(f"#!/bin/sh\necho {said[-1].strip()}\n")
            command.chmod(0o700)
    _, _, metrics, alerts, spans = said
    assert 'fumehood_tool_calls_total{code="OK",tool="calculator"} 1.0' in metrics
    text = (ROOT / page).read_text(encoding="utf-8")
    (shown,) = [json.loads(found) for found in JSON.findall(text)]
    answer = json.loads(alerts)
    assert is_part_of(shown["data"]["alerts"][0], answer["data"]["alerts"][0])
    assert list(shown["data"]) == list(answer["data"])
    assert '"name": "execute_tool calculator"' in spans
    assert '"trace_id": "0x0af7651916cd43dd8448eb211c80319c"' in spans
    existing = set(
        re.findall(
            r"^(?:fumehood|process)_\w+", (tmp_path / "fumehood.prom").read_text(), re.MULTILINE
        )
    )
    named = set(re.findall(r"`(fumehood_\w+)`", text)) - {"fumehood_traces_left_out_total"}
    known = {re.sub("_(bucket|count|sum)$", "", name) for name in existing}
    assert len(named) > 12
    assert named <= known | {"fumehood_budget_used_ratio"}


@pytest.mark.row("E4")
def test_how_to_limit_what_agents_spend_runs_as_it_stands(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """With the page's own configuration."""
    page = "docs/howto/limit-what-agents-spend.md"
    file = tmp_path / "config.toml"
    (text,) = TOML.findall((ROOT / page).read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8")
    daemon = start_daemon(config=str(file))
    environment = {
        **daemon.environment, "PATH": shell_path(),
    }  # fmt: skip
    said: list[str] = []
    for language, mark, text in snippets(page):
        assert language == "sh"
        if mark.strip() == "daemon":
            continue  # the fixture has started it
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stdout.decode(), done.stderr.decode())
        said.append(done.stdout.decode())
    assert len(said) == 2
    assert said[0].count("QUOTA_EXCEEDED") == 1
    assert '"budget": "few-programs"' in said[1]
    assert "run_restricted_python" in (tmp_path / "usage.csv").read_text(encoding="utf-8")


@pytest.mark.row("P5")
def test_how_to_limit_how_often_tools_run_runs_as_it_stands(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """With the page's own configuration; its envelope has the fields of the real one."""
    page = "docs/howto/limit-how-often-tools-run.md"
    file, content = tmp_path / "config.toml", (ROOT / page).read_text(encoding="utf-8")
    (text,) = TOML.findall(content)
    file.write_text(text, encoding="utf-8")
    daemon = start_daemon(config=str(file))
    environment = {
        **daemon.environment, "PATH": shell_path(),
    }  # fmt: skip
    said: list[str] = []
    for language, mark, text in snippets(page):
        assert language == "sh"
        if mark.strip() == "daemon":
            continue  # the fixture has started it
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stdout.decode(), done.stderr.decode())
        said.append(done.stdout.decode())
    assert len(said) == 2
    *_, last = re.finditer(r'^\{\s*"success"', said[0], re.MULTILINE)
    refused = json.loads(said[0][last.start() :])["error"]
    (shown,) = re.findall(r"^```json\n(.*?)^```$", content, re.MULTILINE | re.DOTALL)
    promised = json.loads(shown)["error"]
    assert refused["details"] == promised["details"]
    words = "Too many calls: the rate limit of calculator allows 1 call in 60 s for each principal."
    assert refused["message"].startswith(words)
    assert promised["message"].startswith(words)
    assert set(promised) <= set(refused)
    assert "RATE_LIMITED" in said[1]


@pytest.mark.row("S10", "D1")
@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
def test_how_to_make_an_own_image_runs_as_it_stands(home: Path, tmp_path: Path) -> None:
    """With a folder in the place of the index, and its only package."""
    write_wheel(tmp_path / "packages", "humanize", "4.1")
    environment = {
        **CLEAN_ENVIRONMENT, **only_from(tmp_path / "packages"), "FUMEHOOD_HOME": str(home),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": shell_path(),
    }  # fmt: skip
    ran = []
    for language, _, text in snippets("docs/howto/make-your-own-image.md"):
        assert language == "sh"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr.decode())
        ran.append(done)
    assert len(ran) == 3
    assert b'"name": "tools"' in ran[0].stdout
    assert b"is up to date" in ran[1].stderr
    assert b"2 removed" in ran[2].stderr


@pytest.mark.needs("docker")
@pytest.mark.row("B3")
@pytest.mark.usefixtures("python_image")
def test_how_to_call_tools_from_a_program_runs_as_it_stands(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    environment = {
        **daemon.environment, "PATH": shell_path(),
    }  # fmt: skip
    page = "docs/howto/call-tools-from-a-program.md"
    said = []
    for language, _, text in snippets(page):
        command = ["bash", "-euo", "pipefail"] if language == "sh" else [PYTHON]
        done = subprocess.run(
            [*command, "-c", text], cwd=tmp_path, env=environment, capture_output=True, timeout=120
        )
        assert done.returncode == 0, (text, done.stderr.decode())
        said.append(done.stdout)
    assert len(said) == 3
    (shown,) = JSON.findall((ROOT / page).read_text(encoding="utf-8"))
    assert json.loads(said[0])["data"] == json.loads(shown)


@pytest.mark.needs("docker")
@pytest.mark.row("S6", "S7", "E7")
def test_notebook_tutorial_runs_as_it_stands(start_daemon: StartDaemon, tmp_path: Path) -> None:
    ready_image("python-data")
    data = {"container__images__python": "python-data", "sessions__image": "python-data"}
    daemon = start_daemon(**data)
    environment = {
        **daemon.environment, "PATH": shell_path(),
    }  # fmt: skip
    said: list[str] = []
    for language, mark, text in snippets("docs/tutorial/a-notebook.md"):
        assert language == "sh"
        if mark.strip() in ("daemon", "images"):
            continue  # the fixtures have done it
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path, env=environment, capture_output=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stdout.decode(), done.stderr.decode())
        said.append(done.stdout.decode() + done.stderr.decode())
    assert len(said) == 7
    assert "6 rows" in said[2]
    assert (tmp_path / "results/figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert "TIMEOUT" in said[4]
    assert "value: 6" in said[4]
    assert "2026-02,north,150" in said[5]


@pytest.mark.row("D6")
@pytest.mark.parametrize(
    "page",
    [
        "docs/howto/run-as-a-service.md",
        "docs/reference/configuration.md",
        "docs/howto/approve-by-webhook.md",
        "docs/howto/survive-a-bad-upstream.md",
        "docs/howto/watch-with-prometheus.md",
    ],
)
def test_configuration_on_a_page_is_one_that_the_engine_reads(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = TOML.findall((ROOT / page).read_text(encoding="utf-8"))
    for text in examples:
        file = tmp_path / "config.toml"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setenv("FUMEHOOD_CONFIG", str(file))
        load_config()
    assert examples


@pytest.mark.row("E1")
def test_pages_made_from_the_code_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_reference.py", "--check"],
        cwd=ROOT, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode()


def test_links_between_pages_lead_somewhere() -> None:
    checked = 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
                checked += 1
    assert checked > 20


def test_extras_are_named_as_pip_looks_for_them_and_pages_name_existing_ones() -> None:
    """pip 23 compares a normalized name with the one that is written in the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    assert known == {re.sub(r"[-_.]+", "-", name).lower() for name in known}
    named: set[str] = set()
    for pattern in ("*.md", "docs/**/*.md", "engine/**/*.py"):
        for page in ROOT.glob(pattern):
            for words in EXTRAS.findall(page.read_text(encoding="utf-8")):
                extras = set("".join(words).split(","))
                assert extras <= known, f"{page.relative_to(ROOT)}: {extras - known}"
                named |= extras
    assert named == known
