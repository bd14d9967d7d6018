"""Lint: review rules for the definitions of tools that models use.

Host side, without I/O: no file is opened, no reference is resolved, and no tool is called. A
definition may be invalid, because authors often lint it before it can be registered. The rules of
`poison` are included. There are no rules for behaviour that the engine itself ensures for every
tool, such as retries or the form of errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import re2
from jsonschema import Draft7Validator, Draft202012Validator

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import Finding, Severity
from fumehood.parts import tool_kinds
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import (
    InvalidDefinition,
    declared_in,
    parse_definition,
    remote_types,
)
from fumehood.registry.poison import MAX_FINDINGS, POISON, finding, poison, texts

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
RULES: Mapping[str, tuple[Severity, str]] = {
    "invalid-definition": (E, "Mend the fault; the engine refuses this definition."),
    "schema-draft-2020-12": (E, "Make it a valid JSON Schema of draft 2020-12."),
    "schema-draft-7": (W, "Use keywords that draft 7 has too: many clients read only that."),
    "name-verb": (W, "Begin the name with a verb: search_, get_, create_, delete_."),
    "name-vague": (W, "Name the one thing that the tool does."),
    "description-short": (W, "Write what it does, when to use it and when not."),
    "description-effect": (W, "Say whether the tool reads only or changes something."),
    "description-use": (N, 'Say when to use it: "Use it for …".'),
    "description-limits": (W, 'Say when not to use it: "Not for …".'),
    "effect-contradiction": (E, "Make the description and `read_only` say the same."),
    "parameter-description": (W, "Describe the parameter."),
    "parameter-type": (W, "Declare a type, an enum or a const."),
    "required-missing": (N, "List the mandatory parameters in `required`, or `[]` if none is."),
    "default-missing": (N, "Declare the default of an optional parameter."),
    "string-bounds": (W, "Set minLength and maxLength (or an enum or format)."),
    "number-bounds": (N, "Set minimum and maximum."),
    "array-bounds": (N, "Set maxItems."),
    "enum-in-description": (W, "List the allowed values in `enum`, not in the description."),
    "open-object": (W, "Set additionalProperties to false."),
    "nesting": (N, "Flatten the parameters: models fill deep objects badly."),
    "idempotency-key": (W, "Add a string parameter `idempotency_key` with minLength 16."),
    "environment": (W, "Add a required parameter `environment` with the enum staging, production."),
    "raw-code": (W, "Take structured arguments, or run the code in a sandbox."),
    "id-origin": (N, "Say which tool or answer the id comes from, so that no model guesses it."),
    "page-names": (W, "Name them `cursor`, `limit` and `next_cursor`, as everywhere else."),
    "list-bounds": (N, "Add a parameter `limit` with a maximum; long lists need pages."),
    "retries": (W, "Retry at most 3 times, and only what is idempotent."),
    "timeout": (N, "Set `timeout` or `timeout_seconds`."),
    "credential": (E, "Remove the credential, and replace it at its service; it is exposed."),
    "deprecation": (W, "Name a `replacement` or a `migration_guide`."),
    **POISON,
}
"""Maps the name of a rule to its severity, and to the remedy that authors of definitions get."""

_VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        add analyze append apply approve archive assign attach book browse build bulk calculate
        call cancel check classify clear clone close commit compare complete compose compress
        compute configure connect convert copy count create deactivate decode decrypt delete
        deploy describe detect diff disable disconnect discover download draft drop duplicate
        echo edit embed enable encode encrypt end enrich estimate evaluate exchange execute
        expand explain export extract fetch fill filter find format forward generate get give
        grep group identify import index insert inspect install invite invoke issue join label
        launch link list load locate lock log login look make map mark measure merge migrate
        modify monitor move navigate notify open order parse patch pause pay ping place plan
        play post predict preview print process publish pull purge push put query read rebuild
        record refresh refund register reject release reload remove rename render reopen reorder
        replace reply report request reserve reset resize resolve restart restore resume
        retrieve revert revoke rotate run save scale scan schedule score scrape search select
        send set share show sign simulate solve sort split start stop store submit subscribe
        suggest summarize sync tag take test track transcribe transfer transform translate
        trigger trim truncate undo uninstall unlock unsubscribe untag update upgrade upload
        upsert use validate verify view vote wait watch write
        """,
    )
)
_VAGUE = re.compile(
    r"(do|run|handle|process|execute|manage|perform)_?(stuff|things?|data|it|all|task|action|work)?"
    r"|(tool|function|helper|util|utils|misc|test|foo|data)\d*",
    re.IGNORECASE,
)
_READS = re2.compile(
    r"(?i)read[- ]?only|\bonly reads\b|chang(?:es|ing) nothing|\b(?:does not|never|without) "
    r"(?:chang|modif|writ|alter)|no side effects?|只读|不修改|不改变"
)
_EFFECT = re2.compile(
    r"(?i)\b(?:reads?|lists?|search(?:es)?|looks? up|finds?|gets?|shows?|calculates?|computes?"
    r"|writes?|creates?|changes?|deletes?|removes?|updates?|modif(?:y|ies)|sends?|stores?"
    r"|moves?|replaces?|uploads?|overwrites?|runs?|executes?|adds?|sets?|posts?|cancels?)\b"
    r"|写入|创建|修改|删除|更新|发送"
)
_USE = re2.compile(r"(?i)\b(?:use (?:it|this|for|when|to)|useful|for |when )|适用于|用于|用来")
_NOT_FOR = re2.compile(
    r"(?i)\b(?:not for|not to|do not use|don't use|not when|cannot|can't|never|instead|without"
    r"|only for|no )\b|不适用|不能|不要|禁止"
)
_WRITE_NAME = re.compile(
    r"(add|append|book|cancel|create|delete|insert|issue|order|pay|place|post|publish|purge|put|"
    r"refund|remove|replace|send|submit|transfer|update|upload|upsert|write|bulk)(?![a-z])"
)
_HIGH_RISK = re.compile(r"(delete|bulk)(?![a-z])")
_LISTS = re.compile(r"(list|search|query|find|browse)(?![a-z])")
_CHOICES = re2.compile(
    r"(?i)(?:one of|either|(?:allowed|possible|valid) values|values are|允许值|取值|可选值)"
    r"[^.]{0,20}[:\x{ff1a}]?\s*[\"'`]?[\w-]+[\"'`]?\s*(?:,|、|/|\||\bor\b|或)"
    r"|[\"'`][\w-]{1,30}[\"'`](?:\s*(?:,|\||/|or)\s*[\"'`][\w-]{1,30}[\"'`])+"
)
_CODE_NAME = re.compile(
    r"(sql|raw_?sql|shell|bash|cmd|command|command_line|script|code|eval|exec|expression|program)",
    re.IGNORECASE,
)
_ID_NAME = re.compile(r"(.+_id|.+Id|ids?|.+_ids)")
_ORIGIN = re2.compile(
    r"(?i)\b(?:from|returned|answer|result|given|of the form|such as|e\.g\.|found|listed)\b"
    r"|来自|返回|例如"
)
_ODD_PAGES = frozenset(
    {
        "nextpage", "pagetoken", "nextpagetoken", "paginationtoken", "continuationtoken",
        "startcursor", "aftertoken",
    }
)  # fmt: skip
"""Unusual names of a paging cursor, in lower case without underscores. `nextCursor` is not one of
them, because MCP uses it."""

