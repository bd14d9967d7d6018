"""The programs that a shell command runs, as far as its text shows them.

Host side, used by `policy/rules`, which imports it only for rules with `runs`. The text is hostile,
and its parser is a C library whose grammar is not bash's own. Invariants: whatever the grammar or
this module does not know makes the reading doubtful; the parser gets nothing but ASCII, of a
bounded size, for a bounded time; no text makes a function here fail.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any, ClassVar

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from fumehood.core.json_types import JsonObject

MAX_CHARACTERS = 16 * 1024
"""Characters of one command. A longer one is in doubt, as with every limit below."""

MAX_OPERATORS = 600
"""Shell operators (characters of `OPERATORS`) in one text. The parser can take time quadratic in
their number."""

OPERATORS = "|&;()<>`$[{"
MAX_PARSE_S = 0.1
"""Seconds of processor time to parse a command and its nested texts."""

MAX_NODES = 10_000
"""Syntax nodes of a command and its nested texts together."""

MAX_TEXTS = 20
"""Texts parsed for one command: itself and nested ones, such as the argument of `bash -c`."""

MAX_HEREDOCS = 20
"""Here-documents (`<<EOF`) in one text."""

MAX_DEPTH = 8
"""Levels of programs that run each other, such as the three in `sudo nice rm`."""

MAX_WORDS = 50_000
"""Words of all programs of one command together."""

OTHERWISE = "bash may read it in another way"
UNREADABLE = "it cannot be read as a shell command"
TOO_LONG = "it is too long to be read"

KEPT = 64
"""Number of cached readings. Several rules read the same command, and a call is decided several
times."""

_LANGUAGE = Language(tree_sitter_bash.language())


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, as far as it is known before the shell expands it.

    If `whole` is False, `text` is only its beginning. If `several` is True, the shell may expand it
    to any number of words.
    """

    text: str
    whole: bool = True
    several: bool = False

    def may_be(self, text: str) -> bool:
        """Whether the word may be this text once expanded."""
        return self.text == text if self.whole else self.several or text.startswith(self.text)


Program = tuple[Word, ...]
"""The name of a program (always `whole`) and its arguments."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The programs that a command runs."""

    programs: tuple[Program, ...]
    doubt: str | None = None
    """The reason why the command may also run other programs, or None."""
    is_plain: bool = True
    """Whether the command only runs programs, without setting variables or writing files."""


# -- questions about a call ----------------------------------------------------------------


def runs(
    patterns: Iterable[Sequence[str]], arguments: JsonObject, *, for_every: bool
) -> bool | None:
    """Whether a call runs one of these programs; with `for_every`, whether it runs only them.

    Returns None if in doubt. A pattern is a program's name and the words after it.
    """
    reading = read_call(arguments)
    if for_every:
        if reading.doubt or not reading.is_plain or arguments.get("env") or not reading.programs:
            return None
        return all(
            any(_begins(program, pattern) for pattern in patterns) for program in reading.programs
        )
    answers = [_matches(program, one) for one in patterns for program in reading.programs]
    if True in answers:
        return True
    return None if reading.doubt or None in answers else False


def read_call(arguments: JsonObject) -> Reading:
    """Return the programs that a call's `command` or `argv` runs. With neither or both, it is in
    doubt.
    """
    given = [arguments[name] for name in ("command", "argv") if arguments.get(name)]
    if len(given) == 1:
        return _read(given[0])
    return Reading((), "there are two commands" if given else "there is no command")


def _read(value: Any) -> Reading:
    words = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(word, str) for word in words):
        return Reading((), "the command is not a text")
    if len(words) + sum(map(len, words)) > MAX_CHARACTERS + 1:
        return Reading((), TOO_LONG)
    return read_command(value) if isinstance(value, str) else read_argv(tuple(words))


