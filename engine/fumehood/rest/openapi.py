"""Makes definitions of REST tools from an OpenAPI 3.0 or 3.1 document.

Host side, for `fumehood tools import openapi`. `definitions` checks every definition that this
module makes. The document is treated as hostile. Invariants:

* Each operation becomes a tool, or is left out with a reason.
* A tool that may change something requires approval, unless the operator exempts it.
* Definitions refer only to secrets for the document's own security schemes.
* A reference must lead to another place in the same document.
* The size of schemas without references is limited.
* Invisible characters are removed from texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import cut
from fumehood.core.names import compile_glob, did_you_mean, named_apart
from fumehood.core.tool import MAX_SCHEMA_DEPTH, SEMVER_PATTERN
from fumehood.protocol import strict_json
from fumehood.protocol.files import FileFault, read_values
from fumehood.registry.definitions import (
    MAX_DEFINITION_BYTES,
    METHODS,
    QUERY_METHODS,
    InvalidDefinition,
    header_faults,
    parse_definition,
    url_faults,
)
from fumehood.registry.json_schema import (
    MAX_SCHEMA_NODES,
    compile_pattern,
    without_wrong_defaults,
)
from fumehood.registry.secrets import Origin

MAX_DOCUMENT_BYTES = 16 << 20
"""Maximum size in bytes of an OpenAPI document."""

_COPIED = frozenset(
    {
        "type", "enum", "const", "format", "default", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "minItems",
        "maxItems", "uniqueItems", "minProperties", "maxProperties", "required", "deprecated",
    }
)  # fmt: skip
_ANNOTATIONS = frozenset({"description", "default", "deprecated"})
_IGNORED = frozenset(
    {
        "title", "example", "examples", "xml", "externalDocs", "discriminator", "readOnly",
        "writeOnly", "nullable", "$comment", "$defs", "contentEncoding", "contentMediaType",
        "contentSchema",
    }
)  # fmt: skip
"""Schema keywords that are dropped without a note, because they do not constrain arguments. For any
other unsupported keyword, a note says that it was dropped.
"""

_OF_SEVERAL = frozenset({"anyOf", "oneOf", "prefixItems", "properties"})
_STRUCTURE = _OF_SEVERAL | {"items", "additionalProperties", "contains", "not"}

MAX_TOOL_DESCRIPTION = 2000
"""Maximum length in characters of the description of a tool or a parameter. A longer description is
cut.
"""

RETRIES = 2
"""Number of retries for tools whose calls may be repeated without harm (GET, HEAD and PUT)."""

_METHODS_OF_PATHS = ("get", "head", "put", "post", "patch", "delete", "options", "trace")
_OURS = frozenset({("header", name) for name in ("accept", "content-type", "authorization")})
"""The header parameters that are ignored. *Source*: OpenAPI 3.1, "Parameter Object"."""

_WAYS = {
    "basic": ("Basic ", "USER:PASSWORD in base64"),
    "bearer": ("Bearer ", "the token"),
    "oauth2": ("Bearer ", "an access token, which is not renewed"),
    "openIdConnect": ("Bearer ", "an access token, which is not renewed"),
}
"""Kind of a security scheme → the text before the secret in the header `Authorization`, and what
the secret contains, for the operator.
"""

_STYLES = {
    "path": ("simple", ("object", "array")),
    "query": ("form", ("object",)),
    "header": ("simple", ("object", "array")),
}
"""Place of a parameter → the only style, and the types that are not supported, for parameters
there.
"""

_PLAIN = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "deprecated"}
)
"""The keywords that the schema of a body may have. The properties of such a body become arguments.
An operation whose body has other keywords is left out.
"""

_JSON_TYPE = re.compile(r"application/([a-z0-9.-]{1,60}\+)?json")
_IN_PATH = re.compile(r"\{([^{}]*)\}")


class CannotImport(Exception):
    """The document, or one of its operations, cannot be imported. The message is for the
    operator.
    """


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The operator's choices for an import.

    * `only` selects the tools to import, by the names of tools, operations or tags. A name may
      contain `*`.
    * `no_approval` selects the tools that run without approval, by the names of tools. A name may
      contain `*`.
    * `prefix` is the beginning of every tool's name.
    * `server` replaces absolute server addresses in the document. Relative ones are resolved
      against it.
    * `source` is the URL of the document. If `server` is None, relative server addresses are
      resolved against `source`.
    """

    only: tuple[str, ...] = ()
    no_approval: tuple[str, ...] = ()
    prefix: str = ""
    server: str | None = None
    source: str | None = None


@dataclass(slots=True)
class SecretNeed:
    """A secret that the operator must provide. `content` says what the secret must contain. `tools`
    are the tools that use it, and `hosts` are the hosts to which it is sent.
    """

    content: str
    tools: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Imported:
    """The result of an import.

    `left_out` contains pairs of an operation and the reason why it did not become a tool. `notes`
    contains pairs of an operation and a remark for the operator. `secrets` maps the name of each
    secret that the tools use to what the operator must know about it.
    """

    tools: list[JsonObject] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    secrets: dict[str, SecretNeed] = field(default_factory=dict)


