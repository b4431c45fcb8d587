"""A Jinja sandbox for chat templates that bounds the time and the memory of a rendering.

A rendering has a budget of operations and a time limit. An iteration of a loop and a call each take one operation.
What can make a long value from short ones is paid for by an upper bound of the result's size, before it is made.
"""

from __future__ import annotations

import datetime
import json
import operator
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

from radixkv.text.template_budget import SIZE_PER_OPERATION, OperationBudget, depth, n_parts, pay_for_length
from radixkv.text.template_guard import TemplateGuard

BUDGET = "operations left"
"""The template variable with the ``OperationBudget``. No template can name it, because of the space."""

_CHEAP_FILTERS = frozenset(
    "abs attr capitalize count d default e escape first float int items last length list lower map reject "
    "rejectattr reverse safe select selectattr title trim upper".split()
)
"""Filters that take time linear in their arguments; all others pay for the product of their arguments' sizes."""
_CHEAP_METHODS = frozenset(
    "capitalize casefold copy count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric "
    "isspace istitle isupper items keys lower lstrip partition removeprefix removesuffix rfind rindex rpartition "
    "rsplit rstrip split splitlines startswith strip swapcase title upper values".split()
)
"""Methods of texts and containers that take time linear in their arguments, too."""
_INSTANT_METHODS = frozenset("endswith get items keys startswith values".split())
"""Methods that take no time worth counting."""
_BACKWARD_METHODS = frozenset("rfind rindex rpartition rsplit".split())
"""Methods that look for a text from the end, for which Python takes the product of the lengths."""
_MAX_FREE_CHARACTERS = 1000
"""A cheap filter without arguments is free for texts of up to this length."""
_SLOW_FILTERS = frozenset("pprint striptags tojson urlize wordwrap".split())
"""Filters that take more time than the product of their arguments' sizes."""
_MAX_DIGITS = 1000
"""Most digits to which a template may round."""
_WIDTHS = frozenset("batch center expandtabs indent ljust rjust round slice to_bytes tojson wordwrap zfill".split())
"""Filters and methods that make a value as large as the number that they get."""
_MAX_DATE_FORMAT_CHARACTERS = 1000
_METHODS = (BuiltinMethodType, MethodType)
_NUMBER = re.compile(r"\d+")


class TemplateRaised(jinja2.TemplateError):
    """An error that the template itself raises."""


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the filters and functions of Transformers, whose renderings pay from their budget."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationExtension, loopcontrols])
        self.filters |= {"tojson": _to_json, "sum": _sum, "round": _round}
        self.filters |= {
            name: _cheap(name, function) if name in _CHEAP_FILTERS else _paid(name, function)
            for name, function in self.filters.items()
        }
        self.tests |= {"divisibleby": _paid_division(lambda left, right: left % right == 0)}
        self.filters |= {node.__name__: function for node, function in _GUARDS.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _SafeNamespace,
        }

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(TemplateGuard().visit(source), *arguments, **options)

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **values: Any) -> Any:  # noqa: N805
        """Makes a call of the template, if the sandbox allows it, and takes its operations."""
        # The underscored names are jinja2's: a template may pass keyword arguments of any other name.
        budget: OperationBudget = __context[BUDGET]
        budget.take()
        if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            _check_size(__context, [*arguments, *values.values()])  # they become one value, varargs or kwargs
        if isinstance(__obj, Macro | BlockReference):
            return _check_size(__context, super().call(__context, __obj, *arguments, **values))
        name = __obj.__name__ if isinstance(__obj, BuiltinMethodType) else ""
        if name in _CHEAP_METHODS:
            if name not in _INSTANT_METHODS:
                pay_for_length(budget, name, __obj.__self__, (*arguments, *values.values()))
            if name in _BACKWARD_METHODS and arguments:
                budget.pay_for(budget.size(__obj.__self__), budget.size(arguments[0]))
        else:
            arguments = tuple(map(_finite, arguments))
            _pay(budget, __obj, arguments, values)
        return super().call(__context, __obj, *arguments, **values)


