"""The command line: help, completion, answers it reads, configuration and images."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from fumehood import Config, load_config
from fumehood.cli import overview
from fumehood.cli.exits import document_of, read_answer
from fumehood.cli.main import OPEN, all_commands, app, load_command, with_commands, with_options
from fumehood.cli.serve import in_foreground
from fumehood.core.envelope import Envelope
from fumehood.core.part import Command, Options
from fumehood.docker.store import DockerStore
from fumehood.images import command as images
from fumehood.parts import parts
from support.answers import envelope_bytes
from support.docker_images import ListedImages, image_row

PAGE = Path(__file__).parents[3] / "docs/reference/command-line.md"


@pytest.mark.parametrize("name", all_commands())
def test_help_line_of_a_lazy_command_equals_its_own(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.get_short_help_str(200).rstrip(".") == all_commands()[name].rstrip(".")


def test_parts_add_to_open_commands_only() -> None:
    assert {options.command for part in parts() for options in part.options} <= OPEN
    groups = {name.rpartition(" ")[0] for part in parts() for name in part.commands}
    assert groups <= {"", *OPEN}
    assert "tools" in groups


def test_command_of_a_part_is_in_the_kernels_group_after_the_one_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sing() -> None:
        """Not shown."""
        print("la")

    group, songs = typer.Typer(), typer.Typer()
    for name in ("list", "show", "add"):
        group.command(name)(lambda: None)
    for name in ("low", "high"):
        songs.command(name)(sing)

    def run(words: Annotated[list[str], typer.Argument()]) -> None:
        print(*words)

    made_of: dict[str, object] = {
        "module:sing": sing, "module:songs": songs, "module:run": run,
    }  # fmt: skip
    monkeypatch.setattr("fumehood.cli.main.imported", made_of.__getitem__)
    added = {
        "songs": Command("Songs.", "module:songs", after="list"),
        "sing": Command("Sing.", "module:sing", after="show"),
        "run": Command("Run.", "module:run", after="sing", takes_options=True),
        "hold": Command("Hold.", "module:run", after="run"),
    }
    made = with_commands(group, added)
    assert set(typer.main.get_group(made).commands) == {
        "list",
        "show",
        "sing",
        "run",
        "hold",
        "add",
        "songs",
    }
    commands = [name for name in typer.main.get_group(made).commands if name != "songs"]
    assert commands == ["list", "show", "sing", "run", "hold", "add"]
    assert list(typer.main.get_group(group).commands) == ["list", "show", "add"]
    assert CliRunner().invoke(made, ["songs", "low"]).output == "la\n"
    assert CliRunner().invoke(made, ["sing"]).output == "la\n"
    assert "Sing." in CliRunner().invoke(made, ["sing", "--help"]).output
    assert CliRunner().invoke(made, ["run", "ls", "-a"]).output == "ls -a\n"
    assert CliRunner().invoke(made, ["hold", "ls", "-a"]).exit_code == 2


def test_options_of_a_part_come_before_the_command_and_are_passed_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def greet(loud: bool = False, name: str = "x") -> str | None:
        seen.append(("greet", loud, name))
        return "hello" if loud else None

    def own(name: str = "x", quick: bool = False, added: Sequence[str | None] = ()) -> None:
        seen.append(("own", name, quick, *added))

    seen: list[Any] = []
    monkeypatch.setattr("fumehood.cli.main.imported", lambda _: greet)
    made = with_options(own, [Options("own", "module:greet", before="quick")])
    assert list(signature(made).parameters) == ["name", "loud", "quick"]
    made(name="a", loud=True, quick=True)
    assert seen == [("greet", True, "a"), ("own", "a", True, "hello")]


def test_kernel_command_does_not_read_the_parts() -> None:
    program = (
        "import sys; from fumehood.cli import main; main.load_command('call');"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def programs_of(name: str, program: Any) -> Iterator[tuple[str, Any]]:
    """The command, or those of its group, by their own names."""
    if not getattr(program, "commands", None):
        yield name, program
    for own, one in getattr(program, "commands", {}).items():
        yield from programs_of(own, one)


@pytest.mark.parametrize("name", all_commands())
def test_page_of_the_command_line_has_every_command_and_option(name: str) -> None:
    """The introduction has those of all commands; others stand in the sections of the command."""
    introduction, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    own_sections = [text for text in sections if re.match(rf"`.*\b{name}\b", text)]
    assert own_sections
    text = "\n".join([introduction, *own_sections])
    missing = []
    for own, program in programs_of(name, load_command(name)):
        options = [opt for one in program.params for opt in one.opts if opt.startswith("--")]
        missing += [f"{own} {opt}" for opt in options if not re.search(rf"{opt}(?![\w-])", text)]
        missing += [own] if not re.search(rf"`[^`\n]*\b{own}\b", text) else []
    assert missing == []


def test_misspelt_command_gets_a_suggestion() -> None:
    invoke = CliRunner().invoke
    assert "Did you mean 'call', 'calls'?" in invoke(app, ["calll"]).output
    assert "Did you mean 'show'?" in invoke(app, ["tools", "shw"]).output
    assert "--agent" in invoke(app, ["call", "calculator", "--agnt", "x"]).output


# -- An envelope that no model has read ----------------------------------------------------


@pytest.mark.parametrize("code", [None, "INVALID_PARAMS"])
def test_answer_is_read_without_models_as_the_model_reads_it(code: str | None) -> None:
    raw = envelope_bytes({"value": [1, "ä", None, 1.5]}, code=code)
    assert read_answer(raw) == document_of(Envelope.model_validate_json(raw))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"<hi>", b"\xff", b"[" * 100_000])
def test_bytes_that_are_not_an_envelope_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_answer(raw)


# -- `fumehood config show` ----------------------------------------------------------------

FILE = """
log_level = "debug"
[sessions]
max = 3
[webhook]
url = "https://user:pass@hooks.example:8443/s3cret?key=t0ken"
secret_file = "/etc/fumehood/secret"
[presets.small]
env = { KEY = "s3cret" }
[mcp_servers.clock]
command = ["clock", "--key=ghp_a1B2c3D4e5F6a1B2c3D4e5F6a1B2c3D4e5F6", "--zone=utc"]
[[budgets]]
name = "few"
calls = 3
"""


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(file))
    monkeypatch.setenv("FUMEHOOD_HOME", "/var/tmp/fumehood")
    monkeypatch.setenv("FUMEHOOD_JAIL__MEMORY_MB", "300")
    monkeypatch.setenv("FUMEHOOD_PRICES", '{"currency": "EUR"}')

    def run(*options: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["config", "show", *options])
        assert done.exit_code == code, done.output
        return done.output

    return run


def test_every_setting_is_shown_with_its_source_and_without_secrets(
    show: Any, tmp_path: Path
) -> None:
    text = show("--json")
    shown = json.loads(text)
    assert (shown["file"], shown["file_is_there"]) == (str(tmp_path / "config.toml"), True)
    assert shown["state_directory"] == "/var/tmp/fumehood"
    assert shown["control_socket"] == "/var/tmp/fumehood/control.sock"
    assert "https://hooks.example/***" in text
    assert not any(secret in text for secret in ("s3cret", "t0ken", "pass", "user:"))
    settings = shown["settings"]
    assert {path: (one["value"], one["source"]) for path, one in settings.items()}.items() >= {
        "presets.small.env.KEY": ("***", "file"),
        "mcp_servers.clock.command": (["clock", "--key=[redacted]", "--zone=utc"], "file"),
        "log_level": ("debug", "file"),
        "log_format": ("auto", "default"),
        "sessions.max": (3, "file"),
        "sessions.waiting": (20, "default"),
        "home": ("/var/tmp/fumehood", "FUMEHOOD_HOME"),
        "jail.memory_mb": (300, "FUMEHOOD_JAIL__MEMORY_MB"),
        "prices.currency": ("EUR", "FUMEHOOD_PRICES"),
        "prices.cpu_second": ("0", "default"),
        "webhook.secret_file": ("/etc/fumehood/secret", "file"),
    }.items()
    assert settings["budgets"]["source"] == "file"
    heads = {path.split(".")[0] for path in settings}
    assert heads == set(type(load_config()).model_fields)


def test_config_show_can_be_limited_to_set_values(show: Any) -> None:
    settings = json.loads(show("--json", "--set"))["settings"]
    assert "log_format" not in settings
    assert {one["source"] for one in settings.values()} >= {"file", "FUMEHOOD_HOME"}


def test_config_show_is_a_table_on_a_terminal(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.cli.config.wants_json", lambda asked: asked)
    monkeypatch.setenv("COLUMNS", "80")
    lines = show().splitlines()
    assert lines[0].startswith("configuration file  /")
    (line,) = (line for line in lines if "jail.memory_mb" in line)
    assert line.split() == ["jail.memory_mb", "300", "environment"]
    assert "s3cret" not in "".join(lines)


def test_config_show_reports_faults_in_words(show: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("log_levl = 1")
    assert "log_levl: there is no such key" in show(code=2)


# -- `fumehood images remove` --------------------------------------------------------------


class Docker(ListedImages):
    """Images that no container uses."""

    def images(self, **how: Any) -> list[dict[str, Any]]:
        return super().images(filters=how["filters"]) if "filters" in how else self.rows

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        return []

    def inspect_image(self, identifier: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["Id"] == identifier)

    def remove_image(self, what: str) -> None:
        self.rows = [row for row in self.rows if what not in (row["Id"], *row["RepoTags"])]


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Docker:
    """A Docker with the image `python` and an own one, whose folder is in the state directory."""
    mine = image_row("sha256:2", recipe="r", guest="g", image="mine")
    found = Docker(
        image_row("sha256:1", recipe="r", guest="g"), {**mine, "RepoTags": ["fumehood/mine:latest"]}
    )
    (tmp_path / "images" / "mine").mkdir(parents=True)
    monkeypatch.setenv("FUMEHOOD_HOME", str(tmp_path))
    monkeypatch.setattr(images, "open_store", lambda config: DockerStore(found))
    return found


def remove(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["images", "remove", *arguments])


def test_removed_image_is_gone_with_its_folder(docker: Docker, tmp_path: Path) -> None:
    assert remove("mine").exit_code == 0
    assert [row["Id"] for row in docker.rows] == ["sha256:1"]
    assert not (tmp_path / "images" / "mine").exists()


@pytest.mark.parametrize("name", ["pythn", "base-python", "../python"])
def test_misspelt_name_is_a_wrong_argument_and_removes_nothing(docker: Docker, name: str) -> None:
    done = remove(name)
    assert (done.exit_code, len(docker.rows)) == (2, 2)
    assert "There is no image" in done.output
    assert "Did you mean 'python'" in done.output


def test_removing_a_known_image_that_is_not_built_succeeds(docker: Docker) -> None:
    docker.rows = []
    assert remove("python").exit_code == 0


# -- `fumehood serve` for a person at a terminal -------------------------------------


def test_alerts_need_100_calls_in_the_foreground_unless_configured() -> None:
    config = in_foreground(Config())
    assert (config.alerts.min_calls, config.alerts.max_mean_ms) == (100, 500)
    configured = Config.model_validate({"alerts": {"min_calls": 20, "max_mean_ms": 9}})
    assert in_foreground(configured) == configured


# -- `fumehood` without arguments ----------------------------------------------------


BUDGET = {
    "budget": "daily", "subject": {"agent": "clerk\x1b[2J"}, "period": "day", "unit": "calls",
    "limit": 10, "spent": 7, "held": 1, "left": 2, "resets_at": None,
}  # fmt: skip


def answers(
    *, containers: bool = True, waiting: int = 0, calls: int = 0, missing: tuple[str, ...] = (), status: str = "ready",
    budgets: tuple[dict[str, Any], ...] = (), error: Any = None,
) -> dict[str, Any]:  # fmt: skip
    container = {"ready": containers and not missing, "enforced": [], "missing": list(missing)}
    page = {"has_more": False, "next_cursor": None, "total_count": waiting}
    return {
        "ready": {"status": status, "walls": {"container": container}},
        "approvals": {"error": error, "data": {"items": [{}] * waiting, "pagination": page}},
        "usage": {
            "error": error,
            "data": {"total": {"calls": calls, "errors": 1}, "budgets": list(budgets),
                     "currency": "CHF"},
        },
    }  # fmt: skip


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The overview for these answers of an engine, as people read it."""
    import socket

    path = tmp_path / "engine.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    monkeypatch.setenv("FUMEHOOD_SOCKET", str(path))
    monkeypatch.setattr(overview, "wants_json", lambda asked: asked)

    def asked(given: Any) -> str:
        name = lambda target: target.partition("?")[0].rpartition("/")[2]  # noqa: E731
        monkeypatch.setattr(
            overview, "send_once", lambda path, request, token: given[name(request.path)]
        )
        done = CliRunner().invoke(app, [])
        assert done.exit_code == 0, done.output
        return done.output

    yield asked
    listener.close()


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ({}, "fumehood call calculator"),
        ({"calls": 3}, "fumehood calls tail"),
        ({"calls": 3, "budgets": (BUDGET,)}, "fumehood usage"),
        ({"calls": 3, "budgets": ({**BUDGET, "spent": 6},)}, "fumehood calls tail"),
        ({"missing": ("No image python.",), "budgets": (BUDGET,)}, "fumehood images build"),
        ({"waiting": 2, "missing": ("No image python.",)}, "fumehood approvals watch"),
        ({"waiting": 2, "status": "not_ready"}, "fumehood doctor"),
        ({"error": {"code": "UNAUTHORIZED"}}, "fumehood doctor"),
    ],
    ids=str,
)
def test_next_step_follows_from_the_state(ask: Any, state: dict[str, Any], step: str) -> None:
    lines = dict(line.split(maxsplit=1) for line in ask(answers(**state)).splitlines())
    assert lines["next"].startswith(step)


