"""Architecture: one-way imports, collectives in one file, short files, no order from a set; and the wheel."""

import ast
import contextlib
import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import titan_muon
from docs import make_architecture
from titan_muon import command

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "titan_muon"
COLLECTIVES = set(
    """
    all_reduce all_reduce_coalesced all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
    all_gather_single all_to_all all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list
    gather gather_object irecv isend monitored_barrier recv recv_object_list reduce reduce_scatter
    reduce_scatter_tensor scatter scatter_object_list send send_object_list
    """.split()  # noqa: SIM905
)
DISTRIBUTED = ("dist", "distributed", "funcol", "_functional_collectives", "c10d")
# DTensor's own ways to communicate.
REDISTRIBUTING = {"full_tensor", "redistribute"}


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SHIPPED = [*files("titan_muon", "models", "scripts"), ROOT / "train.py"]
OURS = [*SHIPPED, *files("benchmarks")]
FOLDERS = sorted({path.parent for path in files("titan_muon")})
LONGEST_FILE, LONGEST_FUNCTION, FILES_IN_A_FOLDER = 450, 60, 10
LIBRARY = [path for path in files("titan_muon") if PACKAGE / "trainer" not in path.parents]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name(path))


def imports(path: Path) -> Iterator[str]:
    """Every imported module, or name of a module, in full: titan_muon.planner.plan_by_search."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def part(path: Path) -> str:
    """Part of the package with a file: the folder's name, or the file's."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


ENGINE = "titan_muon.engine"
FACE = ("titan_muon.options", "titan_muon.ranges", "titan_muon.removed")
LAYOUT, PROGRAM = f"{ENGINE}.layout", f"{ENGINE}.program"
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "engine": (ENGINE, *FACE),
    "engine/layout": (LAYOUT, *FACE),
    "engine/program": (LAYOUT, PROGRAM, *FACE),
    "engine/orthogonalize": (f"{ENGINE}.orthogonalize", LAYOUT, *FACE),
    "engine/tensors": (f"{ENGINE}.tensors", f"{ENGINE}.orthogonalize", LAYOUT, PROGRAM, *FACE),
    "matrices": ("titan_muon.matrices", LAYOUT, *FACE),
    "planner": ("titan_muon.planner", LAYOUT, PROGRAM, f"{ENGINE}.planning", *FACE),
    "options": (LAYOUT, f"{ENGINE}.orthogonalize", *FACE),
    "audit": ("titan_muon.audit",),
}
"""The only imports from this package, by folder or file of the library."""
FORBIDDEN: Mapping[str, tuple[str, ...]] = {
    # A plan is computed from shapes and sizes.
    "engine/layout": ("torch",),
    "engine/program": ("torch",),
    "matrices": ("torch",),
    "planner": ("torch",),
    "engine/orthogonalize": ("torch.distributed",),
    "owned": ("titan_muon.muon", f"{ENGINE}.step", f"{ENGINE}.tensors.storage", f"{ENGINE}.orthogonalize"),
}
INSTALLED_FOR_THE_ENGINE = {*sys.stdlib_module_names, "torch", "titan_muon"}


@pytest.mark.parametrize("path", [*files("titan_muon"), ROOT / "train.py"], ids=name)
def test_imports_go_one_way(path: Path) -> None:
    """Models are registered, so a package may bring models."""
    inside = path in LIBRARY
    forbidden = ["models", "scripts", "benchmarks", "tests", "train"] if path.name != "train.py" else []
    forbidden += ["titan_muon.trainer"] if inside else []
    forbidden += ["torchtitan"] if inside or path.name == "train.py" else []
    homes = [name(parent).removeprefix("titan_muon/") for parent in (path.with_suffix(""), *path.parents[:-3])]
    forbidden += [module for home in homes for module in FORBIDDEN.get(home, ()) if inside]
    for module in imports(path):
        assert not any(within(module, other) for other in forbidden), f"{name(path)} imports {module}"
        if inside and part(path) == "engine":
            assert module.split(".")[0] in INSTALLED_FOR_THE_ENGINE, f"{name(path)} imports {module}"
        for home in homes:
            if inside and home in ALLOWED and within(module, "titan_muon"):
                assert any(within(module, other) for other in ALLOWED[home]), f"{name(path)} imports {module}"


