"""Configuration: absent is the safe default, unknown is an error, the environment wins."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fumehood import Config, ConfigError, load_config
from fumehood.config import config_file
from fumehood.sandbox.settings import ContainerSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FUMEHOOD_HOME", "FUMEHOOD_CONFIG", "FUMEHOOD_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config" / "fumehood" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_default_configuration_is_safe() -> None:
    config = load_config()
    assert config.host_tools == ()
    assert config.allow_debug is False
    assert config.log_level == "info"
    limits = config.interpreter.limits
    assert (limits.default_wall_s, limits.max_wall_s) == (5, 30)
    assert (limits.default_memory_mb, limits.max_memory_mb, limits.output_bytes) == (
        64,
        256,
        65_536,
    )
    jail = config.jail.limits
    assert (jail.default_wall_s, jail.default_memory_mb, jail.output_bytes) == (30, 256, 1 << 20)
    assert config.prices.cpu_second == Decimal(0)


def test_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, 'log_level = "debug"\ndrain_seconds = 3\n[interpreter]\nmemory_mb = 32\n')
    monkeypatch.setenv("FUMEHOOD_DRAIN_SECONDS", "4")
    config = load_config()
    assert (config.log_level, config.drain_seconds, config.interpreter.memory_mb) == (
        "debug",
        4,
        32,
    )


def test_arguments_override_the_environment_unless_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUMEHOOD_LOG_LEVEL", "error")
    assert load_config(log_level="debug").log_level == "debug"
    assert load_config(log_level=None).log_level == "error"


@pytest.mark.parametrize(
    ("value", "names"), [("", ()), ("a", ("a",)), ("a, b,,c ", ("a", "b", "c")), (" , ", ())]
)
def test_host_tools_variable_is_comma_separated(
    monkeypatch: pytest.MonkeyPatch, value: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FUMEHOOD_HOST_TOOLS", value)
    assert load_config().host_tools == names


def test_host_tools_in_the_file_are_a_list(tmp_path: Path) -> None:
    _write(tmp_path, 'host_tools = ["a", "b"]\n')
    assert load_config().host_tools == ("a", "b")


def test_nested_settings_use_double_underscores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_INTERPRETER__TIMEOUT_SECONDS", "2.5")
    monkeypatch.setenv("FUMEHOOD_PRICES__CPU_SECOND", "0.1")
    config = load_config()
    assert config.interpreter.limits.default_wall_s == 2.5
    assert config.prices.cpu_second == Decimal("0.1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 1\n", "colour"),
        ("[interpreter]\ncolour = 1\n", "interpreter.colour"),
        ('log_level = "loud"\n', "log_level"),
        ("drain_seconds = -1\n", "drain_seconds"),
        ("[interpreter]\nmemory_mb = 15\n", "interpreter.memory_mb"),
        ("[jail]\nmemory_mb = 31\n", "jail.memory_mb"),
        ("[jail]\ncolour = 1\n", "jail.colour"),
        ('[prices]\ncurrency = "dollars"\n', "prices.currency"),
        ('[container]\nimage = "python"\n', "container.image"),
        ('[container.images]\npython = "../python"\n', "container.images.python"),
        ('[container.images]\nruby = "python"\n', "container.images.ruby"),
        ("[sessions]\nidle_seconds = 0\n", "sessions.idle_seconds"),
        ("[sessions]\ncolour = 1\n", "sessions.colour"),
        ("this is no toml", "cannot be read"),
    ],
)
def test_invalid_configuration_file_is_refused_with_a_reason(
    tmp_path: Path, text: str, words: str
) -> None:
    _write(tmp_path, text)
    with pytest.raises(ConfigError, match=words):
        load_config()


def test_every_configuration_fault_is_listed(tmp_path: Path) -> None:
    _write(tmp_path, "colour = 1\ndrain_seconds = -1\n")
    with pytest.raises(ConfigError, match="colour") as caught:
        load_config()
    assert "drain_seconds" in str(caught.value)


def test_missing_named_configuration_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="does not exist"):
        load_config()


def test_named_configuration_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, "drain_seconds = 3\n")
    named = tmp_path / "named.toml"
    named.write_text("drain_seconds = 7\n", encoding="utf-8")
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(named))
    assert config_file() == named
    assert load_config().drain_seconds == 7


def test_default_socket_is_in_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Config().socket_path == tmp_path / "state" / "fumehood" / "engine.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert Config().socket_path == Path("/run/user/1/fumehood/engine.sock")
    assert Config(home=Path("/h")).socket_path == Path("/h/engine.sock")
    assert Config(home=Path("/h"), socket=Path("/s")).socket_path == Path("/s")


def test_default_state_is_in_home_or_the_xdg_directory(tmp_path: Path) -> None:
    assert Config().state_directory == tmp_path / "state" / "fumehood"
    assert Config(home=Path("/h")).state_directory == Path("/h")


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_socket_path_has_at_most_107_bytes(length: int, fits: bool) -> None:
    config = Config(socket=Path("/" + "s" * (length - 1)))
    if fits:
        assert len(str(config.socket_path)) == length
        return
    with pytest.raises(ConfigError, match="has 108 bytes, the kernel allows 107"):
        _ = config.socket_path


def test_socket_path_length_is_counted_in_bytes() -> None:
    with pytest.raises(ConfigError, match="has 121 bytes"):
        _ = Config(socket=Path("/" + "é" * 60)).socket_path


@pytest.mark.parametrize("field", ["timeout_seconds", "max_timeout_seconds", "cpu_seconds"])
@pytest.mark.parametrize("value", [0, -1, "soon", float("nan")])
def test_non_positive_limit_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        load_config(interpreter={field: value})


@pytest.mark.row("R4")
def test_tools_directory_is_unset_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config().tools_directory is None
    monkeypatch.setenv("FUMEHOOD_TOOLS_DIRECTORY", "")
    assert load_config().tools_directory is None
    monkeypatch.setenv("FUMEHOOD_TOOLS_DIRECTORY", "/etc/fumehood/tools")
    assert load_config().tools_directory == Path("/etc/fumehood/tools")


@pytest.mark.row("R4")
@pytest.mark.parametrize("path", ["tools", "./tools", "~/tools"])
def test_tools_directory_must_be_absolute(path: str) -> None:
    with pytest.raises(ConfigError, match=r"tools_directory: .*must be an absolute path"):
        load_config(tools_directory=path)


def test_container_limits_use_memory_size_classes() -> None:
    config = load_config(container=ContainerSettings(memory_mb=300, timeout_seconds=3, output_kb=1))
    limits = config.container.limits
    assert limits.memory_classes == (
        128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768,
    )  # fmt: skip
    assert limits.memory_class(300) == 256
    assert (limits.default_wall_s, limits.output_bytes, limits.min_memory_mb) == (3, 1024, 128)


def test_program_output_limit_is_at_most_a_gigabyte() -> None:
    config = load_config(container=ContainerSettings(output_kb=1024 * 1024))
    assert config.container.limits.output_bytes == 1 << 30
    assert load_config().container.limits.output_bytes == 1 << 20
    with pytest.raises(ValidationError):
        ContainerSettings(output_kb=1024 * 1024 + 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pool_min": 9},
        {"pool_max": 0},
        {"memory_mb": 64},
        {"max_memory_mb": 65536},
        {"cpus": 0},
        {"runtime": "../runsc"},
        {"image": "Python"},
        {"image": "python:latest"},
        {"privileged": True},
    ],
)
def test_invalid_container_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config(container=wrong)


@pytest.mark.row("S6")
def test_default_session_limits_are_set() -> None:
    rules = load_config().sessions
    assert (rules.image, rules.max, rules.max_of_one) == ("python-data", 32, 16)
    assert (rules.idle_seconds, rules.lifetime_seconds) == (1800, 14_400)
    assert (rules.queue_seconds, rules.waiting) == (30, 20)


@pytest.mark.row("S6")
def test_per_principal_session_limit_never_exceeds_the_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUMEHOOD_SESSIONS__MAX", "2")
    assert load_config().sessions.max_of_one == 2


@pytest.mark.row("S7")
def test_image_of_each_language_is_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_CONTAINER__IMAGES__PYTHON", "mine")
    assert load_config().container.images.model_dump() == {
        "python": "mine", "shell": "shell", "javascript": "node",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "path", "meant"),
    [
        ("log_levl = 'debug'", "log_levl", "log_level"),
        ("[sesions]\nmax = 1", "sesions", "sessions"),
        ("[container]\npol_max = 1", "container.pol_max", "pool_max"),
        ("[container.images]\npyhton = 'x'", "container.images.pyhton", "python"),
        ("[[budgets]]\nname = 'a'\ncalls = 1\nperiodd = 'day'", "budgets.0.periodd", "period"),
        ("[[principals]]\nid = 'a'\nuid = [1]", "principals.0.uid", "uids"),
        ("[rest]\nallow_hosts = []", "rest.allow_hosts", "allowed_hosts"),
        ("[secrets.env]\nenv = 'A'\ntools = ['a']\nhost = ['b']", "secrets.env.host", "hosts"),
    ],
)
def test_misspelt_key_is_reported_with_file_and_suggestion(
    text: str, path: str, meant: str, tmp_path: Path
) -> None:
    file = _write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_config()
    assert f"{path}: there is no such key in {file}. Did you mean '{meant}'" in str(refused.value)


def test_misspelt_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_JAIL__MEMORY", "300")
    with pytest.raises(ConfigError, match=r"variable FUMEHOOD_JAIL__MEMORY\)\. .*'memory_mb'"):
        load_config()


@pytest.mark.parametrize("name", ["LOG_LEVLE", "CONTAINER_MEMORY_MB", "CONTANER__MEMORY_MB"])
def test_unrelated_variable_is_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FUMEHOOD_{name}", "300")
    assert load_config() == Config()


@pytest.mark.row("T5")
def test_secrets_and_allowed_hosts_can_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_REST__ALLOWED_HOSTS", '["API.internal:8080"]')
    monkeypatch.setenv("FUMEHOOD_SECRETS", '{"k": {"env": "K", "tools": ["a"], "hosts": ["b"]}}')
    config = load_config()
    assert config.rest.allowed_hosts == ("api.internal:8080",)
    assert config.secrets["k"].hosts == ("b",)


@pytest.mark.row("D3")
@pytest.mark.parametrize("address", ["127.0.0.1:8321", "127.9.9.9:1", "[::1]:65535"])
def test_loopback_tcp_address_is_accepted(address: str) -> None:
    assert load_config(tcp=address).tcp == address


@pytest.mark.row("D3")
@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:8321", "10.0.0.1:80", "[::]:80", "example.org:80", "localhost:80", "127.0.0.1",
     "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x", "127.0.0.1:+1", ":80", "8321", "127.1:80"],
)  # fmt: skip
def test_non_loopback_tcp_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="loopback address"):
        load_config(tcp=address)
