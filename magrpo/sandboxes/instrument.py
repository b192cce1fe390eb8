"""Instruments tests for the sandbox: makes every ``assert`` a separate case, also in tests given as input/output pairs.

The rules, also in ``docs/sandbox.md``:

* An ``assert`` is one case each time it runs. It passes if its expression is true.
* A true ``assert`` is no case if neither its expression nor its enclosing conditions touch the candidate or a value
  that came from it (``assert True``). A false one always is a case.
* A statement that raises outside an ``assert`` does not end the test: the names it would have set become undefined, so
  that an ``assert`` that needs them fails, and the test continues with the next statement or round of a loop. Asserts
  in a loop or branch that could not be entered count as not run, once each.
* The body of a ``try`` with handlers and of a ``with`` runs unchanged: there the test expects an exception. Where a
  handler names its class or asserts something, or in ``raises`` and ``suppress``, an ``assert`` may raise it too; the
  asserts that it skips are no cases, unless an assert of the handler fails. A handler that only hides it hides nothing.
* A call of a function named ``assert...`` that the test does not define (``np.testing.assert_allclose``) is an assert.

A failing program therefore never has fewer cases than a correct one.
"""

import ast
import base64
import builtins
import itertools
import marshal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from magrpo.python_source import MAX_DEPTH, check_depth, compile_tree, list_nodes, name_import, parse_python
from magrpo.sandboxes.jail.recorder import HOOK

Compound = ast.If | ast.While | ast.For | ast.With | ast.Try | ast.TryStar | ast.Match

BROAD = {"AssertionError", "BaseException", "Exception"}
"""Classes of exceptions too general to count as expected where a handler names them."""
_TYPE_PARAMETERS = {"TypeVar", "ParamSpec", "TypeVarTuple"}  # classes of ``ast`` from Python 3.12 on


@dataclass(frozen=True, slots=True)
class Instrumented:
    """A test ready to run."""

    code: str  # a marshalled code object in base64
    needs: tuple[str, ...]  # names that the test reads and only the program can define


@lru_cache(maxsize=4096)
def instrument_test(test: str, entry_point: str) -> Instrumented:
    """Compile a test into the code that the tester runs.

    ``test`` either defines ``check(candidate)`` or is a list of asserts that call ``entry_point`` by its name.

    Raises:
        SyntaxError: the test is not Python, or nested too deeply.
    """
    tree = parse_python(test, "<test>")
    check_depth(tree, MAX_DEPTH)
    needs = _import_used_modules(tree, _find_needed_names(tree, entry_point))
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    asserts = [node for node in list_nodes(tree) if isinstance(node, ast.Assert)]
    asserted = {name for node in asserts for name in _list_names(node, ast.Load)}
    rewriter = _Rewriter(_find_tainted_names(tree, entry_point), _list_definitions(tree), asserted, itertools.count(1))
    tree.body = rewriter.rewrite_block(tree.body)
    if has_check:
        tree.body += parse_python("check(candidate)").body
    code = marshal.dumps(compile_tree(tree, "<test>"))
    return Instrumented(base64.b64encode(code).decode(), needs)


def _find_needed_names(tree: ast.Module, entry_point: str) -> tuple[str, ...]:
    known = {"candidate", entry_point, "__name__", *dir(builtins)}
    known |= _list_definitions(tree) | _list_names(tree, ast.Store)
    for node in list_nodes(tree):
        match node:
            case ast.alias():
                known.add(name_import(node))
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                known.add(name)
    return () if "*" in known else tuple(sorted(_list_names(tree, ast.Load) - known))


def _import_used_modules(tree: ast.Module, needs: tuple[str, ...]) -> tuple[str, ...]:
    """Import modules of the standard library whose members the test uses, but which only the program imports.

    Returns the other names of ``needs``.
    """
    nodes = list_nodes(tree)
    loads = [node.id for node in nodes if isinstance(node, ast.Name)]
    owners = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    names = [name for name in needs if name in sys.stdlib_module_names and owners.count(name) == loads.count(name)]
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    start = tree.body.index(futures[-1]) + 1 if futures else 0
    tree.body[start:start] = parse_python("".join(f"import {name}\n" for name in names)).body
    return tuple(name for name in needs if name not in names)


def _list_definitions(tree: ast.Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in list_nodes(tree) if isinstance(node, kinds)}