def test_nothing_in_the_library_imports_what_stands_beside_it() -> None:
    """The face starts forecast and audit by name: the lazy table of public names, and the command."""
    for beside in ("forecast", "plugins", "audit"):
        importing = {part(p) for p in LIBRARY if any(within(m, f"titan_muon.{beside}") for m in imports(p))}
        assert importing <= {beside, "__init__", "command"}, beside


def called(path: Path, names: set[str]) -> Iterator[str]:
    """Uses of torch.distributed functions and DTensor methods with the passed names."""
    nodes = [*ast.walk(tree(path))]
    froms = (n for n in nodes if isinstance(n, ast.ImportFrom) and within(n.module or "", "torch.distributed"))
    functions = names & {alias.asname or alias.name for node in froms for alias in node.names}
    for node in nodes:
        # torch.distributed under a usual name, or the functional collectives.
        attribute = isinstance(node, ast.Attribute) and node.attr in names
        if attribute and ast.unparse(node.value).split(".")[-1] in DISTRIBUTED:
            yield f"{name(path)}:{node.lineno} {ast.unparse(node)}"
        elif isinstance(node, ast.Name) and node.id in functions:
            yield f"{name(path)}:{node.lineno} {node.id}"


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_only_four_folders_and_clipping_call_collectives(path: Path) -> None:
    if (
        part(path) in ("owned", "audit")
        or path == PACKAGE / "plugins" / "clip.py"
        or name(path.parent) in ("titan_muon/engine/exchange", "titan_muon/engine/faults")
    ):
        return
    assert list(called(path, COLLECTIVES)) == []
    methods = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute) and node.attr in REDISTRIBUTING)
    assert [ast.unparse(node) for node in methods] == []
    assert not any("_functional_collectives" in module for module in imports(path))


def imported_files(path: Path) -> set[Path]:
    """Imported files of this repository: at the top, in functions, or for type checks."""
    return {file for module in imports(path) if (file := module_file(module)) is not None} - {path}


def module_file(module: str) -> Path | None:
    """The file for the longest importable prefix of a dotted name."""
    parts = module.split(".")
    bases = (ROOT.joinpath(*parts[:length]) for length in range(len(parts), 0, -1))
    return next((file for b in bases for file in (b.with_suffix(".py"), b / "__init__.py") if file.is_file()), None)


def folder_of(path: Path) -> str:
    """The folder of a file. A file at the top of the library counts as a folder."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    if inside[0] != "titan_muon":
        return inside[0]
    return "/".join(inside[:-1] if len(inside) > 2 else inside)


@pytest.mark.parametrize("node_of", [name, folder_of])
def test_no_files_and_no_folders_import_in_a_circle(node_of: Callable[[Path], str]) -> None:
    """Imports inside a function or for type checks count. `prepare` raises CycleError with the circle."""
    graph: dict[str, set[str]] = {}
    for path in OURS:
        others = {node_of(other) for other in imported_files(path)} - {node_of(path)}
        graph.setdefault(node_of(path), set()).update(others)
    TopologicalSorter(graph).prepare()


def test_the_searches_find_collectives_and_imports() -> None:
    """Guards the tests against a moved folder."""
    exchange = PACKAGE / "engine/exchange/exchange.py"
    assert len(list(called(exchange, COLLECTIVES))) >= 5
    assert "titan_muon/engine/layout" in {folder_of(other) for other in imported_files(exchange)}


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_folder_has_at_most_ten_files_and_a_docstring(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= FILES_IN_A_FOLDER
    assert ast.get_docstring(tree(folder / "__init__.py"))


ENGINE_AND_FACE = 8_115
"""Lines. They only shrink; the aim is 7,000."""


def test_the_engine_and_the_face_stay_short() -> None:
    face = [PACKAGE / f"{word}.py" for word in ("muon", "hybrid", "options", "registry")]
    assert sum(len(path.read_text().splitlines()) for path in [*files("titan_muon/engine"), *face]) <= ENGINE_AND_FACE


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_no_file_and_no_function_is_too_long(path: Path) -> None:
    """Functions without the docstring, because an explained argument is no statement."""
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if ast.get_docstring(node) is not None else None
            explained = first.end_lineno - first.lineno + 1 if first is not None else 0
            length = node.end_lineno - node.lineno + 1 - explained
            assert length <= LONGEST_FUNCTION, f"{name(path)}:{node.lineno} {node.name} has {length} lines"


READ_ONLY = ("Mapping", "Sequence", "Final", "tuple", "frozenset")
MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
CONSTRUCTORS = ("dict", "list", "set", "defaultdict", "Counter", "OrderedDict")
WRITES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def collections(path: Path) -> Iterator[tuple[str, bool]]:
    """Module-level dicts, lists and sets, and whether their annotation is read-only."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in CONSTRUCTORS
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            read_only = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).split("[")[0] in READ_ONLY
            if made or isinstance(value, MUTABLE):
                yield from ((ast.unparse(target), read_only) for target in targets if ast.unparse(target) != "__all__")


