"""No order comes from a set, an address or a hash: such an order differs between processes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titan_muon"
FILES = sorted(PACKAGE.rglob("*.py"))
SETS = ("set", "frozenset", "AbstractSet", "Set")
FREE = (
    *("sorted", "set", "frozenset", "any", "all", "len", "min", "max"),
    *("isdisjoint", "issuperset", "issubset", "union"),
)
"""Functions whose result does not depend on the order. `min` and `max` with a key may meet a tie."""
ORDERED = ("list", "tuple", "iter", "next", "enumerate", "zip", "map", "filter", "fromkeys", "join", "chain", "sum")

ALLOWED = {
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_order_comes_from_a_set(path: Path) -> None:
    name, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
    visitor = Orders(tree)
    visitor.visit(tree)
    found = [(line, what) for line, what in visitor.found if (name, what) not in ALLOWED]
    assert not found, f"{name}: sort these by a key without ties, or keep a dict: {found}"
