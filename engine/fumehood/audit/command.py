"""`fumehood audit`: verify and export the audit chain, and rotate its key.

`verify` and `export` read the state directory directly, with the rights of its owner. No running
engine is needed. The result of `verify` therefore does not depend on the engine that wrote the
chain.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from inspect import getsource
from pathlib import Path
from typing import Annotated

import typer

from fumehood.answers import AuditRotation
from fumehood.audit import verify as verifier
from fumehood.audit.service import (
    ANCHORS_NAME,
    exported,
    load_anchors,
    own_anchors,
    shown_verdict,
    verify_state,
)
from fumehood.audit.verify import Anchor, Verdict, export_line, read_export, report
from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import AsJson, Until, moment
from fumehood.cli.plain import plain
from fumehood.cli.reach import read_config
from fumehood.cli.show import (
    as_text,
    show_json,
    wants_json,
)
from fumehood.core.escaping import visible
from fumehood.storage import audit_rows
from fumehood.storage.audit_keys import all_keys
from fumehood.storage.audit_rows import Unreadable, read_key
from fumehood.storage.errors import StoreError

audit = typer.Typer(help="The audit chain: verify, export, rotate its key.", no_args_is_help=True)

Files = list[Path] | None

IMPORT_OF_ROWS = re.compile(r"from fumehood\.storage\.audit_rows import \(.*?\)\n", re.DOTALL)


@audit.command("verify")
def verify(
    anchor: Annotated[
        Files,
        typer.Option(help="A file of anchors kept elsewhere, or a JSON log; repeatable."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Verify this export instead of the state directory.")
    ] = None,
    key: Annotated[
        Files,
        typer.Option(help="A copy of a key; repeatable. Default: those in the state directory."),
    ] = None,
    part: Annotated[
        bool, typer.Option("--part", help="The export is only part of a chain.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Detect changed, removed, inserted or reordered rows, and a tail cut before an anchor."""
    if part and export is None:
        fail("--part needs --export.", ExitCode.USAGE)
    with _in_words():
        verdict = _verdict(anchor or [], export, key or [], part=part)
    if wants_json(as_json):
        show_json(shown_verdict(verdict).model_dump(mode="json"))
    else:
        for line in report(verdict):
            say(visible(line))
    if verdict.anchors == 0:
        print(
            "No anchor was compared, so rows cut off at the end cannot be detected. Give one "
            "that was kept elsewhere with --anchor.",
            file=sys.stderr,
        )
    if not verdict.is_intact:
        raise typer.Exit(ExitCode.TOOL_FAILED)


@audit.command("export")
def export(
    since: Annotated[
        str | None,
        typer.Option(help="From this age (10m, 1h, 7d) or time (2026-01-31T09:30) on."),
    ] = None,
    until: Until = None,
    with_verifier: Annotated[
        Path | None,
        typer.Option(
            help="Put a program that verifies exports, and the anchors, into this directory."
        ),
    ] = None,
) -> None:
    """Write the chain to standard output as JSON Lines, which can be verified elsewhere."""
    config = read_config()
    state, url = config.state_directory, config.state.secret_url
    now = datetime.now(UTC)
    first, last = moment(since, now), moment(until, now, "--until")
    _require_readable(state)
    with _in_words():
        if with_verifier is not None:
            _put_verifier(state, with_verifier)
        with exported(state, first, last, url) as rows:
            for row in rows:
                sys.stdout.write(f"{export_line(row)}\n")
        sys.stdout.flush()


@as_text
def _show_rotation(rotation: AuditRotation) -> None:
    say(f"From row {rotation.seq + 1} on, the chain uses the key {rotation.key_id}.")
    say(f"Keep audit-{rotation.previous_key_id}.key: earlier rows need it for verification.")


plain(
    audit,
    "audit.rotate",
    "Continue the chain under a new key. Needs a credential with admin and a running engine.",
    _show_rotation,
)


def _verdict(anchor: list[Path], export: Path | None, key: list[Path], *, part: bool) -> Verdict:
    config = read_config()
    state, url = config.state_directory, config.state.secret_url
    if export is None or not key:
        _require_readable(state)
    given = [read_key(path.read_text("ascii", "replace")) for path in key]
    keys = {entry.id: entry.secret for entry in given} if given else None
    anchors: list[Anchor] = [found for path in anchor for found in _some(load_anchors(path), path)]
    if export is None:
        return verify_state(state, [*own_anchors(state), *anchors], keys, url)
    with export.open(encoding="utf-8") as lines:
        known = keys if keys is not None else all_keys(state)
        return verifier.verify(read_export(lines), known, anchors, whole=not part)


def _some(anchors: list[Anchor], path: Path) -> list[Anchor]:
    """Return `anchors`. If the list is empty, end the command with an error. `path` is the file
    from which the anchors were read.
    """
    if not anchors:  # a check against an empty file would prove nothing
        fail(f"There are no anchors in {path}.", ExitCode.USAGE)
    return anchors


def _put_verifier(state: Path, directory: Path) -> None:
    """Copy two files to a directory: the program that verifies the chain, which needs only Python,
    and the anchors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # As one file: the import of `audit_rows` is replaced by the text of that module.
    _, _, rows = getsource(audit_rows).partition("from __future__ import annotations\n")
    program = IMPORT_OF_ROWS.sub(lambda _: rows, getsource(verifier))
    (directory / "audit_verify.py").write_text(program, encoding="utf-8")
    own = state / ANCHORS_NAME
    if own.exists():
        shutil.copyfile(own, directory / ANCHORS_NAME)


def _require_readable(state: Path) -> None:
    """End the command if the state directory is missing or not readable. The message contains a
    remedy.
    """
    if not os.access(state, os.R_OK | os.X_OK):
        fail(
            f"The state directory {state} does not exist, or you may not read it. Set "
            "FUMEHOOD_HOME to the engine's state directory, or run this as the engine's user.",
            ExitCode.UNAVAILABLE,
        )


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except Unreadable as error:
        fail(f"{error}.", ExitCode.TOOL_FAILED)
    except StoreError as error:
        fail(str(error), ExitCode.UNAVAILABLE)
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", ExitCode.USAGE)
    except UnicodeDecodeError:
        fail("the export is not UTF-8 text.", ExitCode.TOOL_FAILED)