def written(path: Path) -> Iterator[str]:
    """Names with assigned or deleted items, or with a call of a writing method."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield ast.unparse(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            yield ast.unparse(node.func.value)
        elif isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target)


@pytest.mark.parametrize("path", [path for path in files("titan_muon") if part(path) != "registry"], ids=name)
def test_no_module_has_a_mutable_global(path: Path) -> None:
    """A dict, list or set at module level has a constant's name, and the module does not write to the value.

    In the library the annotation is read-only (Mapping, Sequence), so that mypy refuses writes.
    """
    variables = dict(collections(path))
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree(path)))
    assert [variable for variable in variables if variable != variable.upper()] == []
    assert set(variables) & set(written(path)) == set()
    if path in LIBRARY:
        assert [variable for variable, read_only in variables.items() if not read_only] == []


def test_the_architecture_page_has_every_file() -> None:
    """`python docs/make_architecture.py` updates the page."""
    page = make_architecture.PAGE.read_text(encoding="utf-8")
    assert page == make_architecture.written(page)


WITH_SEVERAL_MEANINGS = {"DTYPES", "T", "main"}
"""Names of several files: of dtypes, a type variable, and starts of commands."""


def test_no_two_files_define_the_same_name() -> None:
    homes: dict[str, set[str]] = {}
    for path in (path for path in LIBRARY if part(path) != "audit"):
        for node in tree(path).body:
            defined = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            for word in (word for word in defined if not word.startswith("_")):
                homes.setdefault(word, set()).add(name(path))
    several = {word: sorted(files) for word, files in homes.items() if len(files) > 1}
    assert several.keys() == WITH_SEVERAL_MEANINGS, several


# No order comes from a set, an address or a hash: such an order differs between processes

SETS = ("set", "frozenset", "AbstractSet", "Set")
FREE = (
    *("sorted", "set", "frozenset", "any", "all", "len", "min", "max"),
    *("isdisjoint", "issuperset", "issubset", "union"),
)
"""Functions whose result does not depend on the order. `min` and `max` with a key may meet a tie."""
ORDERED = ("list", "tuple", "iter", "next", "enumerate", "zip", "map", "filter", "fromkeys", "join", "chain", "sum")

HARMLESS = {
    # Of sets with one element.
    ("engine/program/patterns.py", "replica_sets"),
    ("trainer/recipe/toml.py", "given"),
    # Sums of integers.
    ("trainer/dry_run/verdict.py", "between_all"),
    # A method `__hash__`, which nothing prints or sorts by.
    ("engine/tensors/process_groups.py", "hash"),
}
"""(file, expression): uses of an order that change no result."""


def name_of(node: ast.AST) -> str:
    """The last name of `a.b.c`, `a[b]` or `f(...)`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return name_of(node.func) if isinstance(node, ast.Call) else getattr(node, "id", "")


