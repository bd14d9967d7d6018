"""Functions as tools: which are called in this process, and how another process finds the rest.

Host side, for entry points and embedding programs. An asynchronous function with `sandboxed=False`
is awaited in this process. Others run in a process that imports them: a sandboxed function in the
jail, a synchronous one in a worker that can be killed.

A function of the started program (`__main__`: a script, or the cells of a notebook) cannot be
imported without running the whole program again. So its source is sent: its definition, and for
each global name that it uses the import, definition or assignment that binds it, with the original
line numbers. Invariants: nothing is pickled; nothing that the function does not name is sent; a
function that can neither be imported nor sent is refused at registration, with the remedy.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fumehood.core.call import FunctionAddress
from fumehood.registry.declare import FunctionTool
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import RegisteredTool, Source, ToolIndex
from fumehood.sandbox.process.wall import library_directories

TOO_WIDE = frozenset(
    map(Path, ("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/media", "/mnt", "/opt",
               "/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var",  # noqa: S108
               "/var/lib", "/var/tmp"))  # noqa: S108
)  # fmt: skip
"""Directories too broad for an import path: sharing one would expose other files."""

REMEDY = (
    "Define the function at the top level of an importable module; or, if you trust its code, "
    "make it async with sandboxed=False"
)
"""For functions that another process cannot find; an asynchronous one can run in this process."""


def register_function(
    index: ToolIndex,
    tool: FunctionTool,
    source: Source,
    *,
    private: Sequence[Path],
    disabled_because: str | None = None,
) -> RegisteredTool:
    """Add a function to the index, in the form in which it will be called.

    `private` are directories that no import path of a sandboxed function may contain.

    Raises:
        InvalidDefinition: as `ToolIndex.register`, or another process must find the function
            and cannot.
    """
    definition = tool.definition
    if definition.executor != "function" or (tool.is_async and not definition.sandboxed):
        return index.register(
            definition, source, function=tool.invoke, disabled_because=disabled_because
        )
    try:
        address = address_of(tool)
        if definition.sandboxed and not address.source:
            _check_import_path(Path(address.import_path), private)
    except _NotFound as fault:
        raise InvalidDefinition(definition.name, [_fault(tool, str(fault))], REMEDY) from None
    return index.register(definition, source, address=address, disabled_because=disabled_because)


class _NotFound(Exception):
    """The reason why another process cannot, or must not, import the function."""


def address_of(tool: FunctionTool) -> FunctionAddress:
    """Where another process finds the function.

    Raises:
        _NotFound: nowhere.
    """
    function = tool.function
    module_name = str(getattr(function, "__module__", None))
    qualified = str(getattr(function, "__qualname__", ""))
    if "<locals>" in qualified:
        raise _NotFound("it was made inside another function")
    module = sys.modules.get(module_name)
    if module is None:
        raise _NotFound(f"its module {module_name[:80]!r} is not loaded")
    name = _name_in(module, tool)
    if module_name in ("__main__", "__mp_main__"):
        return _sent(tool, name)
    return FunctionAddress(module_name, name, str(_import_path(module)))


def _sent(tool: FunctionTool, name: str) -> FunctionAddress:
    """The function as source. Different source is a different module to a worker."""
    libraries = library_directories() if tool.definition.sandboxed else None
    try:
        source = source_of(tool.function, name, libraries)
    except NotShippable as reason:
        raise _NotFound(f"it is part of the started program, and {reason}") from None
    digest = hashlib.sha256("\0".join(source).encode()).hexdigest()
    return FunctionAddress(f"__main__#{digest}", name, "", source)


def _name_in(module: ModuleType, tool: FunctionTool) -> str:
    for name, value in vars(module).items():
        if value is tool:
            return name
    raise _NotFound(f"no name at the top level of {module.__name__} holds what @tool made")


def _import_path(module: ModuleType) -> Path:
    """The directory from which `import` finds the module by its full name."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    file = Path(origin) if isinstance(origin, str) else None
    if file is None or not file.is_file():
        raise _NotFound(f"{module.__name__} is not loaded from a file")
    parts = module.__name__.split(".")
    if hasattr(module, "__path__"):
        parts.append("__init__")
    directory = file.parent
    for part in reversed(parts[:-1]):
        if directory.name != part:
            raise _NotFound(f"its file is not where the name {module.__name__} says")
        directory = directory.parent
    if file.name.split(".")[0] != parts[-1]:
        raise _NotFound(f"its file is not where the name {module.__name__} says")
    return directory.resolve()


