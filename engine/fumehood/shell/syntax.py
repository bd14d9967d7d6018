"""The syntax of a shell command: its tree, its words, and the differences between the grammar and
bash.

Host side, used by `reading`, which collects the programs that this module finds. The text is
hostile, and it is parsed by a C library whose grammar differs from bash's own. Invariants: anything
that the grammar or this module does not know makes the result doubtful; the parser gets only ASCII
text of a bounded size, and is stopped at a deadline.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

MAX_OPERATORS = 600
"""Maximum number of shell operators (characters of `OPERATORS`) in one text. The parser can take
time quadratic in their number."""

OPERATORS = "|&;()<>`$[{"
MAX_HEREDOCS = 20
"""Maximum number of here-documents (`<<EOF`) in one text."""

OTHERWISE = "bash may parse it differently"
UNREADABLE = "it cannot be parsed as a shell command"
TOO_LONG = "it is too long"

_LANGUAGE = Language(tree_sitter_bash.language())


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command, before the shell expands it.

    `text` is the word or, if `whole` is False, only its known beginning. If `several` is True, the
    shell may expand the word to any number of words.
    """

    text: str
    whole: bool = True
    several: bool = False

    def may_be(self, text: str) -> bool:
        """Whether the word may become this text when it is expanded."""
        return self.text == text if self.whole else self.several or text.startswith(self.text)


Program = tuple[Word, ...]
"""The name of a program (always `whole`) and its arguments."""

UNKNOWN = Word("", whole=False)
SEVERAL = Word("", whole=False, several=True)


class Collector(Protocol):
    """Receives the programs that are found in a text, and the reasons why the text may run other
    programs.
    """

    is_plain: bool
    evaluates: bool

    def doubt(self, why: str) -> None: ...
    def program(self, words: Sequence[Word]) -> None: ...
    def sets(self, name: str, value: Word = ...) -> None: ...
    def holds(self, text: str, *, is_sure: bool = ...) -> None: ...


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
"""The node types of the grammar that this module knows. Any other type causes a doubt."""

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
    "test_operator", "translated_string", "variable_name", "while_statement", "word",
})  # fmt: skip
"""Node types that set no variable, unlike loops and arithmetic."""

_READS = re.compile(r"[0-9]*(<(?![>&]).*|&?>>?[ \t]*/dev/null|[<>]&[0-9-]+)", re.DOTALL)
"""Redirections that write no file and set no variable."""

_TRANSFORMS = re.compile(r"@[EP]")
_EXPANDS = re.compile(r"`|\$[({]|[<>]\(")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_BLANK = re.compile(r"[ \t\n]")
_ENDS_EXPANSION = re.compile(r"[{}()<>&|;#'\"`$\\]")
"""Characters at which bash may end an expansion or a word in an expansion, although the grammar
does not."""

_TEXTS = ("ansi_c_string", "raw_string", "string", "word")
_HIDDEN = re.compile(r"\\[`$]|\$'.*\\", re.DOTALL)
"""Escapes that may hide something that bash expands if it evaluates the text."""

_EVALUATING = ("arithmetic_expansion", "c_style_for_statement", "subscript")
_BARE = frozenset({"extglob_pattern", "heredoc_body", "regex", "string_content", "word"})
"""Nodes in which the grammar may parse `$[x]` as plain text."""

