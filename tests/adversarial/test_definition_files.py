"""The tools directory's boundary: files that are bombs, traps or owned by another user.

All attacks are in one directory, each beside its harmless twin, and one process with hard limits on
CPU time and memory reads it: whatever a file does, every twin must be loaded.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import StartDaemon
from fumehood.definition_files.directory import DirectoryContents, ToolDirectory
from fumehood.sandbox import trusted_files
from support.attacks import Harm
from support.definition_files import DefinitionDirectory, definition_directory
from support.definitions import rest_document
from support.wait import DEADLINE_S, wait_until

MB = 1 << 20
CPU_SECONDS = 15
ADDRESS_SPACE = 400 * MB
CANARY = "canary-5f1c"

READ = f"""
import json, resource, sys
from pathlib import Path
from fumehood.definition_files.directory import ToolDirectory
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE}, {ADDRESS_SPACE}))
contents = ToolDirectory(Path(sys.argv[1])).load()
print(json.dumps({{
    "tools": [tool.definition.name for tool in contents.tools],
    "faults": {{fault.file: fault.reason for fault in contents.faults}},
}}))
"""


def _yaml_bomb(levels: int) -> bytes:
    """Each level is nine times as large as the one below; *Source*: CVE-2003-1564."""
    lines = ['l0: &l0 "ha"']
    for level in range(1, levels + 1):
        lines.append(f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]")
    return "\n".join(lines).encode()


def _nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def _long_key() -> bytes:
    return b"a." * (MB // 2 - 10) + b"b = 1"


def _directives() -> bytes:
    return b"".join(b"%%TAG !a%d! b\n" % number for number in range(60_000)) + b"---\na: 1\n"


def _definition(name: str, **fields: Any) -> bytes:
    return json.dumps(rest_document(name=name, **fields)).encode()


@dataclass(frozen=True)
class FileAttack:
    """A file that must be left out for exactly this reason, and its harmless twin."""

    name: str
    harm: Harm
    suffix: str
    content: bytes
    reason: str
    twin: bytes = b""
    source: str = "own"

    def __str__(self) -> str:
        return self.name


ATTACKS = [
    FileAttack("yaml-bomb", Harm.HOST_DOS, "yaml", _yaml_bomb(12), "anchors and aliases", source="billion laughs"),
    FileAttack("yaml-cycle", Harm.HOST_DOS, "yaml", b"&a [*a]", "anchors and aliases"),
    FileAttack("yaml-merge-bomb", Harm.HOST_DOS, "yaml", b"a: &a {x: 1}\nb: {<<: [*a, *a]}", "anchors and aliases"),
    FileAttack("yaml-python-object", Harm.ESCAPE, "yaml", b"!!python/object/apply:os.system ['true']", "tags", source="CVE-2017-18342"),
    FileAttack("yaml-python-name", Harm.ESCAPE, "yaml", b"!!python/name:os.system ''", "tags", source="CVE-2020-1747"),
    FileAttack("yaml-directives", Harm.HOST_DOS, "yaml", _directives(), "directives"),
    FileAttack("yaml-depth", Harm.HOST_DOS, "yaml", b"[" * (MB - 1), "nested deeper than 64"),
    FileAttack("yaml-depth-blocks", Harm.HOST_DOS, "yaml", b"- " * (MB // 2 - 1), "nested deeper than 64"),
    FileAttack("yaml-keys-of-keys", Harm.HOST_DOS, "yaml", b"? " * (MB // 2 - 1), "a key is not a string"),
    FileAttack("yaml-values", Harm.HOST_DOS, "yaml", b"[" + b"1," * 400_000 + b"1]", "more than 200000 values"),
    FileAttack("yaml-integer", Harm.HOST_DOS, "yaml", b"a: " + b"9" * 900_000, "too many digits"),
    FileAttack("yaml-two-documents", Harm.INTEGRITY, "yaml", b"{}\n---\n{}", "a second document"),
    FileAttack("yaml-duplicate-key", Harm.INTEGRITY, "yaml", b"dangerous: true\ndangerous: false", "given twice"),
    FileAttack("json-depth", Harm.HOST_DOS, "json", b"[" * (MB - 1), "nested deeper than 64"),
    FileAttack("json-depth-objects", Harm.HOST_DOS, "json", _nested(100_000), "nested deeper than 64"),
    FileAttack("json-integer", Harm.HOST_DOS, "json", b"9" * (MB - 1), "4300 digits"),
    FileAttack("json-float", Harm.INTEGRITY, "json", b'{"cost_per_use": 1e999}', "too large for a double"),
    FileAttack("json-nan", Harm.INTEGRITY, "json", b'{"cost_per_use": NaN}', "NaN"),
    FileAttack("json-duplicate-key", Harm.INTEGRITY, "json", b'{"dangerous": true, "dangerous": false}', "given twice"),
    FileAttack("json-surrogate", Harm.INTEGRITY, "json", b'{"name": "\\ud800"}', "lone surrogate"),
    FileAttack("json-nul", Harm.INTEGRITY, "json", b'{"name": "a\0b"}', "NUL bytes"),
    FileAttack("json-latin", Harm.INTEGRITY, "json", b'{"name": "\xe4"}', "not UTF-8"),
    FileAttack("json-values", Harm.HOST_DOS, "json", b"[" + b"1," * 400_000 + b"1]", "more than 200000 values"),
    FileAttack("json-50000-tools", Harm.HOST_DOS, "json", b"[" + b"{}," * 49_999 + b"{}]", "it holds 50000 tools"),
    FileAttack("json-2-mb", Harm.HOST_DOS, "json", b" " * (2 * MB), "larger than 1 MB", twin=b" " * (MB - 300)),
    FileAttack("toml-dotted-key", Harm.HOST_DOS, "toml", _long_key(), "more than 64 parts", source="tomllib is quadratic in the parts of a key"),
    FileAttack("toml-dotted-table", Harm.HOST_DOS, "toml", b"[" + _long_key()[:-4] + b"]", "more than 64 parts"),
    FileAttack("toml-quoted-key", Harm.HOST_DOS, "toml", b"'a'." * 200_000 + b"b = 1", "more than 64 parts"),
    FileAttack("toml-escaped-key", Harm.HOST_DOS, "toml", b'"\\"".' * 200_000 + b"b = 1", "more than 64 parts"),
    FileAttack("toml-escaped-table", Harm.HOST_DOS, "toml", b"[" + b'"\\\\\\"" . ' * 100_000 + b"b]", "more than 64 parts"),
    FileAttack("toml-depth", Harm.HOST_DOS, "toml", b"a = " + b"[" * (MB - 10), "nested deeper than 64"),
    FileAttack("toml-depth-tables", Harm.HOST_DOS, "toml", b"a = " + b"{a = " * 150_000, "nested deeper than 64"),
    FileAttack("toml-hexadecimal", Harm.HOST_DOS, "toml", b"a = 0x" + b"f" * (MB - 10), "4300 digits"),
    FileAttack("toml-50000-tools", Harm.HOST_DOS, "toml", b"[[tools]]\n" * 50_000, "it holds 50000 tools"),
    FileAttack("toml-duplicate-key", Harm.INTEGRITY, "toml", b"dangerous = true\ndangerous = false", "Cannot overwrite"),
    FileAttack("toml-date", Harm.INTEGRITY, "toml", b"sunset_date = 2020-01-01", "a date is not accepted"),
    FileAttack("host-code", Harm.ESCAPE, "json", _definition("x", type="NATIVE"), "only tools of type REST and MCP"),
    FileAttack("host-code-by-executor", Harm.ESCAPE, "json", _definition("x", executor="function"), "cannot run as"),
    FileAttack("sandbox-disabled", Harm.LATERAL, "json", _definition("x", sandboxed=False), "operator's configuration"),
    FileAttack("sandbox-disabled-as-yaml-no", Harm.LATERAL, "yaml", b"{name: x, type: MCP, description: X., sandboxed: no}", "operator's configuration"),
    FileAttack("endpoint-file", Harm.HOST_LEAK, "json", _definition("x", endpoint="file:///etc/passwd"), "must be an absolute URL"),
    FileAttack("endpoint-user", Harm.EXFIL, "json", _definition("x", endpoint=f"https://u:{CANARY}@a.example/"), "user name or password"),
    FileAttack("endpoint-host-of-secret", Harm.EXFIL, "json", _definition("x", endpoint="https://${secret:A}.example/"), "which host"),
    FileAttack("header-injection", Harm.INTEGRITY, "json", _definition("x", headers={"x": "a\r\nhost: b"}), "control characters"),
    FileAttack("header-smuggling", Harm.INTEGRITY, "json", _definition("x", headers={"Transfer-Encoding": "chunked"}), "belongs to the connection"),
    FileAttack("header-credential", Harm.HOST_LEAK, "json", _definition("x", headers={"Authorization": f"Bearer {CANARY}"}), "looks like a credential"),
    FileAttack("exponential-time-pattern", Harm.HOST_DOS, "json", _definition("x", parameters={"properties": {"a": {"pattern": "(a+)+\\1$"}}}), "RE2"),
    FileAttack("remote-schema-reference", Harm.EXFIL, "json", _definition("x", parameters={"properties": {"a": {"$ref": "https://evil.example/s"}}}), "only references inside"),
    FileAttack("deeply-nested-schema", Harm.HOST_DOS, "json", b'{"name": "x", "type": "REST", "description": "X.", "method": "GET", "endpoint": "https://a.example/", "parameters": ' + b'{"properties": {"a": ' * 25 + b"{}" + b"}}" * 25 + b"}", "32 levels"),
    FileAttack("terminal-escape-in-key", Harm.INTEGRITY, "json", b'{"name": "x", "type": "REST", "\\u001b[2J": 1}', "a REST tool needs"),
]  # fmt: skip


def test_attack_table_is_large_enough_and_names_are_unique() -> None:
    assert len(ATTACKS) >= 45
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


def _read_under_limits(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=600
    )


def _twin_name(attack: FileAttack) -> str:
    return "twin_" + attack.name.replace("-", "_")


@pytest.fixture(scope="module")
def read() -> Iterator[dict[str, Any]]:
    """The output of a process with hard limits that loads all attacks and twins."""
    with definition_directory() as directory:
        for attack in ATTACKS:
            directory.put(f"{attack.name}.{attack.suffix}", attack.content)
            # The nearest harmless file: of the same format, as large where that is the attack.
            document = _definition(_twin_name(attack)) + attack.twin
            suffix = "json" if attack.suffix == "toml" else attack.suffix
            directory.put(f"twin-{attack.name}.{suffix}", document)
        done = _read_under_limits(directory.path)
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)


@pytest.mark.row("R4", "T5")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_file_is_left_out_for_its_reason_and_its_twin_is_loaded(
    attack: FileAttack, read: dict[str, Any]
) -> None:
    reason = read["faults"][f"{attack.name}.{attack.suffix}"]
    assert attack.reason in reason
    assert _twin_name(attack) in read["tools"]
    assert reason.isprintable()
    assert len(reason) < 2100


def test_only_twins_are_loaded_and_no_fault_contains_a_credential(read: dict[str, Any]) -> None:
    assert sorted(read["tools"]) == sorted(_twin_name(attack) for attack in ATTACKS)
    assert CANARY not in json.dumps(read)


CONTROLS = {
    "yaml-bomb": "import json, yaml; json.dumps(yaml.safe_load(data))",
    "yaml-directives": "import yaml; list(yaml.parse(data, Loader=yaml.CSafeLoader))",
    "toml-dotted-key": "import tomllib; tomllib.loads(data.decode())",
}
"""Programs that parse the same bytes with the library alone and exceed the limits."""


@pytest.mark.parametrize("name", CONTROLS)
def test_control_bomb_exhausts_limits_without_the_defence(name: str, tmp_path: Path) -> None:
    (attack,) = (attack for attack in ATTACKS if attack.name == name)
    path = tmp_path / "bomb"
    path.write_bytes(attack.content)
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE}, {ADDRESS_SPACE}))
data = open(sys.argv[1], "rb").read()
{CONTROLS[name]}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, timeout=600
    )
    assert done.returncode != 0


# -- what a file is, and whose ---------------------------------------------------------


def _load(directory: DefinitionDirectory) -> DirectoryContents:
    return ToolDirectory(directory.path).load()


def _names(contents: DirectoryContents) -> list[str]:
    return [tool.definition.name for tool in contents.tools]


def _reason(contents: DirectoryContents) -> str:
    (fault,) = contents.faults
    return fault.reason


@pytest.mark.row("R4")
def test_symlink_out_of_tools_directory_is_not_followed(
    definitions: DefinitionDirectory, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.json"
    outside.write_bytes(_definition("outside"))
    outside.chmod(0o600)
    (definitions.path / "a.json").symlink_to(outside)
    contents = _load(definitions)
    assert (_names(contents), _reason(contents)) == (
        [],
        "it is a symbolic link; links are not followed",
    )
    definitions.remove("a.json")
    definitions.put("a.json", outside.read_bytes())  # the twin: the same, as a file
    assert _names(_load(definitions)) == ["outside"]


@pytest.mark.row("R4")
@pytest.mark.parametrize("becomes", ["link", "pipe", "another user's", "writable by others"])
def test_file_replaced_between_check_and_open_is_refused(
    definitions: DefinitionDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, becomes: str
) -> None:
    """The name is checked, then replaced: the checks must apply to the file that was opened."""
    outside = tmp_path / "outside.json"
    outside.write_bytes(_definition("outside"))
    path = definitions.put("a.json", _definition("inside"))
    assert _names(_load(definitions)) == ["inside"]
    real_open = os.open

    def exchange(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if name == "a.json":
            path.unlink()
            if becomes == "link":
                path.symlink_to(outside)
            elif becomes == "pipe":
                os.mkfifo(path, 0o600)
            else:
                path.write_bytes(_definition("outside"))
                path.chmod(0o666 if becomes == "writable by others" else 0o600)
        return real_open(name, flags, *rest, **more)

    class Os:
        def __getattr__(self, name: str) -> Any:
            if name == "open":
                return exchange
            if name == "fstat" and becomes == "another user's":
                return _owned_by_stranger
            return getattr(os, name)

    directory = ToolDirectory(definitions.path)
    monkeypatch.setattr(trusted_files, "os", Os())
    contents = directory.load()
    assert _names(contents) == []
    assert len(contents.faults) == 1


def _owned_by_stranger(descriptor: int) -> os.stat_result:
    found = list(os.fstat(descriptor))
    found[4] = 54_321 if stat.S_ISREG(found[0]) else found[4]
    return os.stat_result(found)


@pytest.mark.row("R4")
def test_fifo_in_tools_directory_does_not_block_loading(definitions: DefinitionDirectory) -> None:
    os.mkfifo(definitions.path / "a.json", 0o600)
    definitions.put_tools("b.json", "twin")
    done = _read_under_limits(definitions.path)
    assert json.loads(done.stdout) == {
        "tools": ["twin"],
        "faults": {"a.json": "it is not a regular file"},
    }


def test_control_blocking_open_of_fifo_hangs(definitions: DefinitionDirectory) -> None:
    os.mkfifo(definitions.path / "a.json", 0o600)
    program = f"print('waits', flush=True); open({str(definitions.path / 'a.json')!r})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waits\n"
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
        finally:
            process.kill()


@pytest.mark.row("R4")
def test_file_growing_while_read_is_left_out_and_loading_ends(
    definitions: DefinitionDirectory,
) -> None:
    path = definitions.put("a.json", b"[")
    definitions.put_tools("b.json", "twin")
    stop = threading.Event()

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b" " * 4096)
                if file.tell() > 64 * MB:
                    file.truncate(0)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        directory = ToolDirectory(definitions.path)
        contents = directory.load()
        for _ in range(20):
            contents = directory.poll() or contents
            assert _names(contents) == ["twin"]
    finally:
        stop.set()
        writer.join(timeout=DEADLINE_S)
    assert [fault.file for fault in contents.faults] == ["a.json"]


@contextmanager
def _as_ordinary_user(directory: DefinitionDirectory) -> Iterator[None]:
    """Switch to an unprivileged user if running as root, because root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    for path in (directory.path, *directory.path.iterdir()):
        os.chown(path, 65_534, 65_534)
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.row("R4")
def test_unreadable_file_is_reported_and_other_files_are_loaded(
    definitions: DefinitionDirectory,
) -> None:
    definitions.put_tools("a.json", "secret")
    definitions.put_tools("b.json", "twin")
    (definitions.path / "a.json").chmod(0)
    with _as_ordinary_user(definitions):
        contents = _load(definitions)
    assert _names(contents) == ["twin"]
    assert _reason(contents) == "it cannot be read: Permission denied"


