"""Poison: texts in a tool's definition that attack a model that reads the definition.

Host side, pure functions. When a tool is registered, its definition is searched for such texts. If
such a text is found in the definition of an MCP server's tool, the tool counts as dangerous. The
rules are not in a part, because parts do not decide which tools count as dangerous.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import re2

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import Finding, Severity

Rules = Mapping[str, tuple[Severity, str]]

POISON: Rules = {
    "hidden-characters": (
        Severity.ERROR,
        "Remove the characters; a human cannot see them, a model can.",
    ),
    "model-instructions": (Severity.ERROR, "Describe the tool. Do not give orders to the model."),
    "look-alike-name": (Severity.ERROR, "Choose a name that cannot be taken for another tool's."),
}
"""Rule → the severity of a violation, and the remedy for the definition's author."""

MAX_FINDINGS = 200
"""Maximum number of findings reported for one definition."""

MAX_PATH = 500
"""Maximum number of characters of the path of one finding. Longer paths are cut off. Otherwise, all
paths together could be far larger than the definition itself if it has long keys."""

PIECE = 256
"""Number of characters of a text that are normalized together."""

_ORDERS = re2.compile(
    r"(?i)\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:instructions?|prompts?|guidelines)\b"
    r"|(?:忽略|无视|忘记).{0,20}(?:指令|指示|提示|规则)"
    r"|</?\s*(?:important|system|instructions?|secret|hidden|admin|assistant)\b[^>]{0,40}>"
    r"|<\|[a-z_]{2,30}\|>|\[/?INST\]|\bsystem prompt\b|系统提示词"
    r"|\b(?:do not|don't|never|must not|without)\b.{0,30}\b(?:tell|telling|mention|mentioning|"
    r"inform|informing|reveal|notify|notifying|show|showing|ask|asking)\b.{0,20}\bthe user\b"
    r"|(?:不要|请勿|不得).{0,6}(?:告诉|告知|通知|透露).{0,6}用户"
    r"|\bbefore (?:using|calling|invoking|running)\b.{0,30}\b(?:tools?|functions?)\b"
    r"|\b(?:always|first|must)\b.{0,30}\b(?:call|use|invoke|run)\b.{0,20}\bthis tool\b"
    r"|\bthis tool\b.{0,20}\b(?:must|should) (?:always |first )?be (?:called|used|run)\b"
    r".{0,20}\b(?:first|before)\b"
    r"|\b(?:pass|send|include|append|attach|copy|put|add)\b.{0,40}"
    r"\b(?:conversation|chat|message)(?: history|s so far)\b"
    r"|~/\.(?:ssh|aws|config|cursor|gnupg)|\bid_rsa\b|/etc/(?:passwd|shadow)\b|\bmcp\.json\b"
)
"""Phrases that give orders to the model, or that name files with secrets. Line breaks are removed
from a text before it is searched."""

# *Source*: Unicode's Default_Ignorable_Code_Point, without single characters that emoji and some
# scripts need.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    "|[\ufe00-\ufe0f]{2,}|(?<=[\x21-\x7e])[\u200c\u200d]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_LOOKS = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s", "_": None, "-": None})


def poison(document: JsonObject, others: Iterable[str] = ()) -> list[Finding]:
    """Return findings for texts in a definition that may attack a model that reads the definition.

    `others` are the names of other tools. If the tool's own name looks like one of them, a finding
    reports this.
    """
    found: list[Finding] = []
    for path, text in texts(document, ""):
        hidden = _INVISIBLE.search(text)
        if hidden is not None:
            point = f"U+{ord(hidden[0][0]):04X}"
            found.append(finding(POISON, "hidden-characters", path, f"holds the hidden {point}"))
        # Compatibility forms and line breaks can hide such phrases from a search.
        plain = " ".join(_normalized(_INVISIBLE.sub("", text)).split())
        order = _ORDERS.search(plain)
        if order is not None:
            words = ascii(order.group()[:80])
            found.append(
                finding(POISON, "model-instructions", path, f"addresses the model: {words}")
            )
    name = str(document.get("name", ""))
    like = next((other for other in others if looks_like(name, other)), None)
    if like is not None:
        found.append(finding(POISON, "look-alike-name", "name", f"looks like the tool {like!a}"))
    return found[:MAX_FINDINGS]


def looks_like(name: str, other: str) -> bool:
    """Return whether two names differ, but people could easily confuse them."""
    return name != other and _look(name) == _look(other)


def finding(rules: Rules, rule: str, path: str, message: str) -> Finding:
    """Return a finding that reports a violation of `rule`, one of `rules`, at `path`."""
    severity, remedy = rules[rule]
    return Finding(rule=rule, severity=severity, path=path, message=message, remedy=remedy)


def _normalized(text: str) -> str:
    """Return a text in the normal form NFKC. Pieces of `PIECE` characters are normalized
    separately.
    """
    # As a whole, a text with a long row of accents would take quadratic time.
    pieces = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
    return "".join(unicodedata.normalize("NFKC", piece) for piece in pieces)


def texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in a document, including keys. Each text is paired with its dotted path,
    which begins with `path`.
    """
    level = [(value, path)]
    while level:
        value, path = level.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for key, each in value.items():
                place = f"{path}.{key}".lstrip(".")[:MAX_PATH]
                yield place, str(key)
                level.append((each, place))
        elif isinstance(value, list | tuple):
            level += [(each, f"{path}.{index}"[:MAX_PATH]) for index, each in enumerate(value)]


@lru_cache(maxsize=20_000)
def _look(name: str) -> str:
    return name.lower().replace("rn", "m").replace("vv", "w").translate(_LOOKS)
