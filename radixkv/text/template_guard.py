"""Rewrites templates so that what takes time or memory pays for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

_MAX_FREE_TERMS = 8
"""An output adds up to this many values without paying: the sum is little longer than they are, and is not kept."""
_UNPAID_STEPS = 16
"""A rendering takes an operation for so many statements and comparisons."""
_MAX_COMPARISONS = 1000
"""Most comparisons of a statement."""


class TemplateGuard(NodeTransformer):
    """Puts guards around what can take long or make a long value, and one before every few statements.

    A guard is a filter with the name of a class of nodes.
    """

    def __init__(self) -> None:
        self._n_unpaid = 0
        """Most statements and comparisons that a rendering may have done since the last guard, at this place."""

    def visit(self, node: nodes.Node, *arguments: Any, **options: Any) -> Any:
        """Returns what replaces the node: for a statement a list, with a guard before it where one is due."""
        if not isinstance(node, nodes.Stmt):
            return super().visit(node, *arguments, **options)
        n_steps = 1 + _n_comparisons(node)
        if n_steps > _MAX_COMPARISONS:
            raise TemplateSyntaxError(f"a statement has more than {_MAX_COMPARISONS} comparisons", node.lineno)
        guards: list[nodes.Node] = []
        if self._n_unpaid + n_steps > _UNPAID_STEPS:
            guards.append(nodes.ExprStmt(_guarded(nodes.Stmt, nodes.Const(None)), lineno=node.lineno))
            self._n_unpaid = 0
        self._n_unpaid += n_steps
        n_before = self._n_unpaid
        replacement = self._visit_if(node) if isinstance(node, nodes.If) else super().visit(node)
        self._n_unpaid = max(n_before, self._n_unpaid)  # a guard within it may not have been reached
        return [*guards, replacement]

    def get_visitor(self, node: nodes.Node) -> Callable[..., nodes.Node] | None:
        """Returns the method that replaces the node; None leaves it as it is."""
        match node:
            case nodes.For():
                return self._guard_loop
            case nodes.Output():
                return self._guard_output
            case nodes.AssignBlock():
                return self._guard_block
            case nodes.Mul() | nodes.Mod() | nodes.Pow() | nodes.Div() | nodes.FloorDiv():
                return self._guard_operator
            case nodes.Getitem(arg=nodes.Slice()):
                return self._guard_slice
            case nodes.Add() | nodes.Concat():
                return self._guard_result
            case nodes.List(items=[_, *_]) | nodes.Dict(items=[_, *_]) | nodes.Tuple(items=[_, *_], ctx="load"):
                return self._guard_result  # nesting the same values again and again makes a long text
        return None

    def _guard_loop(self, node: nodes.For) -> nodes.Node:
        otherwise, node.else_ = node.else_, []
        n_before = self._n_unpaid
        self.generic_visit(node)
        node.else_ = self._visit_branch(otherwise, n_before)
        node.iter = _guarded(nodes.For, cast("nodes.Expr", node.iter))
        return node

    def _visit_if(self, node: nodes.If) -> nodes.If:
        n_before = self._n_unpaid
        for branch in (node, *node.elif_):
            branch.test = cast("nodes.Expr", super().visit(branch.test))
            branch.body = self._visit_branch(branch.body, n_before)
        node.else_ = self._visit_branch(node.else_, n_before)
        return node

    def _visit_branch(self, body: list[nodes.Node], n_before: int) -> list[nodes.Node]:
        """Visits statements that may follow ``n_before`` unpaid steps, instead of those visited last."""
        n_others, self._n_unpaid = self._n_unpaid, n_before
        visited = [part for statement in body for part in self.visit(statement)]
        self._n_unpaid = max(n_others, self._n_unpaid)
        return visited

    def _guard_output(self, node: nodes.Output) -> nodes.Node:
        # Short sums, the most frequent expressions of templates, need no guard.
        node.nodes = [
            self._guard_terms(child) if _n_terms(child) <= _MAX_FREE_TERMS else self.visit(child)
            for child in node.nodes
        ]
        return node

    def _guard_terms(self, node: nodes.Expr) -> nodes.Expr:
        if not isinstance(node, nodes.Add):
            return cast("nodes.Expr", self.visit(node))
        node.left, node.right = self._guard_terms(node.left), self._guard_terms(node.right)
        return node

    def _guard_block(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _guarded(nodes.Add, node.filter)
        return node

    def _guard_result(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _guarded(nodes.Add, node)

    def _guard_slice(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _guarded(nodes.Slice, node)

    def _guard_operator(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _guarded(type(node), node.left, node.right)


def _guarded(guard: type[nodes.Node], value: nodes.Expr | None, *arguments: nodes.Expr) -> nodes.Filter:
    """Returns the expression that applies the guard to a value; None is the text of a block."""
    lineno = 0 if value is None else value.lineno
    return nodes.Filter(value, guard.__name__, list(arguments), [], None, None, lineno=lineno)


def _n_terms(node: nodes.Expr) -> int:
    return _n_terms(node.left) + _n_terms(node.right) if isinstance(node, nodes.Add) else 1


def _n_comparisons(node: nodes.Node) -> int:
    """Returns the comparisons and tests in the expressions of a statement, without those of statements in it."""
    rest = [child for child in node.iter_child_nodes() if not isinstance(child, nodes.Stmt)]
    rest += [branch.test for branch in node.elif_] if isinstance(node, nodes.If) else []
    n_comparisons = 0
    while rest:
        part = rest.pop()
        n_comparisons += isinstance(part, nodes.Operand | nodes.Test)
        rest += part.iter_child_nodes()
    return n_comparisons