def import_openapi(document: Any, options: ImportOptions) -> Imported:
    """Make a tool definition from each operation that `options` selects.

    Raises:
        CannotImport: the document is not OpenAPI 3.0 or 3.1, or an option is invalid or matches
            nothing.
    """
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_-]*)?", options.prefix):
        raise CannotImport("--prefix takes letters, digits, '_' or '-', a letter first")
    if options.server is not None and any(url_faults(options.server)):
        raise CannotImport("--server takes an https or http address")
    made, root = Imported(), OpenApiDocument(document)
    secrets = _secret_names(root, options.prefix)
    operations = list(_operations(root, options.prefix, made))
    names = {operation.name: operation.known_as for operation in operations}
    only = _fitting("--only", options.only, names) if options.only else names.keys()
    free = _fitting("--no-approval", options.no_approval, {name: (name,) for name in only})
    for operation in operations:
        if operation.name not in only:
            continue
        reader = _Reader(root, operation, options, secrets)
        try:
            definition = reader.definition(needs_approval=operation.name not in free)
            if len(strict_json.dumps(definition)) > MAX_DEFINITION_BYTES:
                raise CannotImport(f"it would be larger than {MAX_DEFINITION_BYTES >> 10} KB")
            parse_definition(definition)
            definition = reader.with_right_defaults(definition)
        except CannotImport as reason:
            made.left_out.append((operation.label, str(reason)))
        except InvalidDefinition as error:
            made.left_out.append((operation.label, "; ".join(error.faults[:3])))
        else:
            reader.add_to(made, definition)
    return made


# -- operations ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path in the document. `node` is the object of this operation. `item` is the
    object of the path, which all its methods share. `name` is the name of the tool.
    """

    name: str
    method: str
    path: str
    item: JsonObject
    node: JsonObject

    @property
    def label(self) -> str:
        return f"{self.method} {self.path[:200]}"

    @property
    def known_as(self) -> tuple[str, ...]:
        """All names by which `--only` can select the operation."""
        return (self.name, *texts([self.node.get("operationId")]), *texts(self.node.get("tags")))


def _operations(root: OpenApiDocument, prefix: str, made: Imported) -> Iterator[_Operation]:
    """Yield all supported operations, in the order of the document. Each has a unique tool name
    that begins with `prefix`. Operations that are not supported are added to `made.left_out`.
    """
    taken: set[str] = set()
    for path, given in root.table("paths").items():
        try:
            item = root.resolved(given, "the path")
        except CannotImport as reason:
            made.left_out.append((path[:200], str(reason)))
            continue
        for method in _METHODS_OF_PATHS:
            node = item.get(method)
            if not isinstance(node, dict):
                continue
            own = node.get("operationId")
            own = own if isinstance(own, str) and own.strip() else method + path
            name = _unique(_name(prefix, own), taken)
            taken.add(name)
            operation = _Operation(name, method.upper(), path, item, node)
            if operation.method in METHODS:
                yield operation
            else:
                made.left_out.append((operation.label, "its method is not supported"))


def _secret_names(root: OpenApiDocument, prefix: str) -> dict[str, str]:
    """Return a mapping from the name of each security scheme in the document to a name for its
    secret.
    """
    names: dict[str, str] = {}
    for scheme in root.table("components", "securitySchemes"):
        names[scheme] = _unique(_name(prefix, scheme), set(names.values()))
    return names


def _name(prefix: str, wanted: str, otherwise: str = "operation") -> str:
    name = prefix + (re.sub(r"[^a-zA-Z0-9_-]+", "_", wanted).strip("_-") or otherwise)
    name = name if re.match(r"[a-zA-Z_]", name) else f"_{name}"
    return named_apart(name[:64], wanted, 64)


def _unique(name: str, taken: set[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        end = f"_{number}"
        found = name[: 64 - len(end)] + end
    return found


def _fitting(
    option: str, patterns: Sequence[str], names: Mapping[str, Collection[str]]
) -> set[str]:
    """Return the tools that the patterns select. `names` maps each tool to all its names. `option`
    is the name of the command's option that contains the patterns. It is used in error messages.

    Raises:
        CannotImport: a pattern matches no tool.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        fits = compile_glob(pattern)
        found = {tool for tool, known in names.items() if any(map(fits, known))}
        if not found:
            near = did_you_mean(pattern, sorted({n for known in names.values() for n in known}))
            raise CannotImport(f"{option} {pattern[:80]!a} fits nothing in the document.{near}")
        chosen |= found
    return chosen


# -- one operation -------------------------------------------------------------------------


