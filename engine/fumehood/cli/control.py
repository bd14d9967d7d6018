"""What the commands that change authority share: a credential to read, a secret to show.

The credential is typed on the terminal, or comes through standard input from a password
manager; it is never read from the environment, an argument or a file (DESIGN, "Identity").
"""

from __future__ import annotations

import errno
import getpass
import sys
from typing import Annotated

import typer

from fumehood.cli.escaping import say
from fumehood.cli.exits import ExitCode, fail

CredentialStdin = Annotated[
    bool,
    typer.Option("--credential-stdin", help="Read the credential's line from standard input."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def read_credential(*, from_stdin: bool, scope: str) -> str:
    """The credential of whoever sits there; `scope` is what it has to have."""
    if from_stdin:
        credential = sys.stdin.readline().strip()
    elif sys.stdin.isatty():
        credential = getpass.getpass("Credential: ").strip()
    else:
        fail(
            f"This needs a credential with {scope}. Type it on a terminal, or pipe it in with "
            "--credential-stdin.",
            ExitCode.USAGE,
        )
    if not credential.isascii() or not credential.isprintable() or not credential:
        fail("That is no credential.", ExitCode.USAGE)
    return credential


def show_secret(secret: str, what: str) -> None:
    """Print a secret on stdout, once, with a word about it on stderr.

    Raises:
        OSError: it could not be written.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    print(f"This {what} is shown only now. Keep it where no caller can read it.", file=sys.stderr)
    say(secret)
    sys.stdout.flush()
