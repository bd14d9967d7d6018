"""Configuration: absent is the safe default, unknown is an error, the environment wins."""

from __future__ import annotations

import json
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, ConfigError, load_config
from fumehood.config import config_file
from fumehood.registry.secrets import SecretSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FUMEHOOD_HOME", "FUMEHOOD_CONFIG", "FUMEHOOD_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


KEY = {"env": "K", "tools": ("a",), "hosts": ("b",)}


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
    assert config.prices.cpu_second == Decimal(0)


def test_arguments_override_the_environment_unless_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUMEHOOD_LOG_LEVEL", "error")
    assert load_config(log_level="debug").log_level == "debug"
    assert load_config(log_level=None).log_level == "error"


@pytest.mark.parametrize(
    ("text", "variables", "setting", "value"),
    [
        ("", {}, "interpreter.limits.default_wall_s", 5),
        ("", {}, "interpreter.limits.max_wall_s", 30),
        ("", {}, "interpreter.limits.default_memory_mb", 64),
        ("", {}, "interpreter.limits.max_memory_mb", 256),
        ("", {}, "interpreter.limits.output_bytes", 65_536),
        ("", {}, "jail.limits.default_wall_s", 30),
        ("", {}, "jail.limits.default_memory_mb", 256),
        ("", {}, "jail.limits.output_bytes", 1 << 20),
        ("", {}, "container.limits.output_bytes", 1 << 20),
        ("", {}, "container.limits.min_memory_mb", 128),
        ("", {}, "container.limits.memory_classes", tuple(128 << n for n in range(9))),
        ("[container]\ntimeout_seconds = 3\n", {}, "container.limits.default_wall_s", 3),
        ("", {}, "sessions.image", "python-data"),
        ("", {}, "sessions.max", 32),
        ("", {}, "sessions.max_of_one", 16),
        ("", {}, "sessions.idle_seconds", 1800),
        ("", {}, "sessions.lifetime_seconds", 14_400),
        ("", {}, "sessions.queue_seconds", 30),
        ("", {}, "sessions.waiting", 20),
        ('log_level = "debug"\n', {}, "log_level", "debug"),
        ("drain_seconds = 3\n", {"DRAIN_SECONDS": "4"}, "drain_seconds", 4),
        ("[interpreter]\nmemory_mb = 32\n", {"DRAIN_SECONDS": "4"}, "interpreter.memory_mb", 32),
        ('host_tools = ["a", "b"]\n', {}, "host_tools", ("a", "b")),
        ("", {"HOST_TOOLS": ""}, "host_tools", ()),
        ("", {"HOST_TOOLS": "a, b,,c "}, "host_tools", ("a", "b", "c")),
        ("", {"HOST_TOOLS": " , "}, "host_tools", ()),
        ("", {"INTERPRETER__TIMEOUT_SECONDS": "2.5"}, "interpreter.limits.default_wall_s", 2.5),
        ("", {"PRICES__CPU_SECOND": "0.1"}, "prices.cpu_second", Decimal("0.1")),
        ("", {"SESSIONS__MAX": "2"}, "sessions.max_of_one", 2),
        ("", {"TOOLS_DIRECTORY": ""}, "tools_directory", None),
        ("", {"TOOLS_DIRECTORY": "/etc/tools"}, "tools_directory", Path("/etc/tools")),
        ("", {"CONTAINER__IMAGES__PYTHON": "mine"}, "container.images.python", "mine"),
        ("", {"CONTAINER__IMAGES__PYTHON": "mine"}, "container.images.shell", "shell"),
        ("", {"CONTAINER__OUTPUT_KB": "1048576"}, "container.limits.output_bytes", 1 << 30),
        (
            "",
            {"REST__ALLOWED_HOSTS": '["A.internal:80"]'},
            "rest.allowed_hosts",
            ("a.internal:80",),
        ),
        ("", {"SECRETS": f'{{"k": {json.dumps(KEY)}}}'}, "secrets", {"k": SecretSettings(**KEY)}),
    ],
)
def test_setting_comes_from_its_variable_or_the_file_or_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, variables: dict[str, str],
    setting: str, value: Any,
) -> None:  # fmt: skip
    _write(tmp_path, text)
    for name, given in variables.items():
        monkeypatch.setenv(f"FUMEHOOD_{name}", given)
    assert attrgetter(setting)(load_config()) == value


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
        ("this is no toml", r"config\.toml is not TOML: .*line 1"),
        ("colour = 1\ndrain_seconds = -1\n", "(?s)drain_seconds.*colour"),  # every fault is listed
    ],
)
def test_invalid_configuration_file_is_refused_with_a_reason(
    tmp_path: Path, text: str, words: str
) -> None:
    _write(tmp_path, text)
    with pytest.raises(ConfigError, match=words):
        load_config()


