"""Tables of programs that run other programs, and of other features with which bash runs a text.

Host side, used by `reading`. The tables are for GNU bash 5 and the programs of Linux distributions.
Invariant: if bash may run a text that `reading` does not analyse, one of these tables makes the
result doubtful; bash options that are not known to be harmless also make it doubtful.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How to read the arguments of a wrapper (a program that runs another program, such as
    `nice`).
    """

    valued: str | None = ""
    """Letters of the options that take a value. If None, any option may take a value, so `reading`
    considers both cases."""
    operands: int = 0
    """Number of operands before the name of the program to run."""
    opaque: tuple[str, ...] = ()
    """Options (without dashes) with which the wrapper runs text or files that are not analysed."""
    may_have: int = 0
    """Number of further, optional operands."""
    is_shell: bool = False
    """Whether the wrapper runs a shell if no program is given."""
    takes_variables: bool = False
    """Whether the wrapper takes assignments (`NAME=value`) for the program to run."""


_ANY = Wrapper(None)
_AFTER_ONE = Wrapper(None, operands=1)
_ARCH = Wrapper("p", is_shell=True)
_NPM = Wrapper(None, opaque=("c", "call"), is_shell=True)
_PNPM = Wrapper(None, opaque=("c", "shell-mode"))

WRAPPERS = {
    "aa-exec": _ANY,
    "aws-vault exec": Wrapper(None, operands=1, is_shell=True),
    "builtin": Wrapper(),
    "bun run": _ANY,
    "bun x": _ANY,
    "bundle exec": _ANY,
    "bunx": _ANY,
    "busybox": Wrapper(),
    "caffeinate": Wrapper("tw"),
    "catatonit": _ANY,
    "cgexec": _ANY,
    "choom": Wrapper("np"),
    "chronic": _ANY,
    "command": Wrapper(),
    "conda run": _ANY,
    "cpulimit": _ANY,
    "cross-env": Wrapper(takes_variables=True),
    "dbus-run-session": _ANY,
    "direnv exec": _AFTER_ONE,
    "doas": Wrapper("aCu", opaque=("s",)),
    "doppler run": Wrapper(None, opaque=("command",)),
    "dotenv": Wrapper(None, may_have=1),
    "dotenvx run": _ANY,
    "dumb-init": _ANY,
    "eatmydata": Wrapper(is_shell=True),
    "enosys": Wrapper("si"),
    "env": Wrapper("uCaP", opaque=("S", "split-string"), takes_variables=True),
    "envdir": _AFTER_ONE,
    "envuidgid": _AFTER_ONE,
    "exec": Wrapper("a"),
    "fakeroot": Wrapper("lfisb", is_shell=True),
    "faketime": _AFTER_ONE,
    "flatpak-spawn": _ANY,
    "fnm exec": _ANY,
    "foreman run": _ANY,
    "gosu": _AFTER_ONE,
    "i386": _ARCH,
    "i686": _ARCH,
    "ifne": Wrapper(),
    "ionice": Wrapper("cnpPu"),
    "ip netns exec": _AFTER_ONE,
    "ip vrf exec": _AFTER_ONE,
    "jobs": Wrapper(),
    "lerna exec": _ANY,
    "linux32": _ARCH,
    "linux64": _ARCH,
    "logsave": Wrapper(operands=1),
    "mamba run": _ANY,
    "micromamba run": _ANY,
    "nice": Wrapper("n"),
    "nohup": Wrapper(),
    "npm exec": _NPM,
    "npm x": _NPM,
    "npx": _NPM,
    "nsenter": Wrapper("tSGWN", is_shell=True),
    "numactl": _ANY,
    "op run": _ANY,
    "pdm run": _ANY,
    "pipenv run": _ANY,
    "pipesz": _ANY,
    "pipx run": _ANY,
    "pixi run": _ANY,
    "pkexec": Wrapper(None, is_shell=True),
    "pnpm dlx": _PNPM,
    "pnpm exec": _PNPM,
    "pnpx": _PNPM,
    "podman unshare": _ANY,
    "poetry run": _ANY,
    "prlimit": Wrapper("po"),
    "proxychains": _ANY,
    "proxychains4": _ANY,
    "runcon": Wrapper(None, may_have=1),
    "rustup run": _AFTER_ONE,
    "rye run": _ANY,
    "setarch": Wrapper("p", may_have=1, is_shell=True),
    "setlock": _AFTER_ONE,
    "setpgid": Wrapper(),
    "setpriv": Wrapper(),
    "setsid": Wrapper(),
    "setuidgid": _AFTER_ONE,
    "ssh-agent": _ANY,
    "sshpass": Wrapper("dfpP"),
    "stdbuf": Wrapper("ioe"),
    "su-exec": _AFTER_ONE,
    "sudo": Wrapper("aCcDghpRrTtuU", opaque=("i", "s", "login", "shell"), takes_variables=True),
    "systemd-cat": _ANY,
    "systemd-inhibit": _ANY,
    "systemd-run": Wrapper(None, opaque=("S", "shell"), takes_variables=True),
    "taskset": Wrapper(operands=1),
    "time": Wrapper("fo", takes_variables=True),
    "timeout": Wrapper("ks", operands=1),
    "tini": _ANY,
    "toolbox run": _ANY,
    "torify": _ANY,
    "torsocks": Wrapper(None, opaque=("shell",)),
    "tox exec": _ANY,
    "toybox": Wrapper(),
    "trickle": _ANY,
    "tsocks": _ANY,
    "uclampset": Wrapper("mMp"),
    "uname26": _ARCH,
    "unbuffer": _ANY,
    "unshare": Wrapper("RwSGl", is_shell=True),
    "uv run": _ANY,
    "uv tool run": _ANY,
    "uvx": _ANY,
    "valgrind": _ANY,
    "volta run": _ANY,
    "x86_64": _ARCH,
    "xargs": Wrapper("adEIJLnPRsS"),
    "xvfb-run": _ANY,
    "yarn dlx": _ANY,
}
"""The wrappers by program name. In names like `aws-vault exec`, the words after the first are the
operands with which the program is a wrapper."""

