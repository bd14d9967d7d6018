"""Finds the programs that a shell command runs, as far as the command's text shows them.

Host side, used by `condition`, which imports this module only for rules with `runs`. It uses
`syntax`, which parses a text, and the tables in `runners`. The text is hostile. Invariants:
anything unknown makes the result doubtful; each analysis is bounded in size and time; no text makes
a function of this module raise an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.shell.runners import (
    ASSIGNED,
    DIRECTORIES,
    EXPANDED,
    GNU,
    HARMLESS_LETTERS,
    HARMLESS_LONG_OPTIONS,
    HARMLESS_OPTIONS,
    HARMLESS_SHOPTS,
    NUMBERS,
    PLAIN_VALUE,
    RESERVED,
    RUNNERS,
    SHELLS,
    VARIABLES,
    Wrapper,
)
from fumehood.shell.syntax import (
    OTHERWISE,
    SEVERAL,
    TOO_LONG,
    UNKNOWN,
    Program,
    Text,
    Word,
    parsed,
)

MAX_CHARACTERS = 16 * 1024
"""Maximum number of characters of one command. If a command exceeds this limit, or one of the
following limits, the result is doubtful."""

MAX_PARSE_S = 0.1
"""Maximum seconds of processor time for parsing a command and its nested texts."""

MAX_NODES = 10_000
"""Maximum number of syntax nodes of a command and its nested texts together."""

MAX_TEXTS = 20
"""Maximum number of texts that are parsed for one command: the command itself and nested texts,
such as the argument of `bash -c`."""

MAX_DEPTH = 8
"""Maximum depth to which programs may run each other. In `sudo nice rm`, it is three."""

MAX_WORDS = 50_000
"""Maximum total number of words of the programs that one command runs."""

EVALUATED = "bash may run quoted text in it when it evaluates a variable"
KEPT = 64
"""Number of cached results. Several rules test the same command, and the policy is applied to each
call several times."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The programs that a command runs. If the command may also run other programs, `doubt` says
    why.
    """

    programs: tuple[Program, ...]
    doubt: str | None = None
    """The reason why the command may also run other programs, or None."""
    is_plain: bool = True
    """Whether the command only runs programs, without setting variables or writing files."""
    evaluates: bool = False
    """Whether the command evaluates variables. Evaluating a variable runs the commands in its
    value, for example in the value `a[$(rm x)]`."""


# -- questions about a call ----------------------------------------------------------------


def runs(
    patterns: Iterable[Sequence[str]], arguments: JsonObject, *, for_every: bool
) -> bool | None:
    """Return True if a call certainly runs a program in `patterns`, False if it certainly runs none
    of them, and None if in doubt. `arguments` are the call's arguments.

    If `for_every` is True, return True if all programs that the call runs are in `patterns`, False
    if not, and None if in doubt.

    A pattern is a program's name and the words after it.
    """
    reading = read_call(arguments)
    if for_every:
        if reading.doubt or not reading.is_plain or arguments.get("env") or not reading.programs:
            return None
        return all(
            any(_begins(program, pattern) for pattern in patterns) for program in reading.programs
        )
    answers = [_matches(program, pattern) for pattern in patterns for program in reading.programs]
    if True in answers:
        return True
    return None if reading.doubt or None in answers else False


def read_call(arguments: JsonObject) -> Reading:
    """Return the programs that a call runs with its argument `command` or `argv`. If the call has
    neither argument, or both, the result has no programs, and its `doubt` says so.
    """
    given = [arguments[name] for name in ("command", "argv") if arguments.get(name)]
    if len(given) != 1:
        return Reading((), "there are two commands" if given else "there is no command")
    reading = _read(given[0])
    why = reading.doubt or _doubt_of_variables(arguments.get("env"), reading)
    return replace(reading, doubt=why) if why else reading


def _doubt_of_variables(env: Any, reading: Reading) -> str | None:
    """Return the reason why the variables in the call's argument `env` may make the command run
    other programs, or None.
    """
    if isinstance(env, Mapping):
        env = [{"name": name, "value": value} for name, value in env.items()]
    for variable in env if isinstance(env, list | tuple) else []:
        if isinstance(variable, Mapping):
            name, value = variable.get("name"), variable.get("value")
        else:
            name, _, value = str(variable).partition("=")
        if isinstance(name, str) and isinstance(value, str):
            why = _doubt_of_variable(name, Word(value))
            if why or (reading.evaluates and _RUNS_LATER.search(value)):
                return why or EVALUATED
    return None


def _doubt_of_variable(name: str, value: Word) -> str | None:
    """Return the reason why setting the variable `name` to `value` may make bash run the value as
    commands, or turn a word of the command into an option. Return None if it can do neither.
    """
    if name in DIRECTORIES:
        is_path = value.text.startswith(("/", "~")) or value == Word("")
        return None if is_path else f"{name} may turn a word that begins with ~ into an option"
    if name not in VARIABLES and not name.startswith("BASH_FUNC_"):
        return None
    is_plain = not value.text or (name in EXPANDED and PLAIN_VALUE.fullmatch(value.text))
    return None if value.whole and is_plain else f"bash may run the value of {name}"


def _read(value: Any) -> Reading:
    words = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(word, str) for word in words):
        return Reading((), "the command is not a text")
    if len(words) + sum(map(len, words)) > MAX_CHARACTERS + 1:
        return Reading((), TOO_LONG)
    return read_command(value) if isinstance(value, str) else read_argv(tuple(words))


def _begins(program: Program, pattern: Sequence[str]) -> bool:
    """Whether a program's name and first arguments are exactly the words of `pattern`. If the name
    contains a path, the result is False.
    """
    words = program[: len(pattern)]
    return all(word.whole for word in words) and [word.text for word in words] == list(pattern)


def _matches(program: Program, pattern: Sequence[str]) -> bool | None:
    """Return True if `program` certainly is the program that `pattern` names, and certainly has the
    pattern's options and operands. Return False if it certainly does not, and None if in doubt.

    The options may be anywhere. The operands must be the first operands of the program, in the same
    order.
    """
    # A word after an option may be the option's value. So if that word is not the expected operand,
    # `_has_operands` skips it.
    if basename(program) != pattern[0]:
        return False
    options = [_has(program[1:], word) for word in pattern[1:] if word.startswith("-")]
    operands = [word for word in pattern[1:] if not word.startswith("-")]
    answers = [*options, _has_operands(program[1:], operands)]
    return False if False in answers else None if None in answers else True


def _has(words: Program, option: str) -> bool | None:
    """Whether the words contain this option, or None if in doubt. An option of a single letter may
    also be joined with others: `-fr` contains `-r`.
    """
    letter = option[1:] if len(option) == 2 else ""
    is_in_doubt = False
    for word in words:
        is_bundle = bool(letter) and word.text[:1] == "-" and word.text[:2] != "--"
        if not word.whole:
            is_in_doubt |= word.may_be(option) or is_bundle
        elif word.text.partition("=")[0] == option or (is_bundle and letter in word.text):
            return True
    return None if is_in_doubt else False


def _has_operands(words: Sequence[Word], operands: Sequence[str]) -> bool | None:
    is_value, is_in_doubt, left = False, False, list(operands)
    for word in words:
        if not left:
            break
        if not word.whole:
            is_in_doubt |= word.may_be(left[0]) or word.several
            is_value = True
        elif word.text.startswith("-") and word.text != "-":
            is_value = "=" not in word.text and word.text != "--"
        elif word.text == left[0]:
            left.pop(0)
            is_value = False
        elif is_value:
            is_value = False
        else:
            break
    return None if is_in_doubt else not left


# -- reading -------------------------------------------------------------------------------


@lru_cache(maxsize=KEPT)
def read_command(text: str) -> Reading:
    """Return the programs that bash runs for this text."""
    reader = _Reader()
    reader.text(text)
    return reader.reading()


@lru_cache(maxsize=KEPT)
def read_argv(argv: tuple[str, ...]) -> Reading:
    """Return the program that an argument list starts, and the programs that this program runs."""
    reader = _Reader()
    for word in argv:
        reader.holds(word)
    reader.program(tuple(map(Word, argv)))
    return reader.reading()


def basename(program: Program) -> str:
    """Return the name of a program without its path."""
    return program[0].text.rpartition("/")[2]


# -- programs that run others --------------------------------------------------------------

_VALUED_BY_READ = re.compile(r"-[^adinNptu]*[dinNptu]")
"""Options of `read` whose last letter takes the next word as its value."""


_RUNS_LATER = re.compile(r"`|\$(?:[({\[]|$)")
"""Matches text that bash expands if it evaluates the text. A final `$` also matches, because
another text may follow it."""

_BASH_ONLY = re.compile(r"""\$['"[]|(?<!\$)\(\(|\[\[|&>""")
"""Bash syntax that other shells read differently."""


class _Reader:
    """Collects the programs that one command runs, and the first reason for doubt."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._doubt: str | None = None
        self.is_plain = True
        self._texts = self._nodes = self._words = self._depth = 0
        self._parse_s = MAX_PARSE_S
        self.evaluates = False
        self._held: set[str] = set()
        self._read: set[str] = set()

    def reading(self) -> Reading:
        if self.evaluates and not self._held <= self._read:
            self.doubt(EVALUATED)
        return Reading(tuple(self._programs), self._doubt, self.is_plain, self.evaluates)

    def doubt(self, why: str) -> None:
        """Record that the command may run other programs, for the reason `why`. Only the first
        reason is kept.
        """
        self._doubt = self._doubt or why

    def text(self, text: str) -> None:
        """Parse `text` as bash commands, and add the programs that they run."""
        self._texts += 1
        self._read.add(text)
        begun = time.thread_time()
        root = (
            parsed(text, begun + self._parse_s)
            if self._texts <= MAX_TEXTS
            else "it has too many nested commands"
        )
        self._parse_s -= time.thread_time() - begun
        if isinstance(root, str):
            self.doubt(root)
            return
        self._nodes += root.descendant_count
        if self._nodes > MAX_NODES:
            self.doubt(TOO_LONG)
        else:
            Text(text, self).walk(root)

    def program(self, words: Sequence[Word]) -> None:
        """Add the program that the command `words` starts to the programs found so far. If it runs
        other programs, as `env` and `xargs` do, add them too.
        """
        if not words:
            return
        if not words[0].whole:
            self.doubt("the name of a program is not literal")
            return
        if basename(tuple(words)) == "[":
            words = [Word(words[0].text[:-1] + "test"), *words[1:]]
            words = words[:-1] if words[-1] == Word("]") else words
        if words[0].text in RESERVED:
            self.doubt(OTHERWISE)
        self._words += len(words)
        if self._words > MAX_WORDS or self._depth == MAX_DEPTH:
            self.doubt("it runs too many programs, or too deeply nested ones")
            return
        program = tuple(words)
        self._programs.append(program)
        self._depth += 1
        self._run_by(basename(program), program[1:])
        self._depth -= 1

    def _run_by(self, name: str, words: Program) -> None:
        """Add the programs that the program `name` runs if its arguments are `words`."""
        name = GNU.get(name, name)
        if name in SHELLS:
            self._shell(name, words)
        elif name == "find":
            self._find(words)
        elif name in ("fd", "fdfind"):
            runs_others = any(
                _has(words, option) for option in ("-x", "-X", "--exec", "--exec-batch")
            )
            if runs_others or any(word.several for word in words):
                self._cannot_read(name)
        elif name in _BUILTINS:
            _BUILTINS[name](self, name, words)
        for after, wrapper in RUNNERS.get(name, ()):
            starts = self._ends_of(name, after, words)
            if wrapper is not None:
                self._wrapped(name, wrapper, words, starts)
            elif starts:
                self._cannot_read(name)

    def _cannot_read(self, name: str) -> None:
        self.doubt(f"{name} runs text that is not analysed")

    def _shell(self, name: str, words: Program) -> None:
        """Add the programs that a shell runs. If the shell has the option `-c`, they are those in
        the text after it. Otherwise, record that the shell may run any program.
        """
        # Without `-c`, the shell runs a file or its standard input.
        valued, has_text = "", False
        for word in words:
            text = word.text
            if not word.whole:
                break
            if valued:
                self._named(text, HARMLESS_SHOPTS if valued[0] == "O" else HARMLESS_OPTIONS)
                valued = valued[1:]
            elif text[:1] in ("-", "+") and text not in ("-", "--"):
                if not _is_harmless_option(text):
                    break
                if text[:2] != "--":
                    has_text |= text[0] == "-" and "c" in text
                    valued = "".join(letter for letter in text if letter in "oO")
            elif not has_text or text in ("-", "--"):
                break  # after `-` or `--`, the text may begin with a dash
            else:
                if name not in ("bash", "rbash") and _BASH_ONLY.search(text):
                    self.doubt(OTHERWISE)
                self.text(text)
                return
        self._cannot_read(name)

    def _find(self, words: Program) -> None:
        """Add the programs of find's `-exec`, `-execdir`, `-ok` and `-okdir`."""
        begins: list[int] = []
        for position, word in enumerate(words):
            if word.several:
                self.doubt("an argument of find is not literal")
            elif any(word.may_be(option) for option in ("-exec", "-execdir", "-ok", "-okdir")):
                begins.append(position + 1)
        for begin in begins:
            run: list[Word] = []
            for before, word in pairwise(words[begin - 1 :]):
                if word.text == ";" or (word.text, before.text) == ("+", "{}"):
                    break
                run.append(_replaced(word, "{}"))
            self.program(run)
            if self._words > MAX_WORDS:
                break

    def _ends_of(self, name: str, after: Sequence[str], words: Program) -> set[int]:
        """Find the operands `after` in `words`, the arguments of the program `name`. For example,
        `after` contains a subcommand of `ip`. The operands must be the first ones in `words`, in
        this order, and may be abbreviated there.

        Return all positions in `words` at which the words after the last of these operands may
        begin. There is more than one if an operand may also be the value of an option.
        """
        ends = {0}
        for operand in after:
            waiting, seen = [(at, False) for at in ends], set[tuple[int, bool]]()
            ends = set()
            while waiting:
                at, may_be_value = waiting.pop()
                if at == len(words) or (at, may_be_value) in seen:
                    continue
                seen.add((at, may_be_value))
                word = words[at]
                if word.whole and word.text.startswith("-"):
                    waiting.append((at + 1, "=" not in word.text))
                    continue
                if may_be_value:
                    waiting.append((at + 1, False))
                if operand.startswith(word.text) and word != Word(""):
                    ends.add(at + 1)
                    if word.several:
                        self.doubt(f"an argument of {name} is not literal")
        return ends

    def _wrapped(self, name: str, wrapper: Wrapper, words: Program, starts: Iterable[int]) -> None:
        """Add the program that a wrapper runs. `words` are the wrapper's arguments, and `starts`
        the positions at which its own options may begin. If the arguments can be read in several
        ways, add a program for each way.
        """
        if wrapper.takes_variables:
            for word in words:
                if found := ASSIGNED.search(word.text):
                    self.sets(found[1], Word(found[2], word.whole))
        has_program = is_bare = False
        for at, holder in self._places(name, wrapper, words, starts):
            if at == len(words):
                is_bare = True
                continue
            has_program = True
            if wrapper.valued is None and words[at] == Word("."):
                continue  # a path after an option's value: only bash has a program `.`
            run = [_replaced(word, holder) for word in words[at:]]
            self.program([*run, SEVERAL] if name == "xargs" else run)
            if self._words > MAX_WORDS:
                break
        if wrapper.is_shell and is_bare and (wrapper.valued is not None or not has_program):
            self._cannot_read(name)

    def _places(
        self, name: str, wrapper: Wrapper, words: Program, starts: Iterable[int]
    ) -> Iterator[tuple[int, str]]:
        """Yield the positions in `words` at which the program that a wrapper runs may begin, each
        with a placeholder. The placeholder is the text that `xargs` replaces by its input, or
        empty.

        `words` are the wrapper's arguments, and `starts` the positions at which its own options may
        begin. If the wrapper may run no program, one of the positions is `len(words)`.
        """
        counts = range(wrapper.operands, wrapper.operands + wrapper.may_have + 1)
        waiting = [(start, count, "") for start in starts for count in counts]
        seen = set[tuple[int, int, str]]()
        while waiting:
            at, operands, holder = waiting.pop()
            if at >= len(words):
                yield len(words), holder
                continue
            if (at, operands, holder) in seen:
                continue
            seen.add((at, operands, holder))
            word, text = words[at], words[at].text
            is_variable = wrapper.takes_variables and "=" in text
            if not word.whole and (word.several or not is_variable):
                self.doubt(f"an argument of {name} is not literal")
                continue
            if name == "command" and text[:1] == "-" and set(text) & set("vV"):
                return  # `command -v` only prints what it would run
            at += 1
            if text.startswith("-") and text not in ("-", "--"):
                value, is_next, may_be_next = self._option(name, wrapper, text, words[at : at + 1])
                waiting += [(at + 1, operands, holder)] if may_be_next else []
                waiting.append((at + is_next, operands, value or holder))
            elif text.startswith("-"):
                waiting.append((at, operands, holder))
            elif is_variable:
                self.is_plain = False
                waiting.append((at, operands, holder))
            elif operands:
                waiting.append((at, operands - 1, holder))
            else:
                yield at - 1, holder

    def _option(
        self, name: str, wrapper: Wrapper, text: str, following: Program
    ) -> tuple[str, bool, bool]:
        """Read `text`, an option of the wrapper `name`. `following` contains the next word, if
        there is one.

        Return three values: the placeholder that `xargs` replaces, or an empty text; whether the
        next word is certainly the option's value; and whether it may be the value.
        """
        if text.startswith("--"):
            long, equals, value = text[2:].partition("=")
            if any(option.startswith(long) for option in wrapper.opaque if len(option) > 1):
                self._cannot_read(f"{name} --{long}")
            is_replacing = name == "xargs" and "replace".startswith(long)
            return (value or "{}") if is_replacing else "", False, not equals
        for position, letter in enumerate(text[1:], 2):
            if letter in wrapper.opaque:
                self._cannot_read(f"{name} -{letter}")
            if name == "xargs" and letter == "i":
                return text[position:] or "{}", False, False
            if wrapper.valued is not None and letter in wrapper.valued:
                value = text[position:] or "".join(word.text for word in following)
                if not text[position:] and not all(word.whole for word in following):
                    self.doubt(f"an argument of {name} is not literal")
                is_replacing = name == "xargs" and letter == "I"
                return value if is_replacing else "", not text[position:], False
        return "", False, wrapper.valued is None

    # -- builtins of bash ------------------------------------------------------------------

    def holds(self, text: str, *, is_sure: bool = False) -> None:
        """Remember `text`, a part of the command, as code that bash may evaluate later. If
        `is_sure` is False, remember it only if evaluating it would run commands.
        """
        if is_sure or _RUNS_LATER.search(text):
            self._held.add(text)

    def sets(self, name: str, value: Word = UNKNOWN) -> None:
        """Record that the command sets the variable `name` to `value`. `name` may also be an
        element of an array, such as `a[1]`. If setting the variable may make bash run commands,
        record that the command may run other programs.
        """
        base, subscript, _ = name.partition("[")
        self.evaluates |= bool(subscript) or base in NUMBERS
        is_used = base not in DIRECTORIES or any("~" in text for text in self._read)
        if is_used and (why := _doubt_of_variable(base, value)):
            self.doubt(why)

    def _sets_one_of(self, word: Word) -> None:
        """Record that the command sets a variable. `word` is the argument that names the variable,
        in the form `NAME` or `NAME=value`.
        """
        name, equals, value = word.text.partition("=")
        if word.whole or equals:
            self.sets(name.removesuffix("+"), Word(value, word.whole))
        else:
            self.doubt("the name of a variable is not literal")

    def declare(self, name: str, words: Program) -> None:
        for word in words:
            if word.whole and word.text[:1] in ("-", "+"):
                self.evaluates |= "i" in word.text
                if "n" in word.text and name != "export":
                    self.doubt("it sets variables through references to their names")
            else:
                self._sets_one_of(word)

    def read_line(self, name: str, words: Program) -> None:
        """Record the variables that `read` sets: its operands, and the value of its option `-a`.
        The values of its other options are skipped.
        """
        is_value = False
        for word in words:
            if is_value and not word.several:
                is_value = False
            elif word.whole and word.text.startswith("-"):
                is_value = bool(_VALUED_BY_READ.fullmatch(word.text))
                self.sets(word.text.partition("a")[2])  # `-aNAME`
            else:
                self._sets_one_of(word)

    def name_variable(self, name: str, words: Program) -> None:
        """Record the variables that `printf -v` and `wait -p` set."""
        option = {"printf": "-v", "wait": "-p"}[name]
        for word, following in pairwise([*words, Word("")]):
            if word.text[:1] == "-" and option[1] in word.text:
                attached = Word(word.text.partition(option[1])[2], word.whole)
                self._sets_one_of(following if attached == Word("") else attached)
            elif word.may_be(option):
                self.evaluates = True
                self.sets(following.text)
            if name == "printf":
                break

    def test(self, name: str, words: Program) -> None:
        """Process the arguments `words` of `test`. If one of them is or may become the option `-v`,
        record that the command evaluates variables. This option evaluates the name that follows it.
        """
        self.evaluates |= any(
            word.text == "-v" if word.whole else word.several or not following.whole
            for word, following in pairwise([*words, Word("")])
        )

    def evaluate(self, name: str, words: Program) -> None:
        is_plain = all(word.whole and "[" not in word.text for word in words)
        self.evaluates |= name == "let" or not is_plain

    def set_options(self, name: str, words: Program) -> None:
        """If an option of `set` may change how bash parses the command, record that the command may
        run other programs.
        """
        named, is_off = 0, False
        for word in words:
            if not word.whole:
                self.doubt(f"an argument of {name} is not literal")
            if word.text in ("-", "--", ""):
                return
            if word.text[0] in ("-", "+"):
                named, is_off = word.text.count("o"), word.text[0] == "+"
                if not is_off and not set(word.text[1:]) <= HARMLESS_LETTERS | {"o"}:
                    self.doubt(OTHERWISE)
            elif named:
                named -= 1
                if not is_off:
                    self._named(word.text, HARMLESS_OPTIONS)
            else:
                return

    def set_shopts(self, name: str, words: Program) -> None:
        """If an option of `shopt` may change how bash parses the command, record that the command
        may run other programs.
        """
        if not all(word.whole for word in words):
            self.doubt(f"an argument of {name} is not literal")
        options = [word.text for word in words if word.text.startswith("-")]
        if any(set(option) & set("su") for option in options):
            for word in words:
                if word.text not in options:
                    self._named(word.text, HARMLESS_SHOPTS | HARMLESS_OPTIONS)

    def _named(self, option: str, harmless: frozenset[str]) -> None:
        """Record that the command may run other programs, unless `option`, the name of a bash
        option, is in `harmless`.
        """
        if option not in harmless:
            self.doubt(OTHERWISE)


_BUILTINS: Mapping[str, Callable[[_Reader, str, Program], None]] = {
    "declare": _Reader.declare,
    "export": _Reader.declare,
    "let": _Reader.evaluate,
    "local": _Reader.declare,
    "printf": _Reader.name_variable,
    "read": _Reader.read_line,
    "readonly": _Reader.declare,
    "set": _Reader.set_options,
    "shopt": _Reader.set_shopts,
    "test": _Reader.test,
    "typeset": _Reader.declare,
    "unset": _Reader.evaluate,
    "wait": _Reader.name_variable,
}
"""Bash builtins that run no program themselves → the method that reads their arguments."""


def _is_harmless_option(text: str) -> bool:
    """Whether a shell with this option reads commands in the same way as without it."""
    if text.startswith("--"):
        return text[2:] in HARMLESS_LONG_OPTIONS
    return set(text[1:]) <= HARMLESS_LETTERS | set("cilsoO")


def _replaced(word: Word, holder: str) -> Word:
    """Return `word` as it is after `xargs` or `find` has replaced the placeholder `holder` by
    unknown text. If `word` does not contain the placeholder, it is returned unchanged.
    """
    if not holder or holder not in word.text:
        return word
    return Word(word.text.partition(holder)[0], whole=False, several=word.several)
