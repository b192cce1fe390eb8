"""Whether a module uses the result of a function, judged by its syntax tree.

A name is *live* if its value can reach something that matters: a returned or yielded value, a condition, a loop, an
argument of a call, an attribute or an item. A value that is dropped, or bound only to names that are not live, is dead.
Scopes are not distinguished, so in doubt a name counts as live. Code that can never run (``if False``, statements
after ``return``) is ignored.
"""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from magrpo.python_source import list_nodes, name_import
from magrpo.rewards.program import find_functions, parse_source, walk_own_scope

Use = Literal["none", "dropped", "used"]

_TERMINAL = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_STATEMENTS = ast.Return | ast.Assign | ast.AnnAssign | ast.Pass | ast.Expr
_CONTAINERS = ast.Tuple | ast.List | ast.Dict | ast.Set | ast.Starred
_PARTS = ast.Yield | ast.Lambda | ast.arguments | ast.arg | ast.Name | ast.Constant | ast.expr_context
_CARRYING = _STATEMENTS | _CONTAINERS | _PARTS
"""Nodes that pass values on without changing them."""
# Builtins that prepare an argument without doing work on it.
_CONVERSIONS = frozenset({"len", "list", "tuple"})
# Builtins with an effect that tests can see.
_IMPURE = frozenset({"setattr", "delattr", "exec", "eval", "next"})


@lru_cache(maxsize=4096)
def classify_use(source: str, name: str, bound: str = "") -> Use:
    """How the module uses ``name``, a function of the partner. ``bound``: a name whose value matters in any case.

    ``none``: no code that can run mentions it, or the module binds the name itself. ``dropped``: no result can matter,
    but what the function does to its arguments may. ``used``: a result can matter.
    """
    sinks = _trace_values(parse_source(source))
    is_read = any(load.id == name for load in _list_loads(sinks))
    if not is_read or any(_binds(node, name) for node in sinks):
        return "none"
    return "used" if name in _find_live_names(sinks, bound) else "dropped"


@lru_cache(maxsize=4096)
def assigns_forwarding(source: str, name: str, to: str) -> bool:
    """Whether ``name`` is no function, but assigned ``to`` wrapped by a function of others, or a lambda that calls it.

    ``partial`` wraps, for example. The lambda passes only names and constants to ``to``.
    """
    tree = parse_source(source)
    own = _list_definitions(tree.body)
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and _binds(node.targets[0], name)]
    match values[-1:]:
        case _ if name in own:
            return False
        case [ast.Lambda(body=ast.Call(func=ast.Name(id=called)) as call)]:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            return called == to and all(isinstance(value, ast.Name | ast.Constant) for value in given)
        case [ast.Call(func=function, args=[ast.Name(id=wrapped), *_])]:
            return wrapped == to and not (isinstance(function, ast.Name) and function.id in own)
    return False


@lru_cache(maxsize=4096)
def does_nothing(source: str, name: str) -> bool:
    """Whether the function ``name`` performs no operation, or reads none of its parameters.

    It then returns an argument or a constant, perhaps in a container. Generators, and functions that define functions,
    count as reading their parameters.
    """
    function = find_functions(parse_source(source), name)[-1]
    nodes = [node for statement in function.body for node in list_nodes(statement)]
    if all(isinstance(node, _CARRYING) for node in nodes):
        return True
    read = {load.id for load in _list_loads(nodes)}
    works_later = (ast.Yield, ast.YieldFrom, ast.Lambda, ast.FunctionDef)
    return not read & _list_parameters(function) and not any(isinstance(node, works_later) for node in nodes)


@lru_cache(maxsize=4096)
def packs_lists(source: str, name: str) -> bool:
    """Whether the function ``name`` returns only list displays, such as ``[answer, 0]`` or ``[answer] * 3``."""
    function = find_functions(parse_source(source), name)[-1]
    returned = [node.value for node in walk_own_scope(function) if isinstance(node, ast.Return)]
    displays = [value.left if isinstance(value, ast.BinOp) else value for value in returned]
    return all(isinstance(value, ast.List) for value in displays)


@lru_cache(maxsize=4096)
def find_forwarding_call(source: str, name: str, to: str) -> str:
    """The first call of ``to``, in the function ``name``, with nothing but its parameters and constants; else empty.

    They may be packed or measured (``aux(list(xs), len(xs), -1)``). Names that the function does not assign, and that
    are no functions or classes of the module, are constants.
    """
    tree = parse_source(source)
    functions = find_functions(tree, name)
    if not functions:
        return ""
    function = functions[-1]
    nodes = list_nodes(function)
    parameters = _list_parameters(function)
    computed = _list_definitions(list_nodes(tree)) | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == to):
            continue
        given = [part for argument in (*node.args, *node.keywords) for part in _walk_argument(argument)]
        names = {part.id for part in given if isinstance(part, ast.Name)} - _CONVERSIONS
        if names & parameters and not (names - parameters) & computed and all(map(_prepares, given)):
            return ast.get_source_segment(source, node) or ""
    return ""