_EVALUATING_TEST = re.compile(r"-(v|eq|ne|lt|le|gt|ge)(?![A-Za-z])")
"""Operators of `[[ … ]]` that evaluate variables."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[.*\])?\+?=", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r"\\([$`\"\\])")
_JOINED_LINES = re.compile(r"[^ \t\n]\\\n[^ \t\n]")
_DELIMITER = re.compile(r"""(\w[\w.-]*)|'(\w[\w.-]*)'|"(\w[\w.-]*)"|\\(\w[\w.-]*)""", re.ASCII)
_ANSI = re.compile(r"\$'(\\.|[^'\\])*'", re.DOTALL)
_ANSI_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ANSI_LETTERS = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
"""The supported escapes in `$'…'`. Any other escape causes a doubt."""


class Text:
    """Collects the programs of one text from its syntax tree."""

    def __init__(self, text: str, reader: Collector) -> None:
        self._text = text
        self._reader = reader
        self._heredocs = 0
        self._tests: set[int] = set()
        """Ids of the nodes between the brackets of a test `[ … ]`."""

    def walk(self, root: Node) -> None:
        """Pass the programs of every command below the node `root` to the collector. Also pass each
        reason why the text may run other programs.
        """
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
        elif kind in ("command", "declaration_command", "unset_command"):
            self._reader.program(self._words(node))
        elif kind == "test_command" and not self._of(node).startswith("[["):
            self._reader.program((Word("test"), *self._tested(node)))
        else:
            self._look_at_values(node)
        if self._is_unnoticed_arithmetic(node):
            self._reader.evaluates, self._reader.is_plain = True, False
        if not self._is_plain(node):
            self._reader.is_plain = False
        if not self._is_as_bash_reads(node):
            self._reader.doubt(OTHERWISE)

    def _is_unnoticed_arithmetic(self, node: Node) -> bool:
        """Whether bash may evaluate arithmetic in this node's text although the tree contains no
        node for the arithmetic.
        """
        if node.type in ("command_substitution", "subshell"):
            return self._of(node).startswith(("$((", "(("))
        return node.type in _BARE and "$[" in self._of(node) and not self._is_literal(node)

    def _is_plain(self, node: Node) -> bool:
        """Whether the node certainly sets no variable and writes no file. Nodes below it are not
        considered.
        """
        if node.type != "file_redirect":
            return node.type in _PLAIN or node.id in self._tests
        return bool(_READS.fullmatch(self._of(node)))

    # -- words -----------------------------------------------------------------------------

    def _words(self, command: Node) -> list[Word]:
        is_command = command.type == "command"
        return [
            self._word(child) if _is_word(child) else Word(self._set_by(child) + "=", whole=False)
            for child in command.children
            if _is_word(child) or (child.type == "variable_assignment" and not is_command)
        ]

    def _set_by(self, assignment: Node) -> str:
        """Return the name of the variable that an assignment sets, followed by any subscript."""
        return self._of(assignment.children[0])

    def _tested(self, test: Node) -> list[Word]:
        """Return the words of `[ … ]`, without the brackets."""
        words, waiting, before = [], [test], test.children[0]
        while waiting:
            node = waiting.pop()
            if node.children and node.type not in _WORDS and node.type != "concatenation":
                self._tests.add(node.id)
                waiting += reversed(node.children)
                continue
            if before.end_byte == node.start_byte:
                self._reader.doubt(OTHERWISE)
            words.append(self._word(node))
            before = node
        return words[1:-1]

    def _word(self, node: Node) -> Word:
        """Return the word, or the part of a word, that the text of a node means in bash."""
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
        if kind in ("word", "number", "test_operator", "variable_name") or (
            not node.is_named and "`" not in text
        ):
            return _unquoted(text)
        return UNKNOWN if kind in ("arithmetic_expansion", "process_substitution") else SEVERAL

    def _joined(self, node: Node) -> Word:
        bare = "".join(self._of(part) for part in node.children if part.type in ("word", "number"))
        if ("{" in bare and ("," in bare or ".." in bare)) or '$"' in self._of(node):
            return SEVERAL  # the grammar parses the `$` of `r$"m"` as a character
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
                # `${!x}` is `$@` if x is `@`
                several |= not set(self._of(child)).isdisjoint("@!")
        text = _ESCAPED_IN_QUOTES.sub(r"\1", self._text[begin:end]).replace("\\\n", "")
        return Word(text, whole=end == node.end_byte - 1, several=several)

    # -- values of variables ---------------------------------------------------------------

    def _look_at_values(self, node: Node) -> None:
        """Record the variables that this node sets, and whether it evaluates variables. Also record
        the texts in the node that bash may run as commands when a variable is evaluated.
        """
        kind, text, reader = node.type, self._of(node), self._reader
        if kind == "variable_assignment":
            value = node.children[-1]
            is_array = value.type == "array"
            reader.evaluates |= is_array and "[" in self._of(value)
            known = Word("") if not value.is_named else UNKNOWN if is_array else self._word(value)
            reader.sets(self._set_by(node), known)
        elif kind == "for_statement":
            reader.sets(self._of(node.children[1]))
        elif kind == "expansion":
            self._look_at_expansion(node)
        elif kind in _EVALUATING or (kind == "test_command" and _EVALUATING_TEST.search(text)):
            reader.evaluates = True
        elif kind == "compound_statement":
            reader.evaluates |= text.startswith("((")
        elif self._is_literal(node):
            reader.holds(text)
        elif kind in _TEXTS and (word := self._word(node)).whole:
            reader.holds(word.text)
        elif kind in (*_TEXTS, "heredoc_body") and _HIDDEN.search(text):
            reader.holds(text, is_sure=True)

    def _look_at_expansion(self, node: Node) -> None:
        parts = {child.type for child in node.children if not child.is_named}
        is_by_name = "!" in parts
        self._reader.evaluates |= is_by_name or ":" in parts
        if parts & {"=", ":="}:
            named = [
                child
                for child in node.named_children
                if child.type in ("variable_name", "subscript")
            ]
            if is_by_name or not named:
                self._reader.doubt("the name of a variable is not literal")
            else:
                self._reader.sets(self._of(named[0]))

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
            return self._is_in_expansion(node) and not _ENDS_EXPANSION.search(text)
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
        """Whether the grammar parses this redirection as bash does, and bash expands its target
        only once.

        A redirection is accepted if it is on one line and has at most one target. After `>&-` and
        `<&-`, no target is accepted. After `>&` and `<&`, the target must be a number or a plain
        word without a leading `-`.
        """
        # The grammar regards arguments after a redirection (also after `>&-`) as further targets,
        # and the rest of `>& -rm` as a target. Bash expands other targets of `>&` and `<&` twice.
        targets = node.children_by_field_name("destination")
        operators = {child.type for child in node.children}
        is_copy = not operators.isdisjoint((">&", "<&"))
        most = int(operators.isdisjoint((">&-", "<&-")))
        is_plain = all(
            target.type in ("number", "word")
            and not self._of(target).replace("\\\n", "").startswith("-")
            for target in targets
        )
        return len(targets) <= most and (is_plain or not is_copy) and self._is_one_line(node)

    def _is_one_line(self, node: Node) -> bool:
        return self._has_no_gaps(node, " \t")

    def _is_expansion(self, node: Node) -> bool:
        """Whether the tree has a node for everything that bash expands in this expansion.
        Expansions with `@P` or `@E` are never accepted.
        """
        # `@P` expands a prompt, which may run commands. The result of `@E` may become text that
        # bash evaluates.
        return not _TRANSFORMS.search(self._of(node)) and self._expands_nothing_else(node)

    def _is_in_expansion(self, node: Node) -> bool:
        above = node.parent
        if above is not None and above.type == "concatenation":
            above = above.parent
        return above is not None and above.type == "expansion"

    def _is_ansi(self, node: Node) -> bool:
        """Whether a string `$'…'` ends in the tree where it ends in bash. The two may differ,
        because the grammar reads `\\\\'` as an escaped quote, but bash does not.
        """
        return bool(_ANSI.fullmatch(self._of(node))) and self._expands_nothing_else(node)

    def _is_comparison(self, node: Node) -> bool:
        """Whether bash also parses this node as a comparison. For example, the grammar finds a
        comparison in `[[ a >(rm) ]]`, but bash does not.
        """
        ends = [child.end_byte for child in node.children if child.type in ("<", ">")]
        return all(self._text[end : end + 1] != "(" for end in ends) and (
            self._has_no_gaps(node, " \t\n") and self._expands_nothing_else(node)
        )

    def _is_joined(self, node: Node) -> bool:
        pairs = pairwise(node.children)
        return all(left.end_byte == other.start_byte for left, other in pairs)

    def _is_variable(self, node: Node) -> bool:
        """Whether bash also parses this node as a variable. For example, the grammar finds the
        variable `rm` in `x=$ rm`, but bash does not.
        """
        is_quoted = node.parent is not None and node.parent.type in ("heredoc_body", "string")
        return is_quoted or self._is_joined(node)

    def _is_test(self, node: Node) -> bool:
        """Whether the test `[ … ]` contains no operator and no line break. At an operator or line
        break, bash ends the test, but the grammar does not.
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
        """Whether bash certainly parses this command as the grammar does.

        The command must be on one line, and no two words may touch. No word may be a regular
        expression, and bash must not read the first word as an assignment.
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
        """Whether the here-document certainly ends in the tree where it ends in bash: at the first
        line that equals its delimiter.

        If the tree gives it arguments, or the text has too many here-documents, return False.
        """
        # Such arguments may belong to the program before the here-document.
        if node.children_by_field_name("argument"):
            return False
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
                    and all(begin <= body.start_byte and body.end_byte <= end for body in bodies)
                    and (is_raw or "\\\n" not in self._text[begin:at])
                )
            if line.lstrip("\t").startswith(delimiter) and ")" in line:
                return False  # within `$(…)` bash ends it here, and runs the rest of the line
            at = end + 1
        return False

    def _is_literal(self, node: Node) -> bool:
        """Whether the node is the body of a here-document with a quoted delimiter, which bash does
        not expand.
        """
        owner = node.parent if node.type == "heredoc_body" else None
        starts = [c for c in owner.children if c.type == "heredoc_start"] if owner else []
        return bool(starts) and self._of(starts[0])[:1] in _QUOTES

    def _is_quoted(self, node: Node) -> bool:
        """Whether single quotes have their usual meaning at this node, unlike in "${…}", arithmetic
        and subscripts.
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

    _checks: ClassVar[Mapping[str, Callable[[Text, Node], bool]]] = {
        "ansi_c_string": _is_ansi,
        "binary_expression": _is_comparison,
        "command": _is_command,
        "comment": _is_comment,
        "concatenation": _is_joined,
        "declaration_command": _is_one_line,
        "expansion": _is_expansion,
        "file_redirect": _is_redirect,
        "heredoc_redirect": _is_heredoc,
        "herestring_redirect": _is_one_line,
        "simple_expansion": _is_variable,
        "test_command": _is_test,
        "translated_string": _is_joined,
        "variable_assignment": _is_joined,
        "unset_command": _is_one_line,
    }