def _list_names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that are read, or bound, anywhere in a node."""
    nodes = list_nodes(node)
    names = {item.id for item in nodes if isinstance(item, ast.Name) and isinstance(item.ctx, context)}
    return names.union(*map(_list_captured_names, nodes)) if context is ast.Store else names


def _list_captured_names(node: ast.AST) -> set[str]:
    """The names that a pattern or a type parameter binds, which stand in the tree as texts."""
    match node:
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return {name}
    return {node.name} if type(node).__name__ in _TYPE_PARAMETERS else set()  # type: ignore[attr-defined]


def _list_bound_names(node: ast.stmt) -> set[str]:
    """The names that a statement binds in its own scope: not the variables of comprehensions and inner functions."""
    names: set[str] = set()
    rest: list[ast.AST] = [node]
    while rest:
        item = rest.pop()
        match item:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                continue
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                walruses = [inner for inner in list_nodes(item) if isinstance(inner, ast.NamedExpr)]
                names |= {walrus.target.id for walrus in walruses}
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
        names |= _list_captured_names(item)
        rest += ast.iter_child_nodes(item)
    return names


def _find_tainted_names(tree: ast.Module, entry_point: str) -> set[str]:
    """Find names that may hold the candidate or a value that depends on it: a fixed point over the test's statements.

    The parameters of the test's own functions count as tainted; imported names do not.
    """
    tainted = {"candidate", entry_point}
    imported: set[str] = set()
    flows: list[tuple[set[str], set[str]]] = []  # names that are read, and names that depend on them
    for node in list_nodes(tree):
        match node:
            case ast.alias():
                imported.add(name_import(node))
            case ast.arg(arg=name):
                tainted.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                flows.append((_list_names(node, ast.Load), {name}))
            case ast.Try(body=body) | ast.TryStar(body=body):
                flows.append((_list_names(ast.Module(body, []), ast.Load), _list_changed_names(node)))
            case ast.If(test=source) | ast.While(test=source) | ast.Match(subject=source) | ast.For(iter=source):
                flows.append((_list_names(source, ast.Load), _list_changed_names(node)))
            case ast.comprehension(target=target, iter=source):
                flows.append((_list_names(source, ast.Load), _list_names(target, ast.Store)))
            case (
                ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr() | ast.Expr() | ast.Assert()
                | ast.With() | ast.AsyncWith()
            ):  # fmt: skip
                flows.append((_list_names(node, ast.Load), _list_changed_names(node)))
    imported -= {"candidate", entry_point}
    size = 0
    while size != len(tainted):
        size = len(tainted)
        for sources, targets in flows:
            if not tainted.isdisjoint(sources):
                tainted |= targets - imported
    return tainted


def _list_changed_names(node: ast.AST) -> set[str]:
    """List names that ``node`` may set, or whose values it may change: arguments of calls, owners of methods, items."""
    changed = _list_names(node, ast.Store)
    for item in list_nodes(node):
        match item:
            case ast.Call(func=function, args=arguments, keywords=keywords):
                for argument in [*arguments, *keywords]:
                    changed |= _list_names(argument, ast.Load)
                if isinstance(function, ast.Attribute):
                    changed |= _list_names(function.value, ast.Load)
            case ast.Attribute(ctx=ast.Store(), value=owner) | ast.Subscript(ctx=ast.Store(), value=owner):
                changed |= _list_names(owner, ast.Load)
            case ast.ExceptHandler(name=str(name)):
                changed.add(name)
    return changed


@dataclass(frozen=True, slots=True)
class _Rewriter(ast.NodeTransformer):
    """Rewrites the statements of one block; an inner block to which other rules apply gets a rewriter of its own."""

    tainted: set[str]
    defined: set[str]
    asserted: set[str]  # names that an assert reads
    numbers: Iterator[int]  # of marks, shared by all blocks
    guarding: bool = True  # False where the test expects an exception of the candidate
    dependent: bool = False  # True inside a branch or loop whose condition depends on the candidate
    expecting: bool = False  # True where asserts raise what the test expects

    def rewrite_block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [new for node in body for new in self._rewrite_statement(node)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Rewrite the asserts of a helper; its other statements stay as they are: their exceptions reach the caller."""
        inside = replace(self, guarding=node.name == "check", dependent=False, expecting=False)
        node.body = inside.rewrite_block(node.body)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._make_case(node, node.test, ast.unparse(node.test))

    def _make_case(self, node: ast.stmt, test: ast.expr, source: str) -> ast.stmt:
        counts = self._touches(test) or self.dependent
        attempt = parse_python(f"""
try:
    {HOOK}.begin()
    {HOOK}.verdict({source!r}, {counts})
except BaseException as __error:
    {HOOK}.error({source!r}, __error, {self.expecting})
""").body[0]
        _, verdict = attempt.body  # type: ignore[attr-defined]
        verdict.value.args.append(test)
        return ast.copy_location(attempt, node)

    def _touches(self, node: ast.AST) -> bool:
        return bool(self.tainted & _list_names(node, ast.Load))

    def _depend_on(self, *nodes: ast.AST) -> Self:
        """Return the rewriter of a block that ``nodes`` decide whether to enter."""
        return replace(self, dependent=self.dependent or any(map(self._touches, nodes)))

    def _rewrite_statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Expr(value=ast.Constant()):  # only a docstring may stand above a __future__ import
                return [node]
            case ast.Expr(value=ast.Call() as call) if self._is_assert(call):
                return [self._make_case(node, ast.Tuple([call, ast.Constant(1)], ast.Load()), ast.unparse(call))]
            case ast.If() | ast.While() | ast.For() | ast.With() | ast.Try() | ast.TryStar() | ast.Match():
                number = _count_asserts(node)
                names = _list_bound_names(node)
                return self._guard(self._rewrite_compound(node), number, names)
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Expr() | ast.Delete():
                return self._guard(node, 0, _list_bound_names(node))
            case ast.FunctionDef(decorator_list=[_, *_]) | ast.ClassDef():
                return self._guard(self.visit(node), 0, {node.name})
        return [self.visit(node)]

    def _is_assert(self, call: ast.Call) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        return self._touches(call) and name.startswith("assert") and name not in self.defined

    def _rewrite_compound(self, node: Compound) -> ast.stmt:
        match node:
            case ast.If(test=condition) | ast.While(test=condition) | ast.For(iter=condition):
                inside = self._depend_on(condition)
                node.body = inside.rewrite_block(node.body)
                node.orelse = inside.rewrite_block(node.orelse)
            case ast.Match(subject=condition):
                inside = self._depend_on(condition)
                for choice in node.cases:
                    choice.body = inside.rewrite_block(choice.body)
            case ast.With(items=items):
                expecting = self.expecting or any(_expects_exception(item.context_expr) for item in items)
                node.body = replace(self, guarding=False, expecting=expecting).rewrite_block(node.body)
            case ast.Try(handlers=[]):
                after = self._depend_on(*node.body)
                node.body = self.rewrite_block(node.body)
                node.finalbody = after.rewrite_block(node.finalbody)
            case ast.Try() | ast.TryStar():
                self._rewrite_handled(node)
        return node

    def _rewrite_handled(self, node: ast.Try | ast.TryStar) -> None:
        """Rewrite a ``try`` with handlers."""
        number = sum(map(_count_asserts, node.body))
        inside = [item for child in [*node.body, *node.orelse] for item in list_nodes(child)]
        must_raise = any(isinstance(item, ast.Raise) or _is_false_assert(item) for item in inside)
        hiding = [not (must_raise or self._expects_exception(handler)) for handler in node.handlers]
        after = self._depend_on(*node.body)
        body = replace(self, guarding=False, expecting=not all(hiding)).rewrite_block(node.body)
        mark = f"__mark{next(self.numbers)}"
        node.body = [*parse_python(f"{mark} = {HOOK}.mark()").body, *body]
        for handler, hides in zip(node.handlers, hiding, strict=True):
            handled = after.rewrite_block(handler.body)
            settle = parse_python(f"{HOOK}.settle({mark}, {number}, {hides})").body
            handler.body = [ast.Try(handled, [], [], settle)] if number else handled
            if handler.type is None or "BaseException" in _list_names(handler.type, ast.Load):
                handler.body = [*parse_python(f"{HOOK}.pass_on()").body, *handler.body]
        node.orelse = after.rewrite_block(node.orelse)
        node.finalbody = after.rewrite_block(node.finalbody)

    def _expects_exception(self, handler: ast.ExceptHandler) -> bool:
        """Whether a handler names a class that is not broad, asserts something, or changes a value an assert reads."""
        is_broad = handler.type is None or _list_names(handler.type, ast.Load) & BROAD
        asserts = any(isinstance(item, ast.Assert) for item in list_nodes(handler))
        return not is_broad or asserts or bool(self.asserted & _list_changed_names(handler))

    def _guard(self, node: ast.stmt, number: int, names: set[str]) -> list[ast.stmt]:
        """Let the test go on if a statement with ``number`` asserts raises; the ``names`` it sets become undefined."""
        if not self.guarding:
            return [node]
        mark = f"__mark{next(self.numbers)}"
        guarded = [f"{mark} = {HOOK}.mark()", "try:", "    pass", "except BaseException as __error:"]
        guarded.append(f"    {HOOK}.skipped(__error, {mark}, {number}, {sorted(names)})")
        for name in sorted(names):
            guarded += ["    try:", f"        del {name}", "    except NameError:", "        pass"]
        start, attempt = parse_python("\n".join(guarded)).body
        assert isinstance(attempt, ast.Try)
        attempt.body = [node]
        return [start, ast.copy_location(attempt, node)]


def _expects_exception(context: ast.expr) -> bool:
    """Whether a ``with`` statement expects an exception; ``suppress`` of a broad class rather hides one."""
    text = ast.unparse(context).lower()
    return "raises" in text or ("suppress" in text and not _list_names(context, ast.Load) & BROAD)


def _is_false_assert(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value


def _count_asserts(node: ast.AST) -> int:
    """Count the asserts in a statement, except those in exception handlers and functions.

    Of branches that exclude each other only the one with most asserts counts.
    """

    def count(nodes: Iterable[ast.AST]) -> int:
        return sum(map(_count_asserts, nodes))

    match node:
        case ast.ExceptHandler() | ast.FunctionDef() | ast.ClassDef():
            return 0
        case ast.If(body=body, orelse=orelse):
            return max(count(body), count(orelse))
        case ast.Match(cases=cases):
            return max(count(case.body) for case in cases)
    return isinstance(node, ast.Assert) + count(ast.iter_child_nodes(node))