class Orders(ast.NodeVisitor):
    """Collects (line, expression) of each use of a set's order, or of an address or hash."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._sets, self._free = [set[str]()], set[ast.AST]()
        # Attributes of `self` and fields, in the whole file.
        self._attributes = {
            name_of(target)
            for node in ast.walk(tree)
            for target, value in _assigned(node)
            if isinstance(target, ast.Attribute) and self._is_set(value)
        }
        for node in tree.body:
            self._sets[0] |= {name_of(t) for t, v in _assigned(node) if self._is_set(v)}

    def _is_set(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            return name_of(node) in ("set", "frozenset", "difference", "intersection", "union", "symmetric_difference")
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor) and any(
                self._is_set(side) or (isinstance(side, ast.Call) and name_of(side) == "keys")
                for side in (node.left, node.right)
            )
        if isinstance(node, ast.IfExp):
            return self._is_set(node.body) or self._is_set(node.orelse)
        if isinstance(node, ast.Attribute):
            return node.attr in getattr(self, "_attributes", ())
        return isinstance(node, ast.Name) and node.id in self._sets[-1]

    def _check(self, node: ast.AST) -> None:
        if self._is_set(node):
            self.found.append((getattr(node, "lineno", 0), ast.unparse(node)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotated = {a.arg for a in arguments if a.annotation is not None and name_of(a.annotation) in SETS}
        self._sets.append(annotated)
        for inner in ast.walk(node):
            self._sets[-1] |= {name_of(t) for t, v in _assigned(inner) if isinstance(t, ast.Name) and self._is_set(v)}
        self.generic_visit(node)
        self._sets.pop()

    def visit_For(self, node: ast.For) -> None:
        self._check(node.iter)
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        if node not in self._free:
            self._check(node.value)
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self._free |= {*node.elts}
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        if node not in self._free:
            for generator in node.generators:
                self._check(generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_Call(self, node: ast.Call) -> None:
        called, keyed = name_of(node.func), any(word.arg == "key" for word in node.keywords)
        if called in FREE and (called == "sorted" or not keyed):
            self._free |= {*node.args}
        elif called in ORDERED or called in FREE:
            for argument in node.args:
                self._check(argument)
        if called == "pop" and isinstance(node.func, ast.Attribute):
            self._check(node.func.value)
        if isinstance(node.func, ast.Name) and called in ("id", "hash"):
            self.found.append((node.lineno, called))
        self.generic_visit(node)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, value) pairs of an assignment."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            pairs = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            yield from zip(target.elts, node.value.elts, strict=False) if pairs else ((target, node.value),)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


@pytest.mark.parametrize("path", files("titan_muon"), ids=name)
def test_no_order_comes_from_a_set(path: Path) -> None:
    visitor = Orders(tree(path))
    visitor.visit(tree(path))
    found = [(line, what) for line, what in visitor.found if (str(path.relative_to(PACKAGE)), what) not in HARMLESS]
    assert not found, f"{name(path)}: sort these by a key without ties, or keep a dict: {found}"


# The wheel has the library, types, recipes, and a command for use outside of the checkout

NEEDS = "needs torchtitan; install them by pip install 'titan-muon[titan]'"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this checkout."""
    from hatchling import build

    folder = tmp_path_factory.mktemp("dist")
    with contextlib.chdir(ROOT):
        return folder / build.build_wheel(str(folder)), folder / build.build_sdist(str(folder))


@pytest.mark.slow
def test_the_wheel_has_types_models_and_recipes_and_the_sdist_tests_and_docs(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    assert {
        "titan_muon/py.typed",
        "titan_muon/shipped/models/qwen3.py",
        "titan_muon/shipped/configs/qwen_moe_muon.toml",
        "titan_muon/trainer/commands/compare.py",
        "titan_muon/trainer/commands/saved_model.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/unit/test_architecture.py", "docs/frameworks.md", "README.md", "LICENSE", "Makefile"} <= names


@pytest.mark.slow
def test_the_command_plans_outside_of_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(built[0]).extractall(tmp_path / "site")
    words = ["plan", "--config", "qwen_moe_muon", "--world-size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    planned = [sys.executable, "-m", "titan_muon.command", *words]
    done = subprocess.run(planned, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Muon step:" in done.stdout


def test_the_version_equals_the_projects_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert titan_muon.__version__ == version


def test_a_missing_extra_is_a_single_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "torchtitan" else object())
    assert command.main(["train", "--config", "qwen_moe_muon"]) == 2
    assert capsys.readouterr().err == f"titan-muon train: {NEEDS}\n"


def test_the_integration_without_torchtitan_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "titan_muon.trainer", raising=False)
    with pytest.raises(ModuleNotFoundError, match=re.escape(NEEDS)):
        importlib.import_module("titan_muon.trainer")


def test_commands_and_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["recipes"]) == 0
    assert "qwen_moe_muon" in capsys.readouterr().out.split()
    assert command.main([]) == command.main(["--help"]) == 0
    assert capsys.readouterr().out == 2 * (command.USAGE + "\n")
    assert command.main(["fly"]) == 2
    assert "'fly' is not a command; choose from train, plan, compare" in capsys.readouterr().err