def _begins(program: Program, pattern: Sequence[str]) -> bool:
    """Whether the program, called without a path, begins with exactly these words."""
    words = program[: len(pattern)]
    return all(word.whole for word in words) and [word.text for word in words] == list(pattern)


def _matches(program: Program, pattern: Sequence[str]) -> bool | None:
    """Whether it is this program with these options, and with these operands first and in order.

    Returns None if in doubt. A word after an option may be the option's value, so it is skipped if
    it is not the expected operand.
    """
    if basename(program) != pattern[0]:
        return False
    options = [_has(program[1:], word) for word in pattern[1:] if word.startswith("-")]
    operands = [word for word in pattern[1:] if not word.startswith("-")]
    answers = [*options, _has_operands(program[1:], operands)]
    return False if False in answers else None if None in answers else True


def _has(words: Program, option: str) -> bool | None:
    """Whether the words contain this option, or None if in doubt. One letter may be part of a
    cluster, such as `-r` in `-fr`.
    """
    letter = option[1:] if len(option) == 2 else ""
    is_in_doubt = False
    for word in words:
        is_cluster = bool(letter) and word.text[:1] == "-" and word.text[:2] != "--"
        if not word.whole:
            is_in_doubt |= word.may_be(option) or is_cluster
        elif word.text.partition("=")[0] == option or (is_cluster and letter in word.text):
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
    """Return a program with these arguments, and the programs that it runs."""
    reader = _Reader()
    reader.program(tuple(map(Word, argv)))
    return reader.reading()


def basename(program: Program) -> str:
    """Return the name of a program without its path."""
    return program[0].text.rpartition("/")[2]


# -- programs that run others --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """How the arguments of a wrapper (a program that runs another one, such as `nice`) are read."""

    valued: str = ""
    """Letters of the options that take a value."""
    operands: int = 0
    """Number of operands before the name of the program to run."""
    opaque: tuple[str, ...] = ()
    """Options (without dashes) with which it runs text or files that are not analysed."""


WRAPPERS = {
    "builtin": _Wrapper(),
    "busybox": _Wrapper(),
    "command": _Wrapper(),
    "doas": _Wrapper("aCu", opaque=("s",)),
    "env": _Wrapper("uCaP", opaque=("S", "split-string")),
    "exec": _Wrapper("a"),
    "ionice": _Wrapper("cnpPu"),
    "jobs": _Wrapper(),
    "nice": _Wrapper("n"),
    "nohup": _Wrapper(),
    "setsid": _Wrapper(),
    "stdbuf": _Wrapper("ioe"),
    "sudo": _Wrapper("aCcDghpRrTtuU", opaque=("i", "s", "login", "shell")),
    "taskset": _Wrapper(operands=1),
    "time": _Wrapper("fo"),
    "timeout": _Wrapper("ks", operands=1),
    "toybox": _Wrapper(),
    "xargs": _Wrapper("adEIJLnPRsS"),
}
TAKES_VARIABLES = ("env", "sudo", "time")
"""Wrappers that may have assignments (`NAME=value`) before the program to run."""

SHELLS = frozenset({"ash", "bash", "dash", "rbash", "sh"})
"""Shells whose `-c` text is analysed."""

OPAQUE = frozenset({
    ".", "alias", "bind", "chroot", "chrt", "compgen", "complete", "coproc", "csh", "enable",
    "eval", "fc", "fish", "flock", "hash", "ksh", "mapfile", "mksh", "parallel", "pwsh",
    "readarray", "runuser", "script", "source", "strace", "su", "tcsh", "trap", "watch", "zsh",
})  # fmt: skip
"""Programs that run text or files that are not analysed."""