class _Reader:
    """Makes the definition of a tool from one operation."""

    def __init__(
        self,
        root: OpenApiDocument,
        operation: _Operation,
        options: ImportOptions,
        secret_names: Mapping[str, str],
    ) -> None:
        self._root = root
        self._operation = operation
        self._options = options
        self._secret_names = secret_names
        self._schemas = Schemas(root)
        self._notes: list[str] = []
        self._secrets: dict[str, str] = {}
        self._credentials: set[tuple[str, str]] = set()
        self._required: set[tuple[str, str]] = set()

    def definition(self, *, needs_approval: bool) -> JsonObject:
        """Return the definition of the tool. It is not checked yet. Raises CannotImport if the
        operation cannot become a tool.
        """
        operation, node = self._operation, self._operation.node
        is_read = operation.method in ("GET", "HEAD")
        headers: dict[str, str] = {}
        query = self._credential_query(headers)
        parameters, path, places = self._parameters(headers)
        if not path.startswith("/") or {"?", "#"} & set(path):
            raise CannotImport("its path does not begin with '/', or has a query")
        endpoint = self._base().rstrip("/") + path
        if query or places:
            endpoint += f"?{'&'.join([*query, *places])}"
        repeatable = is_read or operation.method == "PUT"
        link = node.get("externalDocs")
        url = link.get("url") if isinstance(link, dict) else None
        version = self._root.table("info").get("version")
        fields: JsonObject = {
            "name": operation.name,
            "version": version if re.fullmatch(SEMVER_PATTERN, str(version)) else None,
            "type": "REST",
            "description": self._description(),
            "tags": [clean(tag, 64) for tag in texts(node.get("tags"))[:16]] or None,
            "documentation_url": url if isinstance(url, str) and not any(url_faults(url)) else None,
            "deprecated": node.get("deprecated") is True or None,
            "method": operation.method,
            "endpoint": endpoint,
            "headers": headers or None,
            "read_only": is_read,
            "idempotent": repeatable,
            "dangerous": not is_read and needs_approval,
            "retry_count": RETRIES if repeatable else None,
            "parameters": parameters,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def with_right_defaults(self, definition: JsonObject) -> JsonObject:
        """Return the definition without wrong defaults of parameters, and note each parameter that
        this changes. A default is wrong if it violates the schema of its parameter.

        The caller must have checked that the definition has no faults.
        """
        given = definition["parameters"]
        parameters = without_wrong_defaults(given)
        for name, said in parameters["properties"].items():
            if said is not given["properties"][name]:
                self._notes.append(f"without the default of {name[:60]!a}: it does not fit")
        return {**definition, "parameters": parameters}

    def add_to(self, made: Imported, definition: JsonObject) -> None:
        """Add a checked definition to `made`, with its notes and the secrets that it needs."""
        made.tools.append(definition)
        notes = dict.fromkeys([*self._notes, *self._schemas.notes])
        made.notes += [(self._operation.label, note) for note in notes]
        host = shown_host(definition["endpoint"])
        for name, content in self._secrets.items():
            need = made.secrets.setdefault(name, SecretNeed(content))
            need.tools.append(definition["name"])
            if host not in need.hosts:
                need.hosts.append(host)

    def _description(self) -> str:
        node = self._operation.node
        summary = clean(node.get("summary"), MAX_TOOL_DESCRIPTION)
        text = clean(node.get("description"), MAX_TOOL_DESCRIPTION)
        parts = [summary, text] if not text.startswith(summary) else [text]
        return cut("\n\n".join(filter(None, parts)), MAX_TOOL_DESCRIPTION) or self._operation.label

    # -- address and credentials

    def _base(self) -> str:
        """Return the base URL, to which the path of the operation is appended.

        The base URL is the first server that the operation lists. If the operation lists none, it
        is the first server of the path. If the path lists none either, it is the first server of
        the document.
        """
        given = [x.get("servers") for x in (self._operation.node, self._operation.item)]
        lists = [x for x in (*given, self._root.document.get("servers")) if isinstance(x, list)]
        server: Any = next((x[0] for x in lists if x), None)
        text = server.get("url") if isinstance(server, dict) else None
        text = _filled(text, server.get("variables")) if text and isinstance(text, str) else "/"
        own = self._options.server
        try:
            parts = urlsplit(text)
            if own is not None and (parts.scheme or parts.netloc or not text.strip("/")):
                base = own
            else:
                base = urljoin(own or self._options.source or "", text)
        except ValueError:
            base = ""
        if not urlsplit(base).netloc:
            raise CannotImport(
                "the document does not say where its service is; name it with --server"
            )
        if {"?", "#"} & set(base):
            raise CannotImport("the address of its server has a query or a fragment")
        return base

    def _credential_query(self, headers: dict[str, str]) -> list[str]:
        """Choose the operation's credentials: the first supported one of its alternative security
        requirements. Add the headers that this requirement needs to `headers`, and return the query
        parameters that it needs. If the operation requires no credentials, return an empty list.

        Raises CannotImport if the operation requires credentials and no requirement is supported.
        """
        node = self._operation.node
        wanted = node.get("security", self._root.document.get("security"))
        if not isinstance(wanted, list) or not wanted:
            return []
        reasons: list[str] = []
        for requirement in wanted:
            try:
                if not isinstance(requirement, dict):
                    raise CannotImport("its security requirement is not an object")
                rows = [self._credential(name) for name in requirement]
                return self._use(rows, headers)
            except CannotImport as reason:
                reasons.append(str(reason))
        raise CannotImport("; ".join(dict.fromkeys(reasons[:3])))

    def _use(self, rows: list[_Credential], headers: dict[str, str]) -> list[str]:
        self._credentials = {(row.place, row.key.lower()) for row in rows}
        self._secrets = {row.secret: row.content for row in rows}
        headers |= {row.key: row.value for row in rows if row.place == "header"}
        return [f"{quote(row.key, safe='')}={row.value}" for row in rows if row.place == "query"]

    def _credential(self, name: str) -> _Credential:
        schemes = self._root.table("components", "securitySchemes")
        if name not in schemes:
            raise CannotImport(f"its security scheme {name[:80]!a} is not defined")
        scheme = self._root.resolved(schemes[name], f"the security scheme {name[:80]!a}")
        secret = self._secret_names[name]
        reference = f"${{secret:{secret}}}"
        kind, place, key = scheme.get("type"), scheme.get("in"), scheme.get("name")
        if kind == "apiKey" and place in ("header", "query") and isinstance(key, str):
            return _Credential(str(place), key, reference, secret, "the key")
        way = str(scheme.get("scheme")).lower() if kind == "http" else str(kind)
        if way in _WAYS:
            prefix, content = _WAYS[way]
            return _Credential("header", "authorization", prefix + reference, secret, content)
        raise CannotImport(f"its security scheme {name[:80]!a} is of a kind that is not supported")

    # -- arguments

    def _parameters(self, headers: dict[str, str]) -> tuple[JsonObject, str, list[str]]:
        """Collect the parameters of the operation. Add the headers that contain arguments to
        `headers`. Return three values:

        * a schema for all arguments of the tool,
        * the path, with placeholders for arguments,
        * a list of query parameters, with placeholders for arguments.

        Arguments without a placeholder become the body, or the rest of the query. If arguments with
        and without a placeholder have the same name, the one with the placeholder is renamed.

        Raises CannotImport if the parameters or the body cannot be converted.
        """
        placed, sent = self._declared()
        sent = self._body(headers) or sent
        own: dict[tuple[str, str], str] = {}
        taken = set(sent["properties"])
        for place, name in placed:
            wanted = _name("", name, "parameter")
            own[place, name] = _unique(
                _name(f"{place}_", name) if wanted in taken else wanted, taken
            )
            taken.add(own[place, name])
        if not all(name and name.isprintable() for name in taken):
            raise CannotImport("a parameter's name is empty, or cannot be printed")
        needed = [own[key] for key in placed if key in self._required]
        schema = {
            **sent,
            "properties": {own[key]: placed[key] for key in placed} | sent["properties"],
            "required": [*needed, *sent["required"]],
        }
        query = [f"{quote(n, safe='')}={{{own[p, n]}}}" for p, n in placed if p == "query"]
        headers |= {name: f"{{{own[place, name]}}}" for place, name in placed if place == "header"}
        path = _IN_PATH.sub(lambda found: f"{{{own['path', found[1]]}}}", self._operation.path)
        return schema, path, query

    def _declared(self) -> tuple[dict[tuple[str, str], JsonObject], JsonObject]:
        """Read the parameters that the operation declares, and return a pair:

        * the place and the name of each parameter that needs a placeholder → its schema,
        * one schema for all other parameters, which become the query.

        Raises CannotImport if a parameter in the path is not declared, if a declaration is invalid,
        or if a required parameter cannot be converted.
        """
        placed: dict[tuple[str, str], JsonObject] = {}
        query: JsonObject = {}
        given = self._given_parameters()
        for name in dict.fromkeys(_IN_PATH.findall(self._operation.path)):
            if ("path", name) not in given:
                raise CannotImport(f"its path has {{{name[:60]}}}, which no parameter declares")
            placed["path", name] = {}  # these come first, in the order of the path
        for (place, name), parameter in given.items():
            if (place, name.lower()) in self._credentials or (place, name.lower()) in _OURS:
                continue
            try:
                schema = self._schema_of(place, name, parameter)
            except CannotImport as reason:
                if (place, name) in self._required:
                    raise CannotImport(f"its parameter {name[:60]!a}: {reason}") from None
                self._notes.append(f"without the parameter {name[:60]!a}: {reason}")
                continue
            if place == "query" and self._operation.method in QUERY_METHODS:
                query[name] = schema
            elif place != "path" or (place, name) in placed:
                placed[place, name] = schema
        required = [name for name in query if ("query", name) in self._required]
        return placed, _object(query, required, is_open=False)

    def _given_parameters(self) -> dict[tuple[str, str], JsonObject]:
        """Return all parameters of the operation, as a mapping from place and name to the
        declaration. A declaration in the operation takes precedence over a declaration in its path.
        """
        found: dict[tuple[str, str], JsonObject] = {}
        for owner in (self._operation.item, self._operation.node):
            listed = owner.get("parameters")
            for node in listed if isinstance(listed, list) else ():
                given = self._root.resolved(node, "a parameter")
                name, place = given.get("name"), given.get("in")
                if not isinstance(name, str) or not isinstance(place, str):
                    raise CannotImport("a parameter has no name or no place")
                found[place, name] = given
        self._required = {
            k for k, v in found.items() if v.get("required") is True or k[0] == "path"
        }
        return found

    def _schema_of(self, place: str, name: str, given: JsonObject) -> JsonObject:
        """Return the schema of the parameter `name`. `place` is the part of a request that contains
        the parameter, such as `query`, and `given` is the parameter's declaration. Raises
        CannotImport if the engine cannot send such a parameter.
        """
        if place not in _STYLES:
            raise CannotImport(f"arguments are not sent in a {place[:20]}")
        style, refused = _STYLES[place]
        if given.get("style", style) != style or "content" in given:
            raise CannotImport(f"its form in the {place} is not supported")
        if place == "header" and (faults := list(header_faults(name, "{x}"))):
            raise CannotImport(faults[0])
        schema = self._schemas.converted(given.get("schema", {}))
        if wrong := [kind for kind in refused if kind in _kinds(schema)]:
            raise CannotImport(f"an {wrong[0]} cannot stand in a {place}")
        is_exploded = place != "query" or given.get("explode", True) is True
        if not is_exploded and not _is_scalar(schema):  # its items would be in one value
            raise CannotImport(f"its form in the {place} is not supported")
        if place == "path":
            kinds = [kind for kind in _kinds(schema) if kind != "null"] or ["string"]
            if {"anyOf", "oneOf", "allOf"} & schema.keys():
                raise CannotImport("it is not one text or number")
            schema = {**schema, "type": kinds[0]}
        if words := clean(given.get("description"), MAX_TOOL_DESCRIPTION):
            schema = {**schema, "description": words}
        return {**schema, "deprecated": True} if given.get("deprecated") is True else schema

    def _body(self, headers: dict[str, str]) -> JsonObject | None:
        """Return the schema of the JSON body, or None if the operation has no body. If the body
        needs a header, add it to `headers`.
        """
        if "requestBody" not in self._operation.node:
            return None
        body = self._root.resolved(self._operation.node["requestBody"], "the body")
        if self._operation.method in QUERY_METHODS:
            if body.get("required") is True:
                raise CannotImport(f"a {self._operation.method} with a body is not supported")
            self._notes.append("without its optional body")
            return None
        content = body.get("content")
        kinds = list(content) if isinstance(content, dict) else []
        json_kinds = [kind for kind in kinds if _JSON_TYPE.fullmatch(_plain(kind))]
        kind = min(json_kinds, key=lambda kind: "+" in kind, default=None)
        if kind is None or not isinstance(content, dict):
            said = ", ".join(kinds)[:100] or "of no type"
            raise CannotImport(f"its body is {said!a}; only JSON is supported")
        if _plain(kind) != "application/json":
            headers["content-type"] = _plain(kind)
        media = self._root.resolved(content[kind], "the body")
        schema = self._schemas.converted(media.get("schema", {}))
        if "object" not in (_kinds(schema) or ["object"]) or schema.keys() - _PLAIN:
            raise CannotImport("its body is not a plain JSON object")
        properties = schema.get("properties", {})
        is_open = schema.get("additionalProperties", not properties)
        return _object(properties, schema.get("required", []), is_open=is_open)


@dataclass(frozen=True, slots=True)
class _Credential:
    """A secret, and where a request contains it.

    * `place` is `header` or `query`, and `key` is the name of the header or query parameter.
    * `value` is the text that is sent there. It contains a reference to the secret.
    * `secret` is the name of the secret.
    * `content` describes for the operator what the secret must contain.
    """

    place: str
    key: str
    value: str
    secret: str
    content: str


def _object(properties: JsonObject, required: list[str], *, is_open: Any) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": is_open,
    }