def _pay(budget: OperationBudget, function: Any, arguments: tuple[Any, ...], values: Mapping[str, Any]) -> None:
    """Pays for a call of a function, or of a method of a value."""
    # Formatting is a Python function around the method, which the sandbox wraps at each access.
    method = getattr(function, "__wrapped__", function)
    sizes = []
    name = getattr(method, "__name__", "")
    if isinstance(method, _METHODS) and isinstance(method.__self__, str | bytes | int):
        if name.startswith("format"):
            _check_widths(str(method.__self__))
            sizes = [_format_size(method.__self__)]
        else:
            sizes = [budget.size(method.__self__)]
    if name in ("decode", "encode"):  # some codecs take quadratic time
        sizes *= 2
    counts_numbers = name in _WIDTHS
    sizes += [budget.size(value, counts_numbers=counts_numbers) for value in (*arguments, *values.values())]
    budget.pay_for(*sizes)


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that pays before it runs."""

    @jinja2.pass_context
    def filter_(context: Context, value: Any, *arguments: Any, **values: Any) -> Any:
        budget: OperationBudget = context[BUDGET]
        value, arguments = _finite(value), tuple(map(_finite, arguments))
        counts_numbers = name in _WIDTHS or (name == "format" and _has_star(value))
        sizes = [_format_size(value) if name == "format" else budget.size(value)]
        sizes += [budget.size(item, counts_numbers=counts_numbers) for item in (*arguments, *values.values())]
        if name in _SLOW_FILTERS:
            sizes.append(_slowness(budget, name, value, (*arguments, *values.values())))
        budget.pay_for(*sizes)
        return context.call(function, value, *arguments, **values)

    return filter_


def _slowness(budget: OperationBudget, name: str, value: Any, arguments: Sequence[Any]) -> int:
    """Returns by how much a filter takes longer than the product of its arguments' sizes."""
    match name:
        case "pprint":
            return depth(budget, value)
        case "tojson":
            return depth(budget, value) if arguments else 1  # each line is indented
        case "wordwrap":
            return n_parts(value, arguments[0] if arguments else None)
        case _:
            return budget.size(value)


def _cheap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that pays for the length of its value and of long arguments."""
    passed = _PassArg.from_obj(function)

    @jinja2.pass_context
    def filter_(context: Context, value: Any, *arguments: Any, **values: Any) -> Any:
        is_alone = passed is None and not (arguments or values)
        if is_alone and isinstance(value, str) and len(value) <= _MAX_FREE_CHARACTERS:
            return function(value)
        value = pay_for_length(context[BUDGET], name, value, (*arguments, *values.values()))
        match passed:
            case None:
                return function(value, *arguments, **values)
            case _PassArg.context:
                return function(context, value, *arguments, **values)
            case _PassArg.environment:
                return function(context.environment, value, *arguments, **values)
        return function(context.eval_ctx, value, *arguments, **values)

    return filter_


def _finite(value: Any) -> Any:
    """Returns the value, or a list of what it yields: an iterator does not tell its size."""
    return list(value) if isinstance(value, Iterator) else value


def _format_size(text: object) -> int:
    """Returns the size of a format with its widths, such as 9 of ``%9d``."""
    text = str(text)
    return len(text) + sum(int(number[:20]) for number in _NUMBER.findall(text))


def _has_star(text: object) -> bool:
    """Returns whether a format for ``%`` may take a width from its arguments, as ``%*d`` does."""
    return "*" in str(text)


def _check_widths(text: str) -> None:
    """Refuses a format whose width is an argument: it may lie anywhere inside the arguments."""
    if any("{" in (layout or "") for _, _, layout, _ in string.Formatter().parse(text)):
        raise TemplateRaised("it formats a value with a width that is itself a field")


@jinja2.pass_context
def _count_iterations(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a loop and counts each as an operation."""
    budget: OperationBudget = context[BUDGET]
    for item in items:
        budget.take()
        yield item