_PAGE_SIZES = frozenset(
    {"limit", "num_results", "page_size", "max_results", "count", "top_k", "n", "per_page"}
)
_KEYWORDS_AFTER_DRAFT_7 = (
    "prefixItems", "dependentRequired", "dependentSchemas", "minContains", "maxContains",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$anchor",
)  # fmt: skip


def lint(document: JsonObject, others: Iterable[str] = ()) -> list[Finding]:
    """Return a finding for each rule that a tool's definition violates, the most severe first.

    `document` is the definition, in the engine's form or in the form that model providers use:
    `{"type": "function", "function": {…}}`. `others` are the names of other tools, which the tool's
    name must not imitate.
    """
    inner = document.get("function")
    if document.get("type") == "function":
        document = inner if isinstance(inner, dict) else {**document, "type": "NATIVE"}
    found = [*_registrable(document), *poison(document, others)]
    name, text = str(document.get("name", "")), str(document.get("description", ""))
    schema = document.get("parameters")
    schema = schema if isinstance(schema, dict) else {}
    found += _schemas(document)
    found += _name(name)
    found += _description(document, name, text)
    found += _parameters(schema, "parameters", 1)
    found += _write_parameters(document, name)
    found += _pages(document, name)
    found += _operation(document)
    order = list(Severity)
    return sorted(found[:MAX_FINDINGS], key=lambda finding: order.index(finding.severity))


