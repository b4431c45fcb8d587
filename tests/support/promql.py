"""Names in PromQL expressions, without a full parser: enough to compare them with a server's metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_TOKENS = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*") | \[(?P<range>[^\]]*)\] | (?P<name>[A-Za-z_:][\w:]*)
      | (?P<number>[\d.]+(?:e-?\d+)?) | (?P<mark>=~|!~|!=|[=<>]=?|[{}(),+\-*/]) | (?P<space>\s+) | (?P<other>.)""",
    re.VERBOSE,
)
_OPERATORS = frozenset({"and", "or", "unless"})
_GROUPINGS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_FUNCTIONS = frozenset(
    "sum avg min max rate increase deriv changes histogram_quantile vector min_over_time max_over_time".split()
)
_RANGE = re.compile(r"\d+[smh]|\$__rate_interval")


@dataclass(frozen=True)
class Selector:
    """A metric with its label matchers: label, operator and value."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Expression:
    """The selectors of an expression, and the labels by which it groups."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]


def parse(text: str) -> Expression:
    """Parses an expression. Raises ``ValueError`` for what is no function, operator, range or balanced bracket."""
    tokens = [match for match in _TOKENS.finditer(text) if match.lastgroup != "space"]
    for match in tokens:
        if match.lastgroup == "other" or (match.lastgroup == "range" and not _RANGE.fullmatch(match["range"])):
            raise ValueError(f"{match[0]} in {text}")
    for opening, closing in ("()", "{}"):
        marks = [match["mark"] for match in tokens if match["mark"]]
        if marks.count(opening) != marks.count(closing):
            raise ValueError(f"brackets of {text}")
    words = iter([match[0] for match in tokens] + [""])
    selectors: list[Selector] = []
    grouped: set[str] = set()
    word = next(words)
    while word:
        if word in _GROUPINGS:
            grouped |= set(_names(words))
            word = next(words)
        elif re.match(r"[A-Za-z_:]", word) and word not in _OPERATORS:
            after = next(words)
            if after == "{":
                selectors.append(Selector(word, tuple(_matchers(words))))
                after = next(words)
            elif after != "(" and after not in _GROUPINGS:
                selectors.append(Selector(word, ()))
            elif word not in _FUNCTIONS:
                raise ValueError(f"function {word} in {text}")
            word = after
        else:
            word = next(words)
    return Expression(tuple(selectors), frozenset(grouped))


def unknown_names(expression: Expression, series: dict[str, list[dict[str, str]]]) -> list[str]:
    """Returns the metrics, labels and label values of an expression that no series of a server has.

    Args:
        expression: is checked.
        series: by the metric's name: the labels of each series.
    """
    found = []
    labels = {label for one in expression.selectors for each in series.get(one.metric, ()) for label in each}
    for selector in expression.selectors:
        if selector.metric not in series:
            found.append(selector.metric)
            continue
        for label, operator, value in selector.matchers:
            values = {each[label] for each in series[selector.metric] if label in each}
            if not values or (operator == "=" and value not in values):
                found.append(f"{selector.metric}{{{label}{operator}{value}}}")
    return [*found, *sorted(expression.grouped - labels)]


def _names(words: Iterator[str]) -> Iterable[str]:
    next(words)  # the bracket
    while (word := next(words)) != ")":
        if word != ",":
            yield word


def _matchers(words: Iterator[str]) -> Iterable[tuple[str, str, str]]:
    while (word := next(words)) != "}":
        if word != ",":
            yield word, next(words), next(words).strip('"')