OPAQUE = frozenset({
    ".", "alias", "at", "batch", "bind", "bwrap", "capsh", "chpst", "chroot", "chrt", "compgen",
    "complete", "concurrently", "coproc", "coresched", "coreutils", "crontab", "cross-env-shell",
    "csh", "distrobox-enter", "enable", "entr", "eval", "expect", "fakechroot", "fc", "firejail",
    "fish", "flock", "gdb", "hash", "hyperfine", "ksh", "lckdo", "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2", "ld-linux.so.2", "ld-musl-aarch64.so.1", "ld-musl-x86_64.so.1", "ld.so",
    "ltrace", "machinectl", "mapfile", "mispipe", "mksh", "newgrp", "nix-shell", "nodemon",
    "parallel", "pee", "proot", "pwsh", "readarray", "rlwrap", "run-parts", "run0", "runuser",
    "schroot", "screen", "script", "sem", "sg", "softlimit", "source", "start-stop-daemon",
    "strace", "su", "tcsh", "tmux", "trap", "watch", "zsh", "asdf exec", "chamber exec",
    "devbox run", "guix shell", "hatch run", "infisical run", "mise exec", "mise x", "nix develop",
    "nix run", "nix shell", "nodenv exec", "perf record", "perf stat", "perf trace", "pyenv exec",
    "rbenv exec", "sops exec-env", "sops exec-file", "yarn exec",
})  # fmt: skip
"""Programs that run text, files or other programs in ways that this package does not analyse."""


GNU = {
    f"g{name}": name
    for name in ("chroot", "env", "find", "nice", "nohup", "stdbuf", "timeout", "xargs")
}
"""Names of GNU programs on macOS → their names on Linux."""