RESERVED = frozenset({
    "!", "[[", "]]", "case", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if",
    "select", "then", "until", "while", "{", "}",
})  # fmt: skip
"""Reserved words of bash. If the grammar reads one as a program's name, it disagrees with bash."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[.*\])?\+?=", re.DOTALL)
_BASH_ONLY = re.compile(r"""\$['"[]|(?<!\$)\(\(|\[\[|&>""")
"""Bash syntax that other shells read differently."""

_UNKNOWN = Word("", whole=False)
_SEVERAL = Word("", whole=False, several=True)


class _Reader:
    """Collects the programs of one command."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._doubt: str | None = None
        self.is_plain = True
        self._texts = self._nodes = self._words = self._depth = 0
        self._parse_s = MAX_PARSE_S

    def reading(self) -> Reading:
        return Reading(tuple(self._programs), self._doubt, self.is_plain)

    def doubt(self, why: str) -> None:
        """Record a doubt. Only the first one is kept."""
        self._doubt = self._doubt or why

    def text(self, text: str) -> None:
        """Add the programs that a text runs."""
        self._texts += 1
        begun = time.thread_time()
        root = (
            _parsed(text, begun + self._parse_s)
            if self._texts <= MAX_TEXTS
            else "it has too many commands inside"
        )
        self._parse_s -= time.thread_time() - begun
        if isinstance(root, str):
            self.doubt(root)
            return
        self._nodes += root.descendant_count
        if self._nodes > MAX_NODES:
            self.doubt(TOO_LONG)
        else:
            _Text(text, self).walk(root)

    def program(self, words: Sequence[Word]) -> None:
        """Add a program and the programs that it runs."""
        if not words:
            return
        if not words[0].whole:
            self.doubt("the name of a program is not written out")
            return
        if words[0].text in RESERVED:
            self.doubt(OTHERWISE)
        self._words += len(words)
        if self._words > MAX_WORDS or self._depth == MAX_DEPTH:
            self.doubt("too many programs run each other")
            return
        program = tuple(words)
        self._programs.append(program)
        self._depth += 1
        self._run_by(basename(program), program[1:])
        self._depth -= 1

    def _run_by(self, name: str, words: Program) -> None:
        """Add the programs that this program runs."""
        if name in OPAQUE:
            self._cannot_read(name)
        elif name in SHELLS:
            self._shell(name, words)
        elif name == "find":
            self._find(words)
        elif name == "set" and any(
            not one.whole or "H" in one.text or "hist" in one.text
            for one in takewhile(lambda one: one.text != "--", words)
        ):
            self.doubt("set may make the history a part of the commands")
        elif name in WRAPPERS:
            self._wrapped(name, WRAPPERS[name], words)

    def _cannot_read(self, name: str) -> None:
        self.doubt(f"{name} runs what cannot be read")

    def _shell(self, name: str, words: Program) -> None:
        """Read the text after a shell's `-c`. Without `-c` there is a doubt: the shell runs a file
        or its input.
        """
        values, has_text = 0, False
        for word in words:
            text = word.text
            if not word.whole:
                break
            if values:
                values -= 1
            elif text.startswith("--") and text != "--":
                values += text in ("--rcfile", "--init-file")
            elif text in ("-", "--") and has_text:
                self._cannot_read(name)  # no option may follow
            elif text[:1] in ("-", "+") and text not in ("-", "--"):
                has_text |= text[0] == "-" and "c" in text
                values += text.count("o") + text.count("O")
            else:
                if has_text:
                    if name not in ("bash", "rbash") and _BASH_ONLY.search(text):
                        self.doubt(OTHERWISE)
                    self.text(text)
                    return
                break
        self._cannot_read(name)

    def _find(self, words: Program) -> None:
        """Add the programs of find's `-exec`, `-execdir`, `-ok` and `-okdir`."""
        begins: list[int] = []
        for position, word in enumerate(words):
            if word.several:
                self.doubt("an argument of find is not written out")
            elif any(word.may_be(one) for one in ("-exec", "-execdir", "-ok", "-okdir")):
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

    def _wrapped(self, name: str, wrapper: _Wrapper, words: Program) -> None:
        """Add the program that a wrapper runs. If its options can be read in several ways, add one
        for each.
        """
        waiting, seen = [(0, wrapper.operands, "")], set[tuple[int, int, str]]()
        while waiting and self._words <= MAX_WORDS:
            at, operands, holder = waiting.pop()
            while at < len(words) and (at, operands, holder) not in seen:
                seen.add((at, operands, holder))
                word, at = words[at], at + 1
                text = word.text
                is_variable = name in TAKES_VARIABLES and "=" in text
                if not word.whole and (word.several or not is_variable):
                    self.doubt(f"an argument of {name} is not written out")
                    break
                if text.startswith("-") and text not in ("-", "--"):
                    value, is_next, may_be_next = self._option(
                        name, wrapper, text, words[at : at + 1]
                    )
                    if name == "command" and set(text) & set("vV"):
                        return  # `command -v` only prints what it would run
                    if may_be_next:
                        waiting.append((at + 1, operands, holder))
                    holder = value or holder
                    at += is_next
                elif text.startswith("-"):
                    continue
                elif is_variable:
                    self.is_plain = False
                elif operands:
                    operands -= 1
                else:
                    run = [_replaced(one, holder) for one in words[at - 1 :]]
                    self.program([*run, _SEVERAL] if name == "xargs" else run)
                    break

    def _option(
        self, name: str, wrapper: _Wrapper, text: str, following: Program
    ) -> tuple[str, bool, bool]:
        """Read one option. Returns the placeholder that `xargs` replaces (or an empty text),
        whether the next word is the option's value, and whether it may be.
        """
        if text.startswith("--"):
            long, equals, value = text[2:].partition("=")
            if any(one.startswith(long) for one in wrapper.opaque if len(one) > 1):
                self._cannot_read(f"{name} --{long}")
            is_replacing = name == "xargs" and "replace".startswith(long)
            return (value or "{}") if is_replacing else "", False, not equals
        for position, letter in enumerate(text[1:], 2):
            if letter in wrapper.opaque:
                self._cannot_read(f"{name} -{letter}")
            if name == "xargs" and letter == "i":
                return text[position:] or "{}", False, False
            if letter in wrapper.valued:
                value = text[position:] or "".join(word.text for word in following)
                if not text[position:] and not all(word.whole for word in following):
                    self.doubt(f"an argument of {name} is not written out")
                is_replacing = name == "xargs" and letter == "I"
                return value if is_replacing else "", not text[position:], False
        return "", False, False


def _replaced(word: Word, holder: str) -> Word:
    """Return the word after the wrapper replaced the placeholder `holder` by an unknown text."""
    if not holder or holder not in word.text:
        return word
    return Word(word.text.partition(holder)[0], whole=False, several=word.several)


# -- the grammar ---------------------------------------------------------------------------

_KNOWN = frozenset({
    "arithmetic_expansion", "array", "binary_expression", "brace_expression",
    "c_style_for_statement", "case_item", "case_statement", "command", "command_name",
    "command_substitution", "comment", "compound_statement", "concatenation",
    "declaration_command", "do_group", "elif_clause", "else_clause", "expansion",
    "extglob_pattern", "file_descriptor", "file_redirect", "for_statement", "function_definition",
    "heredoc_body", "heredoc_content", "heredoc_end", "heredoc_redirect", "heredoc_start",
    "herestring_redirect", "if_statement", "list", "negated_command", "number",
    "parenthesized_expression", "pipeline", "postfix_expression", "process_substitution", "program",
    "redirected_statement", "regex", "simple_expansion", "special_variable_name", "string",
    "string_content", "subscript", "subshell", "ternary_expression", "test_command",
    "test_operator", "translated_string", "unary_expression", "unset_command",
    "variable_assignment", "variable_assignments", "variable_name", "while_statement", "word",
    "ansi_c_string", "raw_string",
})  # fmt: skip
"""The node types of the grammar that this module knows. Any other node is a doubt."""

_INERT = frozenset({"raw_string", "ansi_c_string", "comment", "heredoc_start", "heredoc_end"})
"""Nodes whose text bash does not expand."""

_QUOTED = ("raw_string", "ansi_c_string")
_PASSES_QUOTES = frozenset({
    "array", "binary_expression", "case_item", "command_name", "concatenation", "file_redirect",
    "herestring_redirect", "parenthesized_expression", "unary_expression",
})  # fmt: skip
_TAKES_QUOTES = frozenset({
    "case_statement", "command", "declaration_command", "for_statement", "heredoc_redirect",
    "redirected_statement", "test_command", "variable_assignment",
})  # fmt: skip

_STATEMENTS = frozenset({
    "array", "case_item", "case_statement", "compound_statement", "command_substitution",
    "do_group", "elif_clause", "else_clause", "for_statement", "function_definition",
    "if_statement", "list", "pipeline", "program", "subshell", "while_statement",
})  # fmt: skip

_SUBSTITUTIONS = frozenset({
    "arithmetic_expansion", "command_substitution", "process_substitution", "simple_expansion",
})  # fmt: skip
_WORDS = _SUBSTITUTIONS | {"ansi_c_string", "expansion", "raw_string", "string", "word"}
_OPERATORS = frozenset({"&", "&&", "|", "||", ";", "<", ">"})
_HOLDS_GAPS = frozenset({"redirected_statement", "regex"})
_QUOTES = ("'", '"', "\\")

_PLAIN = frozenset({
    "ansi_c_string", "command", "command_name", "command_substitution", "comment",
    "compound_statement", "concatenation", "do_group", "elif_clause", "else_clause",
    "file_descriptor", "heredoc_body", "heredoc_content", "heredoc_end", "heredoc_redirect",
    "heredoc_start", "herestring_redirect", "if_statement", "list", "negated_command", "number",
    "pipeline", "process_substitution", "program", "raw_string", "redirected_statement",
    "simple_expansion", "special_variable_name", "string", "string_content", "subshell",
    "translated_string", "variable_name", "while_statement", "word",
})  # fmt: skip
"""Node types that set no variable, unlike loops and arithmetic."""

_READS = re.compile(r"\d*(<(?![>&]).*|&?>>?\s*/dev/null|[<>]&[\d-]+)", re.DOTALL)
"""Redirections that write no file and set no variable."""

_EXPANDS = re.compile(r"`|\$[({]|[<>]\(")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_BLANK = re.compile(r"\s")
_ESCAPED_IN_QUOTES = re.compile(r"\\([$`\"\\])")
_JOINED_LINES = re.compile(r"\S\\\n\S")
_DELIMITER = re.compile(r"""(\w[\w.-]*)|'(\w[\w.-]*)'|"(\w[\w.-]*)"|\\(\w[\w.-]*)""", re.ASCII)
_ANSI = re.compile(r"\$'(\\.|[^'\\])*'", re.DOTALL)
_ANSI_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ANSI_LETTERS = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
"""The supported escapes in `$'…'`. Any other one is a doubt."""


class _Text:
    """Collects the programs of one text from its syntax tree."""

    def __init__(self, text: str, reader: _Reader) -> None:
        self._text = text
        self._reader = reader
        self._heredocs = 0

    def walk(self, root: Node) -> None:
        """Add the programs of every command below a node, and record doubts."""
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node.is_named:
                self._look_at(node)
            waiting += reversed(node.children)

    def _of(self, node: Node) -> str:
        return self._text[node.start_byte : node.end_byte]

    def _look_at(self, node: Node) -> None:
        kind = node.type
        if kind not in _KNOWN:
            self._reader.doubt(UNREADABLE)
        elif kind == "command":
            self._reader.program(self._words(node))
        elif kind in ("declaration_command", "unset_command"):
            self._reader.program((Word(self._of(node.children[0])), _SEVERAL))
        if not self._is_plain(node):
            self._reader.is_plain = False
        if not self._is_as_bash_reads(node):
            self._reader.doubt(OTHERWISE)

    def _is_plain(self, node: Node) -> bool:
        """Whether the node itself sets no variable and writes no file."""
        if node.type != "file_redirect":
            return node.type in _PLAIN
        return bool(_READS.fullmatch(self._of(node)))

    # -- words -----------------------------------------------------------------------------

    def _words(self, command: Node) -> list[Word]:
        return [self._word(child) for child in command.children if _is_word(child)]

    def _word(self, node: Node) -> Word:
        """Return the word, or the part of a word, that a node becomes."""
        kind, text = node.type, self._of(node)
        if kind == "command_name" and node.child_count == 1:
            return self._word(node.children[0])
        if kind == "concatenation":
            return self._joined(node)
        if kind == "raw_string":
            return Word(text[1:-1])
        if kind in ("string", "translated_string"):
            return self._quoted(node)
        if kind == "ansi_c_string":
            return _ansi(text[2:-1])
        if kind in ("word", "number") or (not node.is_named and "`" not in text):
            return _unquoted(text)
        return _UNKNOWN if kind in ("arithmetic_expansion", "process_substitution") else _SEVERAL

    def _joined(self, node: Node) -> Word:
        bare = "".join(self._of(part) for part in node.children if part.type in ("word", "number"))
        if ("{" in bare and ("," in bare or ".." in bare)) or '$"' in self._of(node):
            return _SEVERAL  # the grammar takes the `$` of `r$"m"` for a character
        text, whole, several = "", True, False
        for part in map(self._word, node.children):
            text += part.text if whole else ""
            whole &= part.whole
            several |= part.several
        return Word(text, whole, several)

    def _quoted(self, node: Node) -> Word:
        """Return a double-quoted text as a word, known up to its first expansion."""
        begin = node.start_byte + self._of(node).index('"') + 1
        end, several = node.end_byte - 1, False
        for child in node.named_children:
            if child.type != "string_content":
                end = min(end, child.start_byte)
                several |= "@" in self._of(child)
        text = _ESCAPED_IN_QUOTES.sub(r"\1", self._text[begin:end]).replace("\\\n", "")
        return Word(text, whole=end == node.end_byte - 1, several=several)

    # -- differences between the grammar and bash ------------------------------------------

    def _is_as_bash_reads(self, node: Node) -> bool:
        kind, text = node.type, self._of(node)
        if kind not in _STATEMENTS and any(child.type == "comment" for child in node.children):
            return False
        if kind.endswith("_redirect") and self._text[: node.start_byte].endswith("}"):
            return False  # the grammar reads the `{a}` of `{a}> file` as an argument
        if kind in self._checks:
            return self._checks[kind](self, node)
        if kind == "command_substitution" and text.startswith("`"):
            return "\\" not in text and text.count("`") == 2
        if kind == "word" and _BLANK.search(_ESCAPED.sub("", text)):
            return False
        if kind == "compound_statement" and text[0] == "{" and text[1:2] not in (" ", "\t", "\n"):
            return False
        if kind in ("string", "heredoc_body") or not node.named_child_count:
            return self._expands_nothing_else(node)
        if kind in _STATEMENTS:
            pairs = pairwise(node.children)
            if any(a.is_named and b.is_named and a.end_byte == b.start_byte for a, b in pairs):
                return False
        return kind in _HOLDS_GAPS or self._has_no_gaps(node, " \t\n")

    def _is_redirect(self, node: Node) -> bool:
        """Whether the redirection has at most one target, which bash expands only once.

        The grammar reads arguments after a redirection as further targets, and bash expands the
        target of `>&` twice unless it is a number.
        """
        targets = node.children_by_field_name("destination")
        is_copy = any(child.type in (">&", "<&") for child in node.children)
        is_plain = all(target.type in ("number", "word") for target in targets)
        return len(targets) <= 1 and (is_plain or not is_copy) and self._is_one_line(node)

    def _is_one_line(self, node: Node) -> bool:
        return self._has_no_gaps(node, " \t")

    def _is_expansion(self, node: Node) -> bool:
        """Whether the expansion is not a prompt (`@P`), which may run commands, and all its parts
        are known.
        """
        return "@P" not in self._of(node) and self._expands_nothing_else(node)

    def _is_ansi(self, node: Node) -> bool:
        """Whether it ends where bash ends it. The grammar reads `\\\\'` as an escaped quote."""
        return bool(_ANSI.fullmatch(self._of(node))) and self._expands_nothing_else(node)

    def _is_joined(self, node: Node) -> bool:
        pairs = pairwise(node.children)
        return all(one.end_byte == other.start_byte for one, other in pairs)

    def _is_test(self, node: Node) -> bool:
        """Whether no operator or line break ends the `[ … ]` early. Bash ends it there; the grammar
        does not.
        """
        if self._of(node).startswith("[["):
            return self._has_no_gaps(node, " \t\n")
        waiting = [node]
        while waiting:
            part = waiting.pop()
            if part.type in _OPERATORS or not self._is_one_line(part):
                return False
            if part.type not in _WORDS:
                waiting += part.children
        return True

    def _is_command(self, node: Node) -> bool:
        """Whether its words are separated, on one line, and neither regular expressions nor
        assignments.
        """
        before: Node | None = None
        has_name = False
        for child in node.children:
            if _is_word(child):
                if before is not None and before.end_byte == child.start_byte:
                    return False
                if child.type == "regex" or (not has_name and _VARIABLE.match(self._of(child))):
                    return False
                has_name = True
            before = child
        return self._is_one_line(node)

    def _is_comment(self, node: Node) -> bool:
        before = self._text[max(0, node.start_byte - 2) : node.start_byte]
        is_word = before and (before[-1] not in " \t\n;&|(" or before[0] == "\\")
        return not is_word

    def _is_heredoc(self, node: Node) -> bool:
        """Whether the here-document ends at the first line that equals its delimiter."""
        self._heredocs += 1
        start, ends, operator = None, None, node.children[0].type
        for child in node.children:
            start = child if child.type == "heredoc_start" else start
            ends = child if child.type == "heredoc_end" else ends
        found = _DELIMITER.fullmatch(self._of(start)) if start is not None else None
        if start is None or ends is None or found is None or self._heredocs > MAX_HEREDOCS:
            return False
        delimiter = "".join(group or "" for group in found.groups())
        at = begin = self._text.find("\n", start.end_byte) + 1
        rest = self._text[start.end_byte : begin]
        is_simple = rest.count("'") % 2 == rest.count('"') % 2 == 0 and not set(rest) & set("(`\\")
        bodies = [child for child in node.children if child.type == "heredoc_body"]
        while begin and is_simple and at <= len(self._text):
            end = self._text.find("\n", at)
            end = end if end >= 0 else len(self._text)
            line = self._text[at:end]
            if (line.lstrip("\t") if operator == "<<-" else line) == delimiter:
                is_raw = self._of(start)[:1] in _QUOTES
                return (
                    at <= ends.start_byte <= end
                    and all(begin <= one.start_byte and one.end_byte <= end for one in bodies)
                    and (is_raw or "\\\n" not in self._text[begin:at])
                )
            at = end + 1
        return False

    def _is_literal(self, node: Node) -> bool:
        """Whether it is the body of a here-document with a quoted delimiter, which bash does not
        expand.
        """
        owner = node.parent if node.type == "heredoc_body" else None
        starts = [c for c in owner.children if c.type == "heredoc_start"] if owner else []
        return bool(starts) and self._of(starts[0])[:1] in _QUOTES

    def _is_quoted(self, node: Node) -> bool:
        """Whether single quotes have their usual meaning here, unlike in "${…}", arithmetic and
        subscripts.
        """
        above = node.parent
        while above is not None and above.type in _PASSES_QUOTES:
            above = above.parent
        return above is not None and above.type in _TAKES_QUOTES

    def _expands_nothing_else(self, node: Node) -> bool:
        """Whether the tree has a node for everything that bash would expand in this node's text."""
        if node.type in _QUOTED and not self._is_quoted(node):
            return not _EXPANDS.search(self._of(node))
        if node.type in _INERT or node.type in _SUBSTITUTIONS or self._is_literal(node):
            return True
        parts, at = [], node.start_byte + (2 if node.type == "expansion" else 0)
        for child in node.named_children:
            if child.type not in ("string_content", "heredoc_content"):
                parts.append(self._text[at : child.start_byte])
                at = child.end_byte
        parts.append(self._text[at : node.end_byte])
        return not any(_EXPANDS.search(_ESCAPED.sub("", part)) for part in parts)

    def _has_no_gaps(self, node: Node, blanks: str) -> bool:
        """Whether the node's children cover all its text except blanks."""
        at = node.start_byte
        for child in node.children:
            if self._text[at : child.start_byte].replace("\\\n", "").strip(blanks):
                return False
            at = child.end_byte
        last = self._text[at : node.end_byte] if node.child_count else ""
        return not last.replace("\\\n", "").strip(" \t\n")

    _checks: ClassVar[Mapping[str, Callable[[_Text, Node], bool]]] = {
        "ansi_c_string": _is_ansi,
        "command": _is_command,
        "comment": _is_comment,
        "concatenation": _is_joined,
        "declaration_command": _is_one_line,
        "expansion": _is_expansion,
        "file_redirect": _is_redirect,
        "heredoc_redirect": _is_heredoc,
        "herestring_redirect": _is_one_line,
        "test_command": _is_test,
        "unset_command": _is_one_line,
    }


def _parsed(text: str, deadline: float) -> Node | str:
    """Return the syntax tree of a text, or the reason why it could not be parsed before the
    deadline.
    """
    if sum(map(text.count, OPERATORS)) > MAX_OPERATORS:
        return TOO_LONG
    if any(character < " " and character not in "\n\t" for character in text):
        return "it has control characters"
    if _JOINED_LINES.search(text):
        return "it joins two lines within a word"
    # The grammar's scanner looks up characters in an ASCII table. Replace each other character by
    # one byte, so that byte offsets equal character offsets.
    source = "".join(one if one <= "~" else "Z" for one in text).encode("ascii")

    def ends(_: int, has_error: bool) -> bool:
        return has_error or time.thread_time() > deadline

    try:
        root = Parser(_LANGUAGE).parse(lambda at, _: source[at:], progress_callback=ends).root_node
    except ValueError:  # it was ended
        return UNREADABLE
    rest = source[: root.start_byte] + source[root.end_byte :]
    if root.has_error or rest.strip(b" \t\n"):
        return UNREADABLE
    return root


def _is_word(node: Node) -> bool:
    """Whether a part of a command is its name or an argument."""
    return node.type != "variable_assignment" and not node.type.endswith("_redirect")


def _unquoted(text: str) -> Word:
    if text.startswith("~") and "/" not in text:
        return _UNKNOWN
    if "{" in text and ("," in text or ".." in text):
        return _SEVERAL
    bare = _ESCAPED.sub("..", text)  # of the same length
    glob = next((at for at, one in enumerate(bare) if one in "*?["), None)
    plain = _ESCAPED.sub(lambda found: found.group()[1:].strip("\n"), text[:glob])
    return Word(plain, whole=glob is None, several=glob is not None and not plain)


def _ansi(text: str) -> Word:
    if not set(_ANSI_ESCAPE.findall(text)) <= _ANSI_LETTERS.keys():
        return _UNKNOWN
    return Word(_ANSI_ESCAPE.sub(lambda found: _ANSI_LETTERS[found[1]], text))