@pytest.mark.row("R4")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_file_or_directory_owned_by_another_user_is_not_loaded(
    definitions: DefinitionDirectory, what: str
) -> None:
    path = definitions.put_tools("a.json", "a")
    stranger = frozenset({54_321})
    if os.geteuid() == 0:
        os.chown(path if what == "file" else definitions.path, 54_321, 54_321)
        contents = _load(definitions)
    else:  # the same files, looked at by somebody else
        contents = ToolDirectory(definitions.path, owners=stranger).load()
    assert _names(contents) == []
    assert "belongs to another user" in _reason(contents)


@pytest.mark.row("R4")
def test_world_writable_tools_directory_is_not_loaded_by_daemon(
    start_daemon: StartDaemon, definitions: DefinitionDirectory
) -> None:
    definitions.put_tools("a.json", "a")
    definitions.path.chmod(0o777)
    daemon = start_daemon(tools_directory=str(definitions.path))
    client = daemon.client()
    assert client.get("/v1/tools/a").code == "TOOL_NOT_FOUND"
    assert client.calculate("1 + 1").body["success"]
    assert "chmod go-w" in daemon.log
    definitions.path.chmod(0o700)  # the twin: the same directory, closed
    wait_until(lambda: client.get("/v1/tools/a").status == 200)
    definitions.path.chmod(0o777)
    wait_until(lambda: client.get("/v1/tools/a").code == "TOOL_NOT_FOUND")


@pytest.mark.row("R4", "P8")
def test_daemon_serves_calls_while_refusing_every_attack_file(
    start_daemon: StartDaemon, definitions: DefinitionDirectory
) -> None:
    daemon = start_daemon(tools_directory=str(definitions.path))
    client = daemon.client()
    for attack in ATTACKS:
        definitions.put(f"{attack.name}.{attack.suffix}", attack.content)
    definitions.put_tools("zz-last.json", "last")
    answers = []

    def last_is_there() -> bool:
        answers.append(client.calculate("1 + 1").body["success"])
        return client.get("/v1/tools/last").status == 200

    wait_until(last_is_there)
    assert len(answers) > 1
    assert all(answers)
    wait_until(lambda: all(f"{attack.name}." in daemon.log for attack in ATTACKS))
    assert CANARY not in daemon.log
    assert "\x1b" not in daemon.log
