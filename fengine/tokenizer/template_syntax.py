"""The syntax of chat templates: jinja2's with transformers' `generation`, and the sandbox's checks written in."""

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Budgeted(NodeTransformer):
    """Writes the environment's checks into a template: of loop turns, and of values that are made or compared."""

    @staticmethod
    def _checked(name: str, arguments: list[Any], line: int) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None).set_lineno(line)

    def _turn(self, line: int, turns: int = 1) -> Any:
        return self._checked("turn", [nodes.Const(turns)], line)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._turn(node.lineno), node.test).set_lineno(node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._turn(node.lineno)).set_lineno(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._turn(node.lineno, 10)).set_lineno(node.lineno))
        return node

    visit_CallBlock = visit_Macro  # type: ignore[assignment]
    visit_Block = visit_Macro  # type: ignore[assignment]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._checked("join", node.nodes, node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the names that a tuple is taken apart into
            return node
        return self._checked("sized", [node], node.lineno)

    visit_Dict = visit_Tuple = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for part in (node, *node.ops):
            part.expr = self._checked("compared", [part.expr], node.lineno)
        return node


def parameters(tree: nodes.Template, undeclared: set[str]) -> set[str]:
    """Of the names that a template reads before it sets them, those that a caller may set. Pure.

    One that the template sets itself is its own, unless it asks whether it is defined.
    """
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name)
    }
    return undeclared - (stored - asked)