def _check_import_path(path: Path, private: Sequence[Path]) -> None:
    """The function can read everything below its import path."""
    resolved = [directory.resolve() for directory in private]
    if path in TOO_WIDE or any(directory.is_relative_to(path) for directory in resolved):
        raise _NotFound(
            "the directory of its module contains more than code (the whole host, a home or "
            "the engine's own state), and a sandboxed function may read all of it; move the "
            "module into a directory of its own"
        )


def _fault(tool: FunctionTool, why: str) -> str:
    if tool.definition.sandboxed:
        return f"sandboxed: the function cannot be run in the jail: {why}"
    return (
        "executor: a synchronous function runs in a worker process, so that it can be stopped, "
        f"and the worker cannot find it: {why}"
    )


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PLAIN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
"""Statements that are sent unchanged. A name bound by another kind is imported or refused."""

MAX_CHARACTERS = 128 * 1024
"""Of source, which is sent with each call."""


class NotShippable(Exception):
    """The reason why a function cannot be sent, as a clause."""


def source_of(function: Any, name: str, libraries: Sequence[str] | None) -> tuple[str, ...]:
    """The sources to run, in order, to define `name`, whose body is `function`.

    `libraries` are the directories that modules may be imported from; None allows any.

    Raises:
        NotShippable: a part has no source, or cannot be imported there.
    """
    program = _Program(vars(sys.modules[function.__module__]))
    program.need(name, program.text_of(_code_file(function)))
    if libraries is not None:
        _require_libraries(program.modules, libraries)
    texts = program.texts()
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise NotShippable(f"what it uses there has more than {MAX_CHARACTERS} characters")
    return texts