def test_configuration_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "")
    config_file().write_bytes(b'log_level = "\xff"\n')
    with pytest.raises(ConfigError, match=r"config\.toml is not TOML: 'utf-8' codec"):
        load_config()


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(
            ({"interpreter": {field: value}}, field)
            for field in ("timeout_seconds", "max_timeout_seconds", "cpu_seconds")
            for value in (0, -1, "soon", float("nan"))
        ),
        *(
            ({"container": {field: value}}, f"container.{field}")
            for field, value in (
                ("pool_max", 0), ("memory_mb", 64), ("max_memory_mb", 65536), ("cpus", 0),
                ("runtime", "../runsc"), ("image", "Python"), ("output_kb", 1024 * 1024 + 1),
                ("privileged", True),
            )
        ),
        ({"container": {"pool_min": 9}}, "container"),
        *(
            ({"tools_directory": path}, r"tools_directory: .*must be an absolute path")
            for path in ("tools", "./tools", "~/tools")
        ),
        *(
            ({"tcp": address}, "an IP address with its port")
            for address in (
                "example.org:80", "localhost:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536",
                "127.0.0.1:x", "127.0.0.1:+1", ":80", "8321", "127.1:80",
            )
        ),
        *(
            ({"tcp": address, **more}, "must be a loopback address")
            for address in ("0.0.0.0:8321", "10.0.0.1:80", "[::]:80")
            for more in ({}, {"tcp_behind_proxy": True})
        ),
        ({"tls": {"cert": "/a", "key": "/b"}}, "need tcp"),
        ({"tcp_behind_proxy": True}, "need tcp"),
        ({"mcp_servers": {"a": {"command": ["b"], "env": {"API_KEY": "short"}}}},
         r"mcp_servers.*API_KEY has fewer than 8 characters"),
    ],
)  # fmt: skip
def test_invalid_setting_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(**settings)


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


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("CONTANER__MEMORY_MB", "300", "contaner"),
        ("contaner__images__python", "x", "contaner"),
        ("CONTANER", ' {"memory_mb": 300}', "contaner"),
        ("GONE__ADDRESS", "10.0.0.1:6379", "gone"),  # of a part that is not there
    ],
)
def test_variable_of_a_table_that_does_not_exist_is_refused(
    name: str, value: str, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _write(tmp_path, "log_level = 'debug'")
    monkeypatch.setenv(f"FUMEHOOD_{name}", value)
    said = rf"{key}: there is no such key \(variable FUMEHOOD_{name.upper()}\)\."
    with pytest.raises(ConfigError, match=said):
        load_config()
    monkeypatch.setenv(f"FUMEHOOD_{name}", "")  # which counts as absent
    assert load_config().log_level == "debug"


@pytest.mark.parametrize("name", ["LOG_LEVLE", "CONTAINER_MEMORY_MB"])
def test_unrelated_variable_is_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FUMEHOOD_{name}", "300")
    assert load_config() == Config()


@pytest.mark.row("D3")
@pytest.mark.parametrize("address", ["127.0.0.1:8321", "127.9.9.9:1", "[::1]:65535"])
def test_loopback_tcp_address_is_accepted(address: str) -> None:
    assert load_config(tcp=address).tcp == address


def test_address_on_a_network_is_accepted_with_tls() -> None:
    tls = {"cert": "/etc/cert.pem", "key": "/etc/key.pem"}
    assert load_config(tcp="0.0.0.0:8443", tls=tls).tls is not None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("memroy_mb = 256", "presets.big.memroy_mb: there is no such key"),
        ("name = 'x'", "presets.big.name: there is no such key"),
        ("disk_mb = 2048", "big.disk_mb must be from 16 to 1024, by sessions.max_disk_mb"),
        ("memory_mb = 64", "big.memory_mb must be from 128 to 32768, by sessions.max_memory_mb"),
        (
            "idle_seconds = 1801",
            "big.idle_seconds must be from 0 to 1800, by sessions.idle_seconds",
        ),
        ("lifetime_seconds = 20000", "big.lifetime_seconds must be from 0 to 14400"),
        ("cpus = 100", "presets.big.cpus: "),
        ("image = '../python'", "presets.big.image: "),
        ("network = ['http://a.example']", "presets.big.network.0: "),
        ("env = { 'A-B' = '1' }", "presets.big.env.A-B"),
    ],
)
def test_preset_with_an_unknown_key_or_over_the_limits_of_sessions_is_refused(
    tmp_path: Path, keys: str, said: str
) -> None:
    table = "[sessions]\nmax_disk_mb = 1024\n[presets.big]\n"
    file = _write(tmp_path, table + keys)
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert said in str(caught.value)
    file.write_text(table + "disk_mb = 1024\nlifetime_seconds = 20000\nenv = { A = 'hidden' }\n")
    config = load_config()  # the twin
    assert config.presets["big"].disk_mb == 1024
    assert "hidden" not in repr(config)