def _kinds(schema: JsonObject) -> list[Any]:
    """Return the types that the keyword `type` of a schema allows, or an empty list without this
    keyword.
    """
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _is_scalar(schema: JsonObject) -> bool:
    """Whether a converted schema allows only texts, numbers, booleans and null."""
    if kinds := _kinds(schema):
        return {"array", "object"}.isdisjoint(kinds)
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return all(_is_scalar(branch) for branch in branches)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return bool(values) and not any(isinstance(value, dict | list) for value in values)


def shown_host(endpoint: str) -> str:
    """Return the host of an endpoint in the form that the configuration uses: with the port, unless
    it is the default.
    """
    return Origin.of(endpoint.partition("?")[0]).shown


def _filled(url: str, variables: Any) -> str:
    """Return the address of a server with its variables replaced by their defaults. Raises
    CannotImport if a variable has no default.
    """

    def default(found: re.Match[str]) -> str:
        row = variables.get(found[1]) if isinstance(variables, dict) else None
        value = row.get("default") if isinstance(row, dict) else None
        if not isinstance(value, str | int):
            raise CannotImport(f"its server's variable {found[1][:60]!a} has no default")
        return str(value)

    return _IN_PATH.sub(default, url)


def _plain(kind: str) -> str:
    return kind.partition(";")[0].strip().lower()