def _by_name() -> Mapping[str, Sequence[tuple[tuple[str, ...], Wrapper | None]]]:
    found = defaultdict[str, list[tuple[tuple[str, ...], Wrapper | None]]](list)
    for written, wrapper in [*WRAPPERS.items(), *((program, None) for program in OPAQUE)]:
        name, *after = written.split()
        found[name].append((tuple(after), wrapper))
    return dict(found)


RUNNERS = _by_name()
"""Name of each program that runs other programs → pairs: the operands with which the program runs
another program, and how the arguments after these operands are read (None if they are not
analysed)."""

SHELLS = frozenset({"ash", "bash", "dash", "rbash", "sh"})
"""Shells whose `-c` text is analysed."""

RESERVED = frozenset({
    "!", "[[", "]]", "case", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if",
    "select", "then", "until", "while", "{", "}",
})  # fmt: skip
"""Reserved words of bash. If the grammar takes a reserved word for a program's name, the grammar
disagrees with bash."""

# -- options of bash -----------------------------------------------------------------------
# Other options change the meaning of words: `histexpand` and `expand_aliases` replace words, and
# with `keyword`, assignments after a program's name are no longer arguments.

HARMLESS_LETTERS = frozenset("abefhmnuvxBCEPT")
"""Harmless option letters of `set` and of bash itself."""

HARMLESS_OPTIONS = frozenset({
    "allexport", "braceexpand", "errexit", "errtrace", "functrace", "hashall", "ignoreeof",
    "monitor", "noclobber", "noexec", "noglob", "nolog", "notify", "nounset", "physical",
    "pipefail", "verbose", "xtrace",
})  # fmt: skip
"""Harmless option names for `set -o`."""

HARMLESS_SHOPTS = frozenset({
    "checkwinsize", "cmdhist", "dotglob", "execfail", "extglob", "failglob", "globasciiranges",
    "globskipdots", "globstar", "histappend", "huponexit", "inherit_errexit", "lastpipe",
    "localvar_inherit", "login_shell", "nocaseglob", "nocasematch", "nullglob", "xpg_echo",
})  # fmt: skip
"""Harmless option names for `shopt`."""

HARMLESS_LONG_OPTIONS = frozenset({"login", "noediting", "noprofile", "norc"})

# -- variables of bash ---------------------------------------------------------------------

VARIABLES = (
    "BASH_ALIASES", "BASH_CMDS", "BASH_ENV", "BASHOPTS", "ENV", "PROMPT_COMMAND", "PS0", "PS1",
    "PS2", "PS4", "SHELLOPTS", "histchars",
)  # fmt: skip
"""Variables whose value bash runs, or that change which program a word refers to. The same holds
for variables that begin with `BASH_FUNC_`, because these variables define functions."""

EXPANDED = frozenset({"ENV", "PS0", "PS1", "PS2", "PS4"})
"""The variables among `VARIABLES` whose value bash only expands. If the value is plain text, bash
runs nothing."""

PLAIN_VALUE = re.compile(r"[^$`\\/]*")
"""A value of a variable in `EXPANDED` in which bash expands nothing. Slashes are excluded, because
`ENV` names a file."""

NUMBERS = frozenset({
    "BASHPID", "EPOCHREALTIME", "EPOCHSECONDS", "HISTCMD", "LINENO", "OPTIND", "RANDOM", "SECONDS",
    "SRANDOM",
})  # fmt: skip
"""Variables whose value bash evaluates as arithmetic when it is set."""

DIRECTORIES = frozenset({"HOME", "OLDPWD", "PWD"})
"""Variables whose value the shell substitutes for a `~`."""

ASSIGNED = re.compile(
    rf"(?:^|[\s=]|^-E)(BASH_FUNC_[^=]*|{'|'.join(sorted({*VARIABLES, *DIRECTORIES}))})=(.*)",
    re.ASCII | re.DOTALL,
)
"""An assignment, in an argument of `env` or a similar wrapper, to a variable in `VARIABLES` or
`DIRECTORIES`, or to a function."""
