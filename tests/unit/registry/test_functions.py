"""Functions of a program: where they are found, and how they are sent."""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fumehood import InvalidDefinition, tool
from fumehood.executors import inside
from fumehood.registry.declare import FunctionTool
from fumehood.registry.discover import TOO_WIDE, address_of, register_all, register_function
from fumehood.registry.index import RegisteredTool, Source, ToolIndex

MODULE = '''
from fumehood import tool

@tool
def sandboxed() -> None:
    """Do nothing, sandboxed."""

@tool(sandboxed=False)
def synchronous() -> None:
    """Do nothing at once."""

@tool(sandboxed=False)
async def asynchronous() -> None:
    """Do nothing and give way."""

def plain() -> None:
    """Do nothing."""

under_another_name = tool(name="other")(plain)
nowhere = [tool(name="nowhere")(plain)]
'''


@pytest.fixture
def package(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A package of which the function tools are two modules deep."""
    (tmp_path / "shop" / "till").mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "till" / "__init__.py").write_text(MODULE)
    (tmp_path / "shop" / "stock.py").write_text(MODULE)
    (tmp_path / "corner.py").write_text(MODULE)
    sys.path.insert(0, str(tmp_path))
    yield SimpleNamespace(
        path=tmp_path.resolve(),
        stock=importlib.import_module("shop.stock"),
        till=importlib.import_module("shop.till"),
        corner=importlib.import_module("corner"),
    )
    sys.path.remove(str(tmp_path))
    for name in ("shop", "shop.stock", "shop.till", "corner"):
        sys.modules.pop(name, None)


def register(function: FunctionTool, *private: Path) -> RegisteredTool:
    return register_function(ToolIndex(), function, Source.PROGRAM, private=private)


@pytest.mark.row("S1")
@pytest.mark.parametrize("module", ["stock", "till", "corner"])
@pytest.mark.parametrize("name", ["sandboxed", "synchronous", "under_another_name"])
def test_function_run_in_another_process_is_registered_by_address(
    package: SimpleNamespace, module: str, name: str
) -> None:
    loaded = getattr(package, module)
    registered = register(getattr(loaded, name))
    assert registered.function is None
    assert (registered.address.module, registered.address.name) == (loaded.__name__, name)
    assert registered.address.import_path == str(package.path)


def test_asynchronous_host_function_is_called_in_process(package: SimpleNamespace) -> None:
    registered = register(package.stock.asynchronous)
    assert registered.address is None
    assert registered.function is not None


@pytest.mark.row("T7")
def test_function_that_cannot_be_imported_is_refused_with_a_remedy(
    package: SimpleNamespace,
) -> None:
    def inner() -> None:
        """Do nothing."""

    for function, words in (
        (tool(inner), "inside another function"),
        (package.stock.nowhere[0], "no name at the top level"),
        (tool(name="later")(package.stock.plain), "no name at the top level"),
    ):
        with pytest.raises(InvalidDefinition, match=words) as refused:
            register(function)
        assert refused.value.fields == ("sandboxed",)
        assert "sandboxed=False" in refused.value.message


@pytest.mark.parametrize("name", ["__main__", "not_loaded_at_all"])
def test_function_missing_from_its_module_is_refused(
    package: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package.stock.sandboxed.function, "__module__", name)
    with pytest.raises(InvalidDefinition, match=r"no name at the top level|is not loaded"):
        register(package.stock.sandboxed)


def test_module_located_elsewhere_than_its_name_is_refused(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package.corner.__spec__, "origin", str(package.path / "shop" / "stock.py"))
    with pytest.raises(InvalidDefinition, match="is not where the name"):
        register(package.corner.sandboxed)
    monkeypatch.setattr(package.corner.__spec__, "origin", None)
    with pytest.raises(InvalidDefinition, match="not loaded from a file"):
        register(package.corner.sandboxed)


@pytest.mark.row("S1")
def test_import_path_containing_private_state_is_refused(package: SimpleNamespace) -> None:
    for private in (package.path, package.path / "state"):
        with pytest.raises(InvalidDefinition, match="directory of its own"):
            register(package.corner.sandboxed, private)
    assert register(package.corner.sandboxed, package.path.parent / "state").address is not None
    assert register(package.corner.synchronous, package.path).address is not None


def test_system_directories_are_too_wide_as_import_paths() -> None:
    assert {Path("/"), Path("/etc"), Path("/tmp"), Path("/root"), Path("/proc")} <= TOO_WIDE


# -- Functions of the started program, which are pickled with what they use -----------------

Run = Callable[..., ModuleType]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs texts as the started program: one as a script, several as the cells of a notebook."""

    def run(*texts: str) -> ModuleType:
        main = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        for number, text in enumerate(texts):
            file = f"<cell {number}>" if len(texts) > 1 else str(tmp_path / "script.py")
            if len(texts) == 1:
                Path(file).write_text(text)
            exec(compile(text, file, "exec", dont_inherit=True), vars(main))
        return main

    return run


def answer(main: ModuleType, name: str = "act", **arguments: Any) -> Any:
    """The reply of the function where nothing of the program is."""
    address = address_of(getattr(main, name))
    sys.modules["__main__"] = ModuleType("__main__")
    return inside.answer(address.module, address.name, arguments, pickled=address.pickled)


def call(main: ModuleType, name: str = "act", **arguments: Any) -> Any:
    reply = answer(main, name, **arguments)
    assert "result" in reply, reply
    return reply["result"]["data"]


def sent(main: ModuleType, name: str = "act") -> bytes:
    return base64.b64decode(address_of(getattr(main, name)).pickled)


USES = {
    "nothing": ("", "1", 1),
    "a-module": ("import math", "math.floor(2.5)", 2),
    "a-module-by-another-name": ("import math as m", "m.floor(2.5)", 2),
    "a-module-below-another": ("import xml.dom.minidom", "xml.dom.minidom.Node.TEXT_NODE", 3),
    "a-name-of-a-module": ("from math import floor as f", "f(2.5)", 2),
    "a-constant": ("LIMIT = 4", "LIMIT", 4),
    "one-of-several-targets": ("A, B = 1, 2", "B", 2),
    "a-constant-with-a-type": ("LIMIT: int = 4", "LIMIT", 4),
    "a-pattern": ("import re\nWORD = re.compile('a+')", "WORD.findall('aab')", ["aa"]),
    "a-function": ("def twice(x): return 2 * x", "twice(2)", 4),
    "functions-of-functions": ("def a(): return b()\ndef b(): return 5", "a()", 5),
    "functions-that-call-each-other": (
        "def a(n): return b(n - 1)\ndef b(n): return a(n) if n else 7", "a(3)", 7),
    "a-class": ("class C:\n    x = 3", "C().x", 3),
    "a-class-of-a-class": ("class B:\n    x = 3\n\nclass C(B): pass", "C().x", 3),
    "a-decorator": (
        """import functools
def plus(f):
    @functools.wraps(f)
    def g(): return f() + 1
    return g
@plus
def one(): return 1""",
        "one()", 2),
    "a-default": ("D = 8\ndef f(x=D): return x", "f()", 8),
    "what-is-defined-later": ("def f(): return LATER\nLATER = 6", "f()", 6),
    "a-name-in-a-comprehension": ("K = 2", "[K * i for i in range(2)]", [0, 2]),
    "a-name-in-an-inner-function": ("K = 2", "(lambda: K)()", 2),
    "a-global-with-a-builtins-name": ("sum = 3", "sum", 3),
    "a-string-of-several-lines": ('TEXT = """a\nb"""', "TEXT", "a\nb"),
}  # fmt: skip


@pytest.mark.row("T7")
@pytest.mark.parametrize("name", USES)
def test_globals_used_by_a_function_are_sent_with_it(program: Run, name: str) -> None:
    before, expression, result = USES[name]
    main = program(
        f"from fumehood import tool\n{before}\n"
        f'@tool\ndef act() -> object:\n    """Act."""\n    return {expression}\n'
    )
    assert call(main) == result


@pytest.mark.row("T7")
def test_arguments_are_converted_to_types_defined_by_the_program(program: Run) -> None:
    main = program("""from __future__ import annotations
from typing import Annotated, Optional
from pydantic import BaseModel, Field
from fumehood import tool

class Point(BaseModel):
    x: Small

Small = Annotated[int, Field(le=100)]
Point.model_rebuild()

class Later(BaseModel):
    y: int

@tool
def act(point: Point, later: "Optional[Later]" = None) -> dict:
    \"\"\"Act.\"\"\"
    return {"x": point.x, "y": later.y if later else None}
""")
    assert call(main, point={"x": 1}, later={"y": 2}) == {"x": 1, "y": 2}


def test_only_what_a_function_uses_is_sent(program: Run, tmp_path: Path) -> None:
    main = program(f"""from fumehood import Engine, tool
SECRET = "secret-9b1"
with open({str(tmp_path / "ran")!r}, "a") as file: file.write("x")

@tool
def act(SECRET: int = 1) -> int:
    \"\"\"Act.\"\"\"
    other = 2
    return SECRET + other

@tool
def other() -> str:
    \"\"\"Act otherwise.\"\"\"
    return SECRET
""")
    raw = sent(main)
    assert b"secret-9b1" not in raw
    assert b"Engine" not in raw
    assert b"otherwise" not in raw
    assert b"secret-9b1" in sent(main, "other")  # twin: what it uses is sent
    assert call(main) == 3
    assert (tmp_path / "ran").read_text() == "x"


def test_traceback_of_a_sent_function_has_source_lines(program: Run) -> None:
    main = program(
        "from fumehood import tool\n\n\n@tool\ndef act() -> int:\n"
        '    """Act."""\n    raise LookupError("here")\n'
    )
    assert answer(main)["error"]["traceback"] == ["__main__:7 in act"]


DIGESTED = """from enum import Enum
from fumehood import tool
class Colour(Enum):
    RED = "red"
@tool
def act(colour: Colour) -> int:
    'Act.'
    return {}
"""


@pytest.mark.row("A2")
def test_digest_of_a_script_function_depends_on_its_text(program: Run) -> None:
    """An approval that outlives the program must find the same function again."""
    one, again, two = (address_of(program(DIGESTED.format(n)).act) for n in (1, 1, 2))
    assert one.digest == again.digest != two.digest
    assert one.pickled != again.pickled  # control: a pickled class has a new id each time


@pytest.mark.row("T7")
def test_notebook_function_is_sent_with_names_of_other_cells(program: Run) -> None:
    main = program(
        "import math\nfrom decimal import Decimal\nfrom fumehood import tool\n",
        "def helper(x):\n    return math.floor(x) + len(DATA)\nDATA = list(range(10))\n",
        "get = 5\nFACTOR = 2\n@tool\ndef act(x: Decimal) -> int:\n"
        '    """Act."""\n    return FACTOR * helper(x)\n',
    )
    assert call(main, x="2.5") == 24


def test_unpicklable_function_is_refused_with_its_value_and_a_remedy(program: Run) -> None:
    main = program(
        "import threading\nfrom fumehood import tool\nLOCK = threading.Lock()\n"
        '@tool\ndef first() -> int:\n    """Act."""\n    return LOCK\n'
    )
    with pytest.raises(InvalidDefinition) as refused:
        register_all(ToolIndex(), [main.first], private=())
    assert "cannot pickle '_thread.lock'" in refused.value.message
    assert "importable module" in refused.value.message


def test_invalid_pickle_is_reported_as_a_failure() -> None:
    broken = base64.b64encode(b"no pickle").decode()
    reply = inside.answer("__main__", "act", {}, pickled=broken)
    assert reply["error"]["type"] == "UnpicklingError"