def _prepares(node: ast.AST) -> bool:
    """Whether the node of an argument passes values on, or does too little with them to be work."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _CONVERSIONS
        case ast.UnaryOp(operand=ast.Constant()) | ast.BinOp(left=ast.Constant(), right=ast.Constant()):
            return True
    return isinstance(node, _CARRYING | ast.keyword | ast.operator | ast.unaryop)


def _list_definitions(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _list_parameters(function: ast.FunctionDef) -> set[str]:
    return {node.arg for node in list_nodes(function.args) if isinstance(node, ast.arg)}


def _walk_argument(node: ast.AST) -> Iterator[ast.AST]:
    """The node and the nodes below it, but none below a node that does work, for the sake of speed."""
    waiting = [node]
    for part in waiting:
        yield part
        if _prepares(part):
            waiting += ast.iter_child_nodes(part)


@dataclass(frozen=True, slots=True, eq=False)
class ValueSink:
    """The place where a value ends up: in ``names``, and in the sink of the expression around it, ``outer``."""

    names: frozenset[str]
    outer: "ValueSink | None" = None


_DROPPED = ValueSink(frozenset())


def _trace_values(tree: ast.Module) -> dict[ast.AST, ValueSink | None]:
    """The sink of each node that can run: None if its value matters, a sink without names if its value is dropped."""
    sinks: dict[ast.AST, ValueSink | None] = {}
    waiting: list[ast.AST] = [tree]
    for node in waiting:  # children are appended during the loop
        for field, value in ast.iter_fields(node):
            children = _list_runnable(node, field, value) if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    sinks[child] = _find_sink(child, node, sinks.get(node))
                    waiting.append(child)
    return sinks


def _list_runnable(node: ast.AST, field: str, children: list[ast.AST]) -> list[ast.AST]:
    """The statements of a block up to the first one that leaves it; none if the block's condition is never met."""
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant) and field in ("body", "orelse"):
        is_never_met = bool(node.test.value) == (field == "orelse")
        if is_never_met:
            return []
    leaves = (i for i, child in enumerate(children) if isinstance(child, _TERMINAL))
    return children[: next(leaves, len(children)) + 1]


def _binds(node: ast.AST, name: str) -> bool:
    """Whether the node defines, imports, assigns or deletes the name or an attribute of it."""
    match node:
        case (
            ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound)
            | ast.ExceptHandler(name=bound) | ast.MatchAs(name=bound) | ast.MatchStar(name=bound)
            | ast.MatchMapping(rest=bound) | ast.arg(arg=bound) | ast.Name(id=bound, ctx=ast.Store() | ast.Del())
            | ast.Attribute(value=ast.Name(id=bound), ctx=ast.Store() | ast.Del())
        ):  # fmt: skip
            return bound == name
        case ast.alias():
            return name_import(node) == name
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return name in names
    return False


def _find_live_names(sinks: dict[ast.AST, ValueSink | None], bound: str = "") -> set[str]:
    """The live names: ``bound``, names read in a place that matters, and names copied into live ones."""
    loads = _list_loads(sinks)
    feeds: dict[str | ValueSink, list[str | ValueSink]] = defaultdict(list)  # what becomes live with the key
    for sink in {sink for sink in sinks.values() if sink}:
        for holder in sink.names:
            feeds[holder].append(sink)
        if sink.outer:
            feeds[sink.outer].append(sink)
    for load in loads:
        if value_sink := sinks[load]:
            feeds[value_sink].append(load.id)
    live: dict[str | ValueSink, None] = dict.fromkeys([bound, *(load.id for load in loads if sinks[load] is None)])
    waiting = list(live)
    for source in waiting:
        new = dict.fromkeys(fed for fed in feeds[source] if fed not in live)
        live |= new
        waiting += new
    return {name for name in live if isinstance(name, str)}


def _find_sink(node: ast.AST, parent: ast.AST, parent_sink: ValueSink | None) -> ValueSink | None:
    """The sink of the value of a node, as in :func:`_trace_values`, or of the expressions of a statement."""
    match node:
        case ast.Expr():
            return _DROPPED
        case ast.If(body=body, orelse=orelse) if all(isinstance(child, ast.Pass) for child in (*body, *orelse)):
            return _DROPPED
        case ast.Assign(targets=targets):
            return _target_names(targets)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return _target_names([target])
        case ast.stmt():
            return None
    match parent:
        case ast.Yield() | ast.YieldFrom():
            return None
        case ast.Call(func=function) if node is not function and not _is_pure(parent):
            return None
        case ast.NamedExpr(target=ast.Name(id=name), value=value) if node is value and parent_sink is not None:
            return ValueSink(frozenset({name}), parent_sink)
    return parent_sink


def _list_loads(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    return [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def _target_names(targets: Iterable[ast.expr]) -> ValueSink | None:
    """The sink of an assignment to these targets; None if one is an attribute or an item."""
    names: set[str] = set()
    waiting = list(targets)
    for target in waiting:
        match target:
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                waiting += parts
            case ast.Starred(value=part):
                waiting.append(part)
            case ast.Name(id=name):
                names.add(name)
            case _:
                return None
    return ValueSink(frozenset(names))


def _is_pure(call: ast.Call) -> bool:
    """Whether the call is of a builtin, by name, without an effect that tests can see."""
    return isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id) and call.func.id not in _IMPURE