@jinja2.pass_context
def _count_statements(context: Context, _: Any) -> None:
    context[BUDGET].take()


@jinja2.pass_context
def _check_size(context: Context, value: Any) -> Any:
    """Pays for a value that an operator, a literal, a call of a macro or a block has made."""
    if not isinstance(value, str):
        context[BUDGET].pay_for(context[BUDGET].size(value))
    elif len(value) >= SIZE_PER_OPERATION:
        context[BUDGET].pay_for(len(value))
    return value


@jinja2.pass_context
def _pay_for_slice(context: Context, value: Any) -> Any:
    return pay_for_length(context[BUDGET], "", value, ())


@jinja2.pass_context
def _multiply(context: Context, left: Any, right: Any) -> Any:
    budget: OperationBudget = context[BUDGET]
    has_sequence = hasattr(left, "__len__") or hasattr(right, "__len__")
    budget.pay_for(*(budget.size(value, counts_numbers=has_sequence) for value in (left, right)))
    return left * right


@jinja2.pass_context
def _modulo(context: Context, left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        budget: OperationBudget = context[BUDGET]
        budget.pay_for(_format_size(left), budget.size(right, counts_numbers=_has_star(left)))
    else:
        _pay_for_numbers(context, left, right)
    return left % right


def _paid_division(divide: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns a division that pays before it computes."""

    @jinja2.pass_context
    def paid(context: Context, left: Any, right: Any) -> Any:
        _pay_for_numbers(context, left, right)
        return divide(left, right)

    return paid


def _pay_for_numbers(context: Context, left: Any, right: Any) -> None:
    """Pays for a division: that of integers takes time in the product of their lengths."""
    if isinstance(left, int) and isinstance(right, int):
        context[BUDGET].pay_for(left.bit_length() // 8, right.bit_length() // 8)


@jinja2.pass_context
def _power(context: Context, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length() * abs(right)
        context[BUDGET].pay_for(n_bits, n_bits)  # multiplying takes time quadratic in the length
    return left**right


_GUARDS: Mapping[type[nodes.Node], Callable[..., Any]] = {
    nodes.For: _count_iterations,
    nodes.Add: _check_size,
    nodes.Mul: _multiply,
    nodes.Mod: _modulo,
    nodes.Pow: _power,
    nodes.Div: _paid_division(operator.truediv),
    nodes.FloorDiv: _paid_division(operator.floordiv),
    nodes.Slice: _pay_for_slice,
    nodes.Stmt: _count_statements,
}
"""Filters that guard nodes of this type, under its name."""


class _GenerationExtension(Extension):
    """Ignores ``{% generation %}``, which marks the assistant's text for training and renders to nothing."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A Jinja namespace that rejects attribute names with a leading underscore."""

    def __init__(*arguments: Any, **values: Any) -> None:
        # ``self`` is not a named parameter here, so that a template may set a value of that name.
        self, *pairs = arguments
        named = dict(*pairs, **values)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Without its values: namespaces within namespaces would make an endless text.
        return "<Namespace>"


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise TemplateRaised("it sets a name that begins with an underscore")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter, which escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, items: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    if not isinstance(start, int | float):
        raise TemplateRaised("it sums other values than numbers")  # adding lists takes quadratic time
    return filters.do_sum(environment, items, attribute, start)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not -_MAX_DIGITS <= precision <= _MAX_DIGITS:
        raise TemplateRaised(f"it rounds to more than {_MAX_DIGITS} digits")
    return filters.do_round(value, precision, method)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaised(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > _MAX_DATE_FORMAT_CHARACTERS:
        raise TemplateRaised(f"its date format has {len(layout)} characters")
    return datetime.datetime.now().strftime(layout)
