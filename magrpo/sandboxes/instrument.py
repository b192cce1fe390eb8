"""Rewrites test code so that every ``assert`` is a separate case and a failing one does not end the test.

The rules, also in ``docs/sandbox.md``:

* An ``assert`` is one case each time it runs. It passes if its expression is true.
* A true ``assert`` is no case if neither its expression nor its enclosing conditions touch the candidate or a value
  that came from it (``assert True``). A false one always is a case.
* A statement that raises outside an ``assert`` does not end the test: the names it would have set become undefined, so
  that an ``assert`` that needs them fails, and the test continues with the next statement or round of a loop. Asserts
  in a loop or branch that could not be entered count as not run, once each.
* The body of a ``try`` with handlers and of a ``with`` runs unchanged: there the test expects an exception.
* A call of a function named ``assert...`` that the test does not define (``np.testing.assert_allclose``) is an assert.

A failing program therefore never has fewer cases than a correct one.
"""

from __future__ import annotations

import ast
import base64
import builtins
import marshal
from dataclasses import dataclass
from functools import lru_cache

from magrpo.sandboxes.jail.recorder import HOOK, SAME


@dataclass(frozen=True, slots=True)
class Instrumented:
    """A test ready to run.

    ``code``: a marshalled code object in base64; ``needs``: names that the test reads and only the program can define;
    ``asserts``: the number of asserts in its text, except those of exception handlers.
    """

    code: str
    needs: tuple[str, ...]
    asserts: int


@lru_cache(maxsize=4096)
def instrument_test(test: str, entry_point: str) -> Instrumented:
    """Compile a test into the code that the tester runs.

    ``test`` either defines ``check(candidate)`` or is a list of asserts that call ``entry_point`` by its name.

    Raises:
        SyntaxError: the test is not Python.
    """
    tree = ast.parse(test, "<test>")
    needs, asserts = _find_needed_names(tree, entry_point), _count_asserts(tree, inside=True)
    tree = _Instrument(_find_tainted_names(tree, entry_point), _list_definitions(tree)).visit(tree)
    code = marshal.dumps(compile(ast.fix_missing_locations(tree), "<test>", "exec"))
    return Instrumented(base64.b64encode(code).decode(), needs, asserts)


def _find_needed_names(tree: ast.Module, entry_point: str) -> tuple[str, ...]:
    known = (
        {"candidate", entry_point, SAME, "__name__", *dir(builtins)} | _list_definitions(tree) | _names(tree, ast.Store)
    )
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return () if "*" in known else tuple(sorted(_names(tree, ast.Load) - known))


def _list_definitions(tree: ast.Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, context)}


def _find_tainted_names(tree: ast.Module, entry_point: str) -> set[str]:
    """Names that may hold the candidate or a value that came from it: a fixed point over assignments.

    Parameters of the test's own functions count as tainted, and so does any argument of a call with a tainted argument,
    because the call may change it in place.
    """
    tainted = {"candidate", entry_point}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            tainted |= {argument.arg for argument in arguments}
    size = 0
    while size != len(tainted):
        size = len(tainted)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                if tainted & _names(node, ast.Load):
                    tainted.add(node.name)
            elif isinstance(
                node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Expr, ast.Assert, ast.withitem)
            ):
                if tainted & _names(node, ast.Load):
                    tainted |= _names(node, ast.Store) | _mutable_arguments(node)
            elif isinstance(node, (ast.For, ast.comprehension)) and tainted & _names(node.iter, ast.Load):
                tainted |= _names(node.target, ast.Store)
    return tainted


def _mutable_arguments(node: ast.AST) -> set[str]:
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
    arguments = [argument for call in calls for argument in [*call.args, *[word.value for word in call.keywords]]]
    return {argument.id for argument in arguments if isinstance(argument, ast.Name)}