_redactor = lru_cache(maxsize=1)(Redactor)
_finding = partial(finding, RULES)


def _registrable(document: JsonObject) -> Iterator[Finding]:
    try:
        parse_definition(document)
    except InvalidDefinition as error:
        for fault in error.faults:
            path, _, message = fault.partition(": ")
            yield _finding("invalid-definition", path, message[:300] or fault[:300])
    if _redactor().value(document)[1]:
        yield _finding("credential", "", "holds something of the form of a credential")


def _schemas(document: JsonObject) -> Iterator[Finding]:
    for where in ("parameters", "output_schema"):
        schema = document.get(where)
        if not isinstance(schema, dict):
            continue
        for rule, draft in (
            ("schema-draft-2020-12", Draft202012Validator),
            ("schema-draft-7", Draft7Validator),
        ):
            for error in draft(draft.META_SCHEMA).iter_errors(schema):
                path = ".".join([where, *map(str, error.absolute_path)])
                yield _finding(rule, path, error.message[:200])
        for path, key in texts(schema, where):
            if key in _KEYWORDS_AFTER_DRAFT_7 and path.endswith(f".{key}"):
                yield _finding("schema-draft-7", path, f"draft 7 ignores {key}")


def _name(name: str) -> Iterator[Finding]:
    own = name.rpartition("__")[2]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", own).replace("-", "_").lower().split("_")
    if _VAGUE.fullmatch(own):
        yield _finding("name-vague", "name", f"{own[:64]!a} does not say what it does")
    elif words[0] not in _VERBS:
        yield _finding("name-verb", "name", f"{own[:64]!a} does not begin with a verb")


def _description(document: JsonObject, name: str, text: str) -> Iterator[Finding]:
    if len(text) < 20:
        yield _finding("description-short", "description", f"has {len(text)} characters")
    reads = bool(_READS.search(text))
    if not reads and not _EFFECT.search(text):
        yield _finding("description-effect", "description", "neither read-only nor writing")
    if not _USE.search(text):
        yield _finding("description-use", "description", "does not say when to use the tool")
    if not _NOT_FOR.search(text):
        yield _finding("description-limits", "description", "does not say when not to use it")
    is_read_only = document.get("read_only") is True
    if is_read_only and _WRITE_NAME.match(name.rpartition("__")[2]):
        yield _finding("effect-contradiction", "read_only", "the name says that it changes things")
    if reads and document.get("read_only") is False:
        yield _finding("effect-contradiction", "read_only", "the description says read-only")


def _parameters(schema: JsonObject, path: str, depth: int) -> Iterator[Finding]:
    """Yield the findings about the parameters of an object, and of objects nested in it.

    `schema` is the object's schema, `path` is the schema's place in the tool's definition, and
    `depth` is its level of nesting.
    """
    properties, required = declared_in({"parameters": schema})
    if schema.get("additionalProperties", True) is True:
        yield _finding("open-object", path, "takes parameters that it does not declare")
    if properties and "required" not in schema:
        yield _finding("required-missing", path, "does not say which parameters are mandatory")
    if depth == 4:
        yield _finding("nesting", path, "is nested deeper than three levels")
    for name, each in properties.items():
        if isinstance(each, dict):
            yield from _parameter(name, each, f"{path}.properties.{name}", name in required, depth)