# -- the document --------------------------------------------------------------------------


def read_document(name: str, data: bytes) -> Any:
    """Parse a document as JSON or YAML. The suffix of `name` decides between them. If it is neither
    a suffix of JSON nor of YAML, the first character of `data` decides.

    Raises:
        CannotImport: the data is too large, or cannot be parsed.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CannotImport(f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MB")
    data = strict_json.unmarked(data)
    is_yaml = name.endswith((".yaml", ".yml"))
    is_yaml |= not name.endswith(".json") and not data.lstrip().startswith(b"{")
    try:
        if is_yaml:
            return read_values("openapi.yaml", data, number_keys=True)
        return strict_json.loads(data)
    except (FileFault, strict_json.StrictJsonError) as error:
        raise CannotImport(str(error)) from None


class OpenApiDocument:
    """An OpenAPI document of version 3.0 or 3.1, in which references can be followed.

    Raises:
        CannotImport: the document is not OpenAPI 3.0 or 3.1. The methods also raise this if the
            target of a reference does not exist.
    """

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict):
            raise CannotImport("it is not an OpenAPI document: not an object")
        if "swagger" in document:
            raise CannotImport(
                "it is Swagger 2.0, which is not supported; convert it to OpenAPI 3 first"
            )
        version = str(document.get("openapi"))
        if not re.fullmatch(r"3\.[01](\.[0-9]{1,3})?", version):
            raise CannotImport("it is not a document of OpenAPI 3.0 or 3.1")
        self.document: JsonObject = document
        self.is_3_0 = version.startswith("3.0")

    def target(self, reference: str) -> Any:
        """Return the object or value to which `reference` leads. Raises CannotImport if `reference`
        leads to another document or to nothing.
        """
        if not reference.startswith("#/"):
            raise CannotImport(f"{reference[:80]!a} refers to another document, which is not read")
        found: Any = self.document
        for step in reference[2:].split("/"):
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and len(key) < 6:
                found = dict(enumerate(found)).get(int(key))
            else:
                found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            raise CannotImport(f"{reference[:80]!a} refers to nothing")
        return found

    def resolved(self, node: Any, kind: str) -> JsonObject:
        """Return `node` or, if it is a reference, the object to which it refers. `kind` describes
        the object in error messages.

        Raises CannotImport if there is no such object, or if references form a circle.
        """
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(node, dict):
                raise CannotImport(f"{kind} is not an object")
            if not isinstance(node.get("$ref"), str):
                return node
            node = self.target(node["$ref"])
        raise CannotImport(f"{kind} refers in a circle")

    def table(self, *keys: str) -> JsonObject:
        """Return the object to which these keys lead, one after the other. Return an empty object
        if there is none.
        """
        found: Any = self.document
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


class Schemas:
    """Converts the schemas in one operation's request to JSON Schema without references.

    Properties with `readOnly` are left out, because the service sets their values. If a part of a
    schema cannot be converted, `notes` gets a remark. If all parts can be converted, the new schema
    has a property for each name that it requires.
    """

    def __init__(self, root: OpenApiDocument) -> None:
        self._root = root
        self._left = MAX_SCHEMA_NODES
        self._looks_left = 20 * MAX_SCHEMA_NODES
        self._losses = 0
        """Number of times that something was lost: the converted schema accepts more than the
        original.
        """
        self.notes: list[str] = []

    def converted(self, node: Any, trail: tuple[str, ...] = ()) -> JsonObject:
        """Return the schema `node`, converted to JSON Schema.

        `trail` has one element for each level above `node`: the reference that led to this level,
        or "" if none did. It serves to detect circular references, and schemas with too many
        levels. Raises CannotImport if the schema cannot be converted.
        """
        return self._agreed(self._level(node, trail, self._read_only(node)))

    def _level(self, node: Any, trail: tuple[str, ...], unsent: frozenset[str]) -> JsonObject:
        """Convert one schema to JSON Schema. The schema may be only a part of the schema for a
        value, for example a member of `allOf`.

        `trail` is the same as in `converted`. `unsent` contains the names of the read-only
        properties of the value, which no request may contain.
        """
        self._left -= 1 + (len(node) if isinstance(node, dict) else 0)
        if self._left < 0:
            raise CannotImport(f"its schemas have more than {MAX_SCHEMA_NODES} parts")
        if len(trail) > MAX_SCHEMA_DEPTH:
            raise CannotImport(f"its schemas are nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(node, bool):
            return {} if node else {"not": {}}
        if not isinstance(node, dict):
            raise CannotImport("a schema is not an object")
        reference = node.get("$ref")
        if isinstance(reference, str):
            if self._root.is_3_0 or len(node) == 1:  # 3.0 ignores keywords next to a reference
                return self._referred(reference, trail, unsent)
            node = _as_parts(node)
        schema = self._keywords(node, trail, unsent)
        return self._nullable(self._merged(schema, node, trail, unsent), node)

    def _referred(
        self, reference: str, trail: tuple[str, ...], unsent: frozenset[str]
    ) -> JsonObject:
        target = self._root.target(reference)
        if reference in trail:
            self._lose(f"the schema {reference[:80]!a} contains itself; it is cut there")
            kind = target.get("type") if isinstance(target, dict) else None
            return {"type": kind} if isinstance(kind, str) else {}
        return self._level(target, (*trail, reference), unsent)

    def _lose(self, note: str) -> None:
        self._losses += 1
        self.notes.append(note)

    def _read_only(self, node: Any) -> frozenset[str]:
        """Return the names of all properties that are `readOnly`. A property can be `readOnly` in
        this schema, or in a schema that this schema includes (see `_parts`).
        """
        found: set[str] = set()
        for part in self._parts(node):
            properties = part.get("properties")
            found |= {
                name
                for name, said in (properties.items() if isinstance(properties, dict) else ())
                if any(each.get("readOnly") is True for each in self._parts(said))
            }
        return frozenset(found)

    def _parts(self, node: Any) -> list[JsonObject]:
        """Return this schema, and all schemas to which it refers or which it combines by
        `allOf`.
        """
        found: list[JsonObject] = []
        waiting, seen = [node], set[int]()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            self._looks_left -= 1
            if self._looks_left < 0:
                raise CannotImport(f"its schemas have more than {MAX_SCHEMA_NODES} parts")
            seen.add(id(part))
            found.append(part)
            if isinstance(part.get("$ref"), str) and part.get("readOnly") is not True:
                waiting.append(self._root.target(part["$ref"]))
            waiting += part["allOf"] if isinstance(part.get("allOf"), list) else ()
        return found

    def _keywords(
        self, node: JsonObject, trail: tuple[str, ...], unsent: frozenset[str]
    ) -> JsonObject:
        schema: JsonObject = {}
        for key, value in node.items():
            if key in _COPIED:
                schema[key] = value
            elif key == "description":
                schema[key] = clean(value, MAX_TOOL_DESCRIPTION)
            elif key in ("anyOf", "oneOf") and isinstance(value, list):
                self._add_union(schema, node, key, (*trail, ""), unsent)
            elif key in _STRUCTURE:
                self._add_schemas(schema, key, value, (*trail, ""), unsent)
            elif key != "allOf" and key not in _IGNORED and not key.startswith("x-"):
                self._lose(f"without the keyword {key[:40]!a}: it is not supported")
        self._mend(schema, unsent)
        return schema

    def _add_schemas(
        self,
        schema: JsonObject,
        key: str,
        value: Any,
        trail: tuple[str, ...],
        unsent: frozenset[str],
    ) -> None:
        """Convert the schemas in `value`, and add the result to `schema` under the keyword `key`.

        `unsent` contains the names of read-only properties, which are left out.
        """
        before = self._losses
        if key == "properties" and isinstance(value, dict):
            sent = {name: said for name, said in value.items() if name not in unsent}
            self._losses += len(sent) < len(value)
            schema[key] = {name: self.converted(said, trail) for name, said in sent.items()}
        elif key == "prefixItems" and isinstance(value, list):
            schema[key] = [self.converted(part, trail) for part in value]
        elif key in _OF_SEVERAL:
            raise CannotImport(f"a schema's {key!a} is of a wrong type")
        elif key == "not":
            refused = self._level(value, trail, frozenset())
            if self._losses == before:
                schema[key] = refused
            else:  # the converted 'not' would refuse more than the original
                self._lose("without a 'not': a part of it is not supported")
        else:
            is_plain = isinstance(value, bool) and key == "additionalProperties"
            schema[key] = value if is_plain else self.converted(value, trail)

    def _add_union(
        self,
        schema: JsonObject,
        node: JsonObject,
        key: str,
        trail: tuple[str, ...],
        unsent: frozenset[str],
    ) -> None:
        """Convert the branches of the keyword `key` of `node`, and add the result to `schema`.
        `key` is `anyOf` or `oneOf`.

        If a branch now accepts more than its original, or if `node` has a discriminator, `oneOf`
        becomes `anyOf`.
        """
        before = self._losses
        branches = [self._level(part, trail, unsent | self._read_only(part)) for part in node[key]]
        # A valid value could now match several branches, and `oneOf` allows only one.
        # Discriminators are not supported.
        if key == "oneOf" and (self._losses > before or "discriminator" in node):
            self._lose("a value may fit several forms of a 'oneOf'")
            key = "anyOf"
        if key in schema:
            self._lose("without one of two unions")
        else:
            schema[key] = branches

    def _mend(self, schema: JsonObject, unsent: frozenset[str]) -> None:
        """Correct the keywords of a converted schema in place:

        * Keywords of OpenAPI 3.0 that JSON Schema writes differently are changed.
        * Patterns that RE2 does not support are removed.
        * Properties in `unsent` are no longer required.
        """
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.title()}"
            is_bool = isinstance(schema.get(exclusive), bool)  # as in OpenAPI 3.0
            if is_bool and schema.pop(exclusive) and bound in schema:
                schema[exclusive] = schema.pop(bound)
        if schema.get("default", 0) is None:
            del schema["default"]
        if "required" in schema:
            names = texts(schema["required"])
            schema["required"] = [name for name in names if name not in unsent]
            self._losses += len(schema["required"]) < len(names)
        least = schema.get("minProperties")
        if unsent and isinstance(least, int) and least > len(schema.get("properties", {})):
            del schema["minProperties"]
            self._lose("without 'minProperties': some of its properties are read-only")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and compile_pattern(pattern) is None:
            del schema["pattern"]
            self._lose(f"without the pattern {pattern[:60]!a}: it is not supported")

    def _merged(
        self,
        schema: JsonObject,
        node: JsonObject,
        trail: tuple[str, ...],
        unsent: frozenset[str],
    ) -> JsonObject:
        """Combine `schema` with the schemas in the `allOf` of `node`, and return the result. If
        they cannot be merged into one schema in a simple way, the result has an `allOf`.
        """
        given = node.get("allOf")
        if not isinstance(given, list):
            return schema
        parts = [self._level(part, (*trail, ""), unsent) for part in given]
        merged = schema
        for part in parts:
            together = _both(merged, part)
            if together is None:
                return {**schema, "allOf": parts}
            merged = together
        return merged

    def _agreed(self, schema: JsonObject) -> JsonObject:
        """Return the schema with a property for each name that it requires.

        If the schema allows no additional properties, no property is added. Instead, the names that
        have no property are removed from `required`.
        """
        if "object" not in (_kinds(schema) or ["object"]):
            return schema
        required = dict.fromkeys(name for part in _conjuncts(schema) for name in part["required"])
        lost = [name for name in required if name not in _property_names(schema)]
        if not lost:
            return schema
        shown = ", ".join(ascii(name[:60]) for name in lost[:5])
        more = schema.get("additionalProperties", True)
        if more is False:
            self._lose(f"without requiring {shown}, which its properties do not name")
            kept = [name for name in schema.get("required", ()) if name not in lost]
            return {**schema, "required": kept}
        self.notes.append(f"{shown} is required and not described, so it may be anything")
        described = dict.fromkeys(lost, more if isinstance(more, dict) else {})
        is_open = {} if "properties" in schema else {"additionalProperties": more}
        return {**schema, **is_open, "properties": {**schema.get("properties", {}), **described}}

    def _nullable(self, schema: JsonObject, node: JsonObject) -> JsonObject:
        if not self._root.is_3_0 or node.get("nullable") is not True or not schema:
            return schema
        if not isinstance(schema.get("type"), str):
            return {"anyOf": [schema, {"type": "null"}]}
        enum = schema.get("enum")
        more = {"enum": [*enum, None]} if isinstance(enum, list) and None not in enum else {}
        return {**schema, "type": [schema["type"], "null"], **more}


def _as_parts(node: JsonObject) -> JsonObject:
    """Return the schema with its reference moved into its `allOf`. The keywords beside the
    reference stay.
    """
    given = node.get("allOf")
    parts = [{"$ref": node["$ref"]}, *(given if isinstance(given, list) else ())]
    return {**{key: value for key, value in node.items() if key != "$ref"}, "allOf": parts}


def _conjuncts(schema: JsonObject) -> Iterator[JsonObject]:
    """Yield each schema that has `required` and that every valid value must satisfy. These are the
    schema itself, the schemas in its `allOf`, and so on at all levels.
    """
    if "required" in schema:
        yield schema
    for part in schema.get("allOf", ()):
        yield from _conjuncts(part)


def _property_names(schema: JsonObject) -> set[str]:
    """Return the names of all properties in a converted schema, including those in its `allOf`,
    `anyOf` and `oneOf`.
    """
    names = set(schema.get("properties", ()))
    for keyword in ("allOf", "anyOf", "oneOf"):
        names.update(*map(_property_names, schema.get(keyword, ())))
    return names


def _both(one: JsonObject, other: JsonObject) -> JsonObject | None:
    """Return one schema that accepts exactly the values that both schemas accept. Return None if
    they cannot be merged in a simple way.
    """
    both_have = "properties" in one and "properties" in other
    if both_have and any(
        part.get("additionalProperties", True) is not True for part in (one, other)
    ):
        return None
    both = dict(one)
    for key, value in other.items():
        if key not in both or key in _ANNOTATIONS:
            both.setdefault(key, value)
        elif key == "properties":
            clashes = both[key].keys() & value.keys()
            if any(both[key][name] != value[name] for name in clashes):
                return None
            both[key] = {**both[key], **value}
        elif key == "required" and isinstance(value, list) and isinstance(both[key], list):
            both[key] = [*both[key], *(name for name in value if name not in both[key])]
        elif both[key] != value:
            return None
    return both


# -- texts ---------------------------------------------------------------------------------


def texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def clean(value: Any, longest: int) -> str:
    """Return a text without control characters and invisible characters, cut to `longest`
    characters. Line breaks stay. If `value` is not a text, return "".
    """
    if not isinstance(value, str):
        return ""
    kept = value[: 4 * longest].expandtabs(2)
    return cut("".join(c for c in kept if c == "\n" or c.isprintable()).strip(), longest)