class _Instrument(ast.NodeTransformer):
    def __init__(self, tainted: set[str], defined: set[str]) -> None:
        self.tainted, self.defined = tainted, defined
        self.guarding = True  # False where the test expects an exception of the candidate
        self.dependent = False  # True inside a branch or loop whose condition depends on the candidate
        self.guards = 0

    # ------------------------------------------------------------------------------------------------------ asserts
    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._case(node, node.test, ast.unparse(node.test))

    def _case(self, node: ast.stmt, test: ast.expr, source: str) -> ast.stmt:
        """``try: hook.case(source, counts, lambda-free test) except Exception as e: hook.error(source, e)``"""
        counts = self._touches(test) or self.dependent
        begin = ast.Expr(_call("begin"))
        verdict = ast.Expr(_call("verdict", _constant(source), _constant(counts), test))
        failed = ast.Expr(_call("error", _constant(source), ast.Name("__error", ast.Load())))
        return ast.copy_location(_try([begin, verdict], [failed]), node)

    def _touches(self, node: ast.AST) -> bool:
        return bool(self.tainted & _names(node, ast.Load))

    def _is_assert_call(self, node: ast.stmt) -> bool:
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._touches(node)):
            return False
        function = node.value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name.startswith("assert") and name not in self.defined

    # --------------------------------------------------------------------------------------------------- statements
    def visit_Module(self, node: ast.Module) -> ast.Module:
        node.body = self._block(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Asserts of helpers count; their other statements run unchanged, so that an exception reaches the caller."""
        saved = self.guarding, self.dependent
        self.guarding, self.dependent = node.name == "check", False
        node.body = self._block(node.body)
        self.guarding, self.dependent = saved
        return node

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [new for node in body for new in self._statement(node)]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.Assert):
            return [self.visit_Assert(node)]
        if self._is_assert_call(node):
            assert isinstance(node, ast.Expr)
            source = ast.unparse(node.value)
            return [self._case(node, ast.Tuple([node.value, _constant(1)], ast.Load()), source)]
        if isinstance(node, (ast.If, ast.While, ast.For, ast.With, ast.Try)):
            number = _count_asserts(node)
            names = sorted(_names(node, ast.Store))
            return self._guard(self._compound(node), number, names)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete)):
            return self._guard(node, 0, sorted(_names(node, ast.Store)))
        return [self.visit(node)]

    def _compound(self, node: ast.If | ast.While | ast.For | ast.With | ast.Try) -> ast.stmt:
        saved = self.guarding, self.dependent
        if isinstance(node, (ast.If, ast.While)):
            self.dependent |= self._touches(node.test)
        elif isinstance(node, ast.For):
            self.dependent |= self._touches(node.iter)
        if isinstance(node, ast.With) or (isinstance(node, ast.Try) and node.handlers):
            self.guarding = False
        node.body = self._block(node.body)
        self.guarding = saved[0]
        if isinstance(node, ast.Try):
            self.dependent |= any(self._touches(child) for child in node.body)
            for handler in node.handlers:
                handler.body = self._block(handler.body)
            node.finalbody = self._block(node.finalbody)
        if not isinstance(node, ast.With):
            node.orelse = self._block(node.orelse)
        self.guarding, self.dependent = saved
        return node

    def _guard(self, node: ast.stmt, number: int, names: list[str]) -> list[ast.stmt]:
        if not self.guarding:
            return [node]
        self.guards += 1
        mark = f"__mark{self.guards}"
        start = ast.Assign([ast.Name(mark, ast.Store())], _call("mark"))
        arguments = [ast.Name("__error", ast.Load()), ast.Name(mark, ast.Load()), _constant(number), _constant(names)]
        handler: list[ast.stmt] = [ast.Expr(_call("skipped", *arguments))]
        for name in names:
            forget = ast.Delete([ast.Name(name, ast.Del())])
            handler.append(_try([forget], [ast.Pass()], "NameError", None))
        return [start, ast.copy_location(_try([node], handler), node)]


def _count_asserts(node: ast.AST, inside: bool = False) -> int:
    """Number of asserts in a statement, except those of exception handlers and, unless ``inside``, of functions."""
    if isinstance(node, ast.ExceptHandler) or (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not inside):
        return 0
    below = sum(_count_asserts(child, inside) for child in ast.iter_child_nodes(node))
    return isinstance(node, ast.Assert) + below


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(HOOK, ast.Load()), method, ast.Load()), list(arguments), [])


def _constant(value: object) -> ast.expr:
    if isinstance(value, list):
        return ast.List([ast.Constant(item) for item in value], ast.Load())
    return ast.Constant(value)  # type: ignore[arg-type]


def _try(
    body: list[ast.stmt], handler: list[ast.stmt], error: str = "Exception", name: str | None = "__error"
) -> ast.Try:
    return ast.Try(body, [ast.ExceptHandler(ast.Name(error, ast.Load()), name, handler)], [], [])