def parsed(text: str, deadline: float) -> Node | str:
    """Return the syntax tree of a text, or the reason why it could not be parsed before the
    deadline.
    """
    if sum(map(text.count, OPERATORS)) > MAX_OPERATORS:
        return TOO_LONG
    if any(character < " " and character not in "\n\t" for character in text.replace("\r\n", "")):
        return "it has control characters"
    if "\r" in text:
        return "its lines end in CR LF, as on Windows; send it with LF"
    if _JOINED_LINES.search(text):
        return "it joins two lines within a word"
    # The grammar's scanner looks up characters in an ASCII table. Replace each other character by
    # one byte, so that byte offsets equal character offsets.
    source = "".join(char if char <= "~" else "Z" for char in text).encode("ascii")

    def ends(_: int, has_error: bool) -> bool:
        return has_error or time.thread_time() > deadline

    try:
        root = Parser(_LANGUAGE).parse(lambda at, _: source[at:], progress_callback=ends).root_node
    except ValueError:  # the callback has ended it
        return UNREADABLE
    rest = source[: root.start_byte] + source[root.end_byte :]
    if root.has_error or rest.strip(b" \t\n"):
        return UNREADABLE
    return root


def _is_word(node: Node) -> bool:
    """Whether a child node of a command is the command's name or an argument."""
    return node.type != "variable_assignment" and not node.type.endswith("_redirect")


def _unquoted(text: str) -> Word:
    if text.startswith("~") and "/" not in text:
        return UNKNOWN
    if "{" in text and ("," in text or ".." in text):
        return SEVERAL
    bare = _ESCAPED.sub("..", text)  # of the same length
    glob = next((at for at, char in enumerate(bare) if char in "*?["), None)
    plain = _ESCAPED.sub(lambda found: found.group()[1:].strip("\n"), text[:glob])
    return Word(plain, whole=glob is None, several=glob is not None and not plain)


def _ansi(text: str) -> Word:
    if not set(_ANSI_ESCAPE.findall(text)) <= _ANSI_LETTERS.keys():
        return UNKNOWN
    return Word(_ANSI_ESCAPE.sub(lambda found: _ANSI_LETTERS[found[1]], text))