class _Text:
    """One file, or one notebook cell, of the program."""

    def __init__(self, lines: list[str]) -> None:
        try:
            body = ast.parse("".join(lines)).body
        except (SyntaxError, ValueError, RecursionError):
            raise NotShippable("its source cannot be read") from None
        self._lines = lines
        self._body = body
        self._kept: dict[int, list[str]] = {}
        """First line of each statement to be sent, and its lines."""
        for statement in body:
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                self.keep_import(statement, statement.names)

    def plain(self, name: str) -> list[ast.stmt]:
        """The statements that define or assign a name."""
        return [s for s in self._body if isinstance(s, PLAIN) and name in _bound(s)]

    def binds_otherwise(self, name: str) -> bool:
        """Whether another kind of statement, such as `if` or `for`, also binds the name."""
        others = (s for s in self._body if not isinstance(s, (*PLAIN, ast.Import, ast.ImportFrom)))
        nodes = (node for statement in others for node in ast.walk(statement))
        return any(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
            for node in nodes
        )

    def imports(self, name: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, ast.alias]]:
        """The absolute imports that bind a name."""
        for statement in self._body:
            if isinstance(statement, ast.Import) or (
                isinstance(statement, ast.ImportFrom) and not statement.level
            ):
                for alias in statement.names:
                    if (alias.asname or alias.name.split(".")[0]) == name:
                        yield statement, alias

    def keep_import(self, statement: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> None:
        """Send an import, reduced to these names."""
        one = ast.unparse(
            ast.Import(names)
            if isinstance(statement, ast.Import)
            else ast.ImportFrom(statement.module, names, 0)
        )
        before = self._kept.get(statement.lineno, [])
        if one not in before:
            self._kept[statement.lineno] = [*before, one]

    def keep(self, statement: ast.stmt) -> str | None:
        """Send a statement; None if it is already sent."""
        start, end = _first_line(statement), statement.end_lineno or statement.lineno
        if start in self._kept:
            return None
        lines = range(start, end + 1)
        sharing = [s for s in self._body if {_first_line(s), s.end_lineno} & set(lines)]
        if len(sharing) > 1:
            raise NotShippable(f"line {start} holds more than one statement")
        self._kept[start] = [line.rstrip("\n") for line in self._lines[start - 1 : end]]
        return "\n".join(self._kept[start])

    def sent(self) -> str:
        """The statements to be sent, on their original lines."""
        lines: list[str] = []
        for start, kept in sorted(self._kept.items()):
            lines += [""] * (start - 1 - len(lines))
            is_import = kept[0].startswith(("import ", "from "))
            lines += ["; ".join(kept)] if is_import else kept
        return "\n".join(lines) + "\n"


class _Program:
    """The parts of a program that are needed so far."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.modules: set[str] = set()
        """Imported modules."""
        self._namespace = namespace
        self._texts: dict[str, _Text] = {}
        self._imports: list[str] = []
        """For names that no statement binds, such as names of earlier cells."""

    def text_of(self, file: str) -> _Text:
        """The source that defines a name of this file. Raises NotShippable."""
        if file not in self._texts:
            linecache.checkcache(file)
            lines = linecache.getlines(file)
            if not lines:
                raise NotShippable("its source text is not kept: save the program in a file")
            self._texts[file] = _Text(lines)
        return self._texts[file]

    def need(self, name: str, asking: _Text) -> None:
        """Send the binding of a global name. Builtins need none.

        Raises:
            NotShippable: no binding can be sent.
        """
        if name not in self._namespace:
            return
        value = self._namespace[name]
        text = self._home(value) or asking
        if statements := text.plain(name):
            _require_unchanged(name, value, statements)
            if text.binds_otherwise(name):
                raise NotShippable(f"it uses {name!r}, which is bound in more than one way")
            for statement in statements:
                self._keep(statement, text)
        elif imports := list(text.imports(name)):
            for imported, alias in imports:
                text.keep_import(imported, [alias])
                self._note_module(imported, alias)
        else:
            self._import_value(name, value)

    def texts(self) -> tuple[str, ...]:
        """All needed sources; the requested function is in the last one."""
        others = [text.sent() for text in reversed(self._texts.values())]
        return ("\n".join(self._imports) + "\n", *others) if self._imports else tuple(others)

    def _keep(self, statement: ast.stmt, text: _Text) -> None:
        source = text.keep(statement)
        if source is not None:
            for name in sorted(_used(source, statement)):  # the same text in every process
                self.need(name, text)

    def _home(self, value: Any) -> _Text | None:
        """The source that contains a function of the program, perhaps another cell."""
        function = _function_of(value)
        if function is None or vars(sys.modules[function.__module__]) is not self._namespace:
            return None
        return self.text_of(_code_file(function))

    def _note_module(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        module = alias.name if isinstance(statement, ast.Import) else statement.module
        self.modules.add(str(module))

    def _import_value(self, name: str, value: Any) -> None:
        found = _import_of(name, value)
        if found is None:
            raise NotShippable(
                f"it uses {name!r}, which is not bound by an import, definition or assignment "
                "beside it: make it inside the function"
            )
        module, line = found
        self.modules.add(module)
        if line not in self._imports:
            self._imports.append(line)


def _import_of(name: str, value: Any) -> tuple[str, str] | None:
    """The module of a value and the statement that imports it, as the value claims."""
    if isinstance(value, ModuleType):
        return value.__name__, f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    own = next(
        (getattr(value, key) for key in ("__qualname__", "_name") if hasattr(value, key)), None
    )
    if not isinstance(module, str) or not isinstance(own, str) or not own.isidentifier():
        return None
    if module == "__main__" or getattr(sys.modules.get(module), own, None) is not value:
        return None
    return module, f"from {module} import {own} as {name}"


def _require_unchanged(name: str, value: Any, statements: Sequence[ast.stmt]) -> None:
    """Check that the source still has the running function at its place."""
    function = _function_of(value)
    if function is None or function.__qualname__ != name:
        return
    if function.__code__.co_firstlineno not in map(_first_line, statements):
        raise NotShippable(f"the text of {name!r} was changed after the program was started")


def _require_libraries(modules: Iterable[str], libraries: Sequence[str]) -> None:
    for name in sorted({module.split(".")[0] for module in modules}):
        if name in sys.stdlib_module_names:
            continue
        spec = getattr(sys.modules.get(name), "__spec__", None)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        if not any(Path(p).is_relative_to(d) for p in places if p for d in libraries):
            raise NotShippable(
                f"it uses {name!r}, which is not an installed package, so the jail cannot read it"
            )


def _function_of(value: Any) -> FunctionType | None:
    """The function behind a tool or a decorator."""
    found = inspect.unwrap(getattr(value, "function", value))
    return found if isinstance(found, FunctionType) and found.__module__ in sys.modules else None


def _code_file(function: Any) -> str:
    return str(inspect.unwrap(function).__code__.co_filename)


def _first_line(statement: ast.stmt) -> int:
    decorators = statement.decorator_list if isinstance(statement, Definition) else []
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a plain statement binds."""
    if isinstance(statement, Definition):
        return {statement.name}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    nodes = (node for target in targets for node in ast.walk(target))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _used(source: str, statement: ast.stmt) -> set[str]:
    """The global names that a statement uses, in its functions and annotations too."""
    try:
        found = set(_globals_in(symtable.symtable(source, "program", "exec")))
        for node in ast.walk(statement):
            for key in ("annotation", "returns"):
                written = getattr(node, key, None)
                if isinstance(written, ast.Constant) and isinstance(written.value, str):
                    found |= set(_globals_in(symtable.symtable(written.value, "hint", "eval")))
    except SyntaxError:
        raise NotShippable(f"line {statement.lineno} of its program cannot be sent") from None
    return found


def _globals_in(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals_in(child)