def _parameter(
    name: str, schema: JsonObject, path: str, is_required: bool, depth: int
) -> Iterator[Finding]:
    text = str(schema.get("description", ""))
    kinds = schema.get("type")
    kinds = set(kinds) if isinstance(kinds, list) else {kinds}
    is_listed = "enum" in schema or "const" in schema
    if not text.strip():
        yield _finding("parameter-description", path, "has no description")
    if kinds == {None} and not is_listed and not {"$ref", "anyOf", "oneOf", "allOf"} & set(schema):
        yield _finding("parameter-type", path, "can be anything")
    if not is_required and "default" not in schema and depth == 1 and name != "idempotency_key":
        yield _finding("default-missing", path, "is optional and has no default")
    if not is_listed:
        yield from _unlisted(kinds, schema, text, path)
        if _ID_NAME.fullmatch(name) and text and not _ORIGIN.search(text):
            yield _finding("id-origin", path, "a model could guess this id")
    if "array" in kinds:
        items = schema.get("items")
        if isinstance(items, dict) and "properties" in items:
            yield from _parameters(items, f"{path}.items", depth + 1)
    if "object" in kinds:
        yield from _parameters(schema, path, depth + 1)


def _unlisted(kinds: set[Any], schema: JsonObject, text: str, path: str) -> Iterator[Finding]:
    """Yield the findings about a parameter whose values are not enumerated. `kinds` are the
    parameter's types, `schema` is its schema, `text` its description, and `path` its place in the
    definition.
    """
    given = set(schema)
    if "string" in kinds and "format" not in given:
        missing = sorted({"maxLength", "minLength"} - given)
        if missing:
            yield _finding("string-bounds", path, f"has no {' and no '.join(missing)}")
        if "pattern" not in given and _CHOICES.search(text):
            yield _finding("enum-in-description", path, "its description lists the values")
    if kinds & {"integer", "number"}:
        least, most = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
        if not least & given or not most & given:
            yield _finding("number-bounds", path, "has no minimum or no maximum")
    if "array" in kinds and "maxItems" not in given:
        yield _finding("array-bounds", path, "has no maxItems")


def _write_parameters(document: JsonObject, name: str) -> Iterator[Finding]:
    own = name.rpartition("__")[2].lower()
    properties, _ = declared_in(document)
    if _WRITE_NAME.match(own) and document.get("read_only") is not True:
        key = properties.get("idempotency_key")
        least = key.get("minLength") if isinstance(key, dict) else None
        if not isinstance(least, int) or least < 16:
            has = "has none" if key is None else "has one without minLength 16"
            yield _finding("idempotency-key", "parameters", f"changes something and {has}")
    if _HIGH_RISK.match(own):
        place = properties.get("environment")
        values = place.get("enum") if isinstance(place, dict) else None
        if not isinstance(values, list) or set(map(str, values)) != {"staging", "production"}:
            yield _finding("environment", "parameters", "does not say where it deletes or changes")
    executor = str(document.get("executor", ""))
    kind = tool_kinds().get(executor)
    is_walled = executor.startswith(("code:", "workspace")) or (
        kind is not None and kind.arguments is not None
    )
    for each in () if is_walled else properties:
        if _CODE_NAME.fullmatch(each):
            path = f"parameters.properties.{each}"
            yield _finding("raw-code", path, "is run or interpreted as the model writes it")


def _pages(document: JsonObject, name: str) -> Iterator[Finding]:
    for where in ("parameters", "output_schema"):
        for path, key in texts(document.get(where), where):
            if path.endswith(f"properties.{key}") and key.lower().replace("_", "") in _ODD_PAGES:
                yield _finding("page-names", path, "is another name for the cursor of a page")
    properties, _ = declared_in(document)
    if _LISTS.match(name.rpartition("__")[2].lower()) and not _PAGE_SIZES & properties.keys():
        yield _finding("list-bounds", "parameters", "cannot be asked for fewer results")


def _operation(document: JsonObject) -> Iterator[Finding]:
    retries = document.get("retry_count")
    is_idempotent = document.get("idempotent", document.get("read_only", False))
    if isinstance(retries, int) and (retries > 3 or (retries and not is_idempotent)):
        yield _finding("retries", "retry_count", f"is {retries}")
    if document.get("type") in tuple(remote_types()) and not (
        document.get("timeout") or document.get("timeout_seconds")
    ):
        yield _finding("timeout", "timeout", "is absent, so the wall's default counts")
    if (document.get("deprecated") or document.get("sunset_date")) and not (
        document.get("replacement") or document.get("migration_guide")
    ):
        yield _finding("deprecation", "deprecated", "leaves its callers without a way on")