def test_figures_are_shown_and_names_cannot_write_to_the_terminal(ask: Any) -> None:
    shown = ask(answers(waiting=2, calls=17, budgets=(BUDGET,), missing=("No image python.",)))
    for said in (
        "calls of yours that wait: 2", "calls of yours: 17; with an error: 1",
        "daily of clerk\\u{001b}[2J: 80% of 10 calls", "No image python.", "--help",
    ):  # fmt: skip
        assert said in shown
    assert "\x1b" not in shown


def test_overview_says_if_containers_are_unavailable(ask: Any) -> None:
    words = "containers unavailable; for the reason: fumehood doctor"
    assert words in ask(answers(containers=False))
    assert words not in ask(answers())


def test_overview_of_a_money_budget_names_the_currency(ask: Any) -> None:
    money = {**BUDGET, "unit": "money", "limit": "5.000000", "spent": "4", "held": "0"}
    assert "80% of 5.000000 CHF" in ask(answers(budgets=(money,)))


@pytest.mark.parametrize("odd", [[], None, {}, {"status": "ready", "walls": []}, "x"], ids=str)
def test_overview_says_if_the_server_is_not_an_engine(ask: Any, odd: Any) -> None:
    assert "not of this version" in ask(dict.fromkeys(("ready", "approvals"), odd))


def test_overview_without_an_engine_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_SOCKET", str(tmp_path / "none.sock"))
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["engine"], found["next"]) == ("not running", "fumehood serve")
