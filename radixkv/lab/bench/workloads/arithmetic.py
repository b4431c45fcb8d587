"""Problems of school mathematics, generated or read from a file in GSM8K's format.

Each step of a generated answer is one small operation: a product of a two-digit and a one-digit number at most, a
quotient from the multiplication tables, or a sum or difference below 1,000.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from radixkv.lab.bench.workloads.base import Source, bad_lines, check_enough
from radixkv.lab.bench.workloads.datasets import PROBLEMS, Items, read_lines
from radixkv.lab.bench.workloads.problems import MARK, Problem
from radixkv.lab.bench.workloads.templates import Gaps, draw_values
from radixkv.lab.bench.workloads.words import DAYS, FRUITS, GOODS, NAMES, SPOTS

_STEP = re.compile(r"\{(\w+)\} ([*/+-]) (\d|\{\w+\}) = \$?\{(\w+)\}")
"""A step's operation: a value's name, the operator, a digit or another value's gap, and the name of the result."""
_WORDS: Gaps = {("name", "friend"): NAMES, "goods": GOODS, "fruit": FRUITS, "spot": SPOTS, "day": DAYS}
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "/": operator.floordiv,
    "+": operator.add,
    "-": operator.sub,
}


class Template(NamedTuple):
    """A problem with gaps in braces.

    Any gap may be the name of a number or of a step's result, or ``name``, ``friend``, ``goods``, ``fruit``,
    ``spot``, ``day`` or ``choice``.
    """

    numbers: Gaps
    """The range of each random number."""
    question: str
    steps: tuple[str, ...]
    """The lines of the answer, each with one operation; the last result is the problem's."""
    choices: tuple[str, ...] = ()
    """Texts for ``choice``."""
    hidden: tuple[str, ...] = ()
    """Steps that only give values to the question."""

    def problem(self, rng: random.Random) -> Problem:
        """Returns a problem with random values in the gaps."""
        values = draw_values(rng, {**_WORDS, **self.numbers, **({"choice": self.choices} if self.choices else {})})
        result = 0
        for step in (*self.hidden, *self.steps):
            match = _STEP.match(step)
            assert match is not None, step
            left, sign, right, gap = match.groups()
            values[gap] = result = _OPERATORS[sign](int(values[left]), int(right.format_map(values)))
        answer = "\n".join([*self.steps, f"{MARK} {result}"])
        return Problem(self.question.format_map(values), answer.format_map(values))


def generate_problems(seed: int) -> Iterator[Problem]:
    """Yields endless different problems; equal seeds give equal problems.

    Each round has one problem of every template, in shuffled order, so that neighbours differ.
    """
    rng = random.Random(seed)
    templates = list(TEMPLATES)
    seen: set[str] = set()
    while True:
        rng.shuffle(templates)
        for template in templates:
            problem = template.problem(rng)
            while problem.question in seen:
                problem = template.problem(rng)
            seen.add(problem.question)
            yield problem


TEMPLATES = (
    Template(
        {"boxes": (3, 9), "each": (4, 11), "broken": (2, 9), "price": (2, 9)},
        "{choice} Each box holds {each} {goods}, but {broken} of them turn out to be damaged and have to be thrown "
        "away. If {name} sells every one that is left for ${price}, how many dollars does the stall take that "
        "day?",
        (
            "{boxes} * {each} = {total} {goods}.",
            "{total} - {broken} = {left} left.",
            "{left} * {price} = ${sales}.",
        ),
        choices=(
            "{name} brings {boxes} boxes of {goods} to {spot} on {day}.",
            "On {day} {boxes} boxes of {goods} stand on the stall of {name} at {spot}.",
        ),
    ),
    Template(
        {"week": (3, 12), "weeks": (3, 9), "gift": (8, 40), "spare": (2, 15)},
        "{name} wants to buy {choice} that costs ${cost}. For {weeks} weeks {name} puts ${week} into a savings box "
        "every {day}, and at the end {friend} adds a birthday present of ${gift}. How much money will still be in "
        "the box after it has been paid for?",
        ("{week} * {weeks} = ${saved} saved.", "{saved} + {gift} = ${total}.", "{total} - {cost} = ${spare}."),
        choices=("a bicycle", "a guitar", "a telescope", "a tent"),
        hidden=("{week} * {weeks} = {saved}", "{saved} + {gift} = {total}", "{total} - {spare} = {cost}"),
    ),
    Template(
        {"first": (11, 50), "hours": (2, 5), "second": (21, 70), "more": (2, 5)},
        "{choice} from {spot} towards the mountains at {first} miles an hour for {hours} hours. After a short rest "
        "the road gets better, and the next {more} hours are driven at {second} miles an hour. How many miles has "
        "{name} driven in all when the car finally stops?",
        ("{first} * {hours} = {one} miles.", "{second} * {more} = {two} miles.", "{one} + {two} = {both} miles."),
        choices=("On {day} morning {name} drives", "Together with {friend}, {name} drives"),
    ),
    Template(
        {"rows": (3, 9), "trees": (4, 11), "young": (2, 9), "baskets": (2, 5)},
        "An orchard near {spot} has {rows} rows with {trees} trees in every row. {name} counts that {young} of the "
        "trees are still too young to bear {fruit}. Each of the others gives {baskets} baskets this year. How "
        "many baskets of {fruit} does {name} carry home before {day}?",
        (
            "{rows} * {trees} = {count} trees.",
            "{count} - {young} = {bearing} trees.",
            "{bearing} * {baskets} = {harvest} baskets.",
        ),
    ),
    Template(
        {"young": (4, 14), "times": (2, 6), "years": (3, 30)},
        "{name} is {times} times as old as {friend}, {choice} who turned {young} last {day} and had a party at "
        "{spot}. The two of them like to work out how old they will be later on. How old will {name} be {years} "
        "years from now, when they want to meet there again?",
        ("{young} * {times} = {old} years.", "{old} + {years} = {later} years."),
        choices=("a neighbour", "a cousin", "an old friend"),
    ),
    Template(
        {"trays": (5, 9), "buns": (6, 11), "bags": (2, 4), "each": (3, 6)},
        "A bakery next to {spot} bakes {trays} trays of buns with {buns} buns on each tray while it is still dark. "
        "By noon on {day} {sold} buns have been sold. In the afternoon {name} packs all the others into {bags} "
        "bags with the same number in each. How many buns are there in one bag?",
        ("{trays} * {buns} = {baked} buns.", "{baked} - {sold} = {rest} left.", "{rest} / {bags} = {each}."),
        hidden=("{trays} * {buns} = {baked}", "{bags} * {each} = {rest}", "{baked} - {rest} = {sold}"),
    ),
    Template(
        {"per_day": (9, 28), "days": (3, 7), "faster": (5, 12), "left": (2, 9)},
        "{name} borrows a {choice} of {pages} pages from {friend}. For the first {days} days {name} reads "
        "{per_day} pages a day on the way to {spot}. From {day} on there is less time, and {name} reads only "
        "{faster} pages a day. How many more days does it take to finish the {choice}?",
        (
            "{per_day} * {days} = {read} pages.",
            "{pages} - {read} = {rest} left.",
            "{rest} / {faster} = {left} days.",
        ),
        choices=("novel", "diary", "book"),
        hidden=("{per_day} * {days} = {read}", "{faster} * {left} = {rest}", "{read} + {rest} = {pages}"),
    ),
    Template(
        {"width": (5, 40), "longer": (3, 30)},
        "{name} and {friend} lay out a {choice} behind {spot}. It is {width} metres wide and {longer} metres "
        "longer than it is wide. On {day} they want to put a fence around the whole {choice}, with no gap for a "
        "gate. How many metres of fence do they have to buy?",
        (
            "{width} + {longer} = {length} metres.",
            "{width} + {length} = {half} metres.",
            "{half} * 2 = {fence} metres.",
        ),
        choices=("vegetable garden", "flower garden", "playground"),
    ),
    Template(
        {"buses": (2, 8), "seats": (21, 59), "adults": (4, 29)},
        "{choice} hires {buses} buses for a trip to {spot} on {day}. Every bus has {seats} seats, and all of them "
        "are taken. At the first stop {name} counts {adults} adults; all the other passengers are children. How "
        "many children does {name} have to look after when they get out?",
        ("{buses} * {seats} = {people} people.", "{people} - {adults} = {children} children."),
        choices=("A school", "A sports club", "A choir"),
    ),
    Template(
        {"each": (3, 12), "friends": (3, 9), "eaten": (4, 30)},
        "{friend} picks {picked} {fruit} near {spot} on {day} and eats {eaten} of them on the way home. The rest "
        "is given to {name}, who shares the {fruit} equally among {friends} friends and keeps none of them. How "
        "many {fruit} does each of the friends get?",
        ("{picked} - {eaten} = {rest} left.", "{rest} / {friends} = {each} {fruit}."),
        hidden=("{each} * {friends} = {rest}", "{rest} + {eaten} = {picked}"),
    ),
    Template(
        {"rate": (11, 29), "hours": (3, 9), "bonus": (10, 60), "spent": (5, 40)},
        "{name} works at {spot} and earns ${rate} an hour. Last week {name} worked {hours} hours, because {friend} "
        "was ill from {day} on, and got a bonus of ${bonus} for it. Out of this money {spent} dollars were spent "
        "on a present for {friend}. How much money is left?",
        ("{rate} * {hours} = ${base}.", "{base} + {bonus} = ${total}.", "{total} - {spent} = ${left}."),
    ),
    Template(
        {"start": (12, 90), "found": (5, 40), "packs": (2, 9), "size": (3, 9)},
        "{name} owns {start} old {goods}. On {day} {name} finds {found} more of them at {spot}, and buys {packs} "
        "packs of {size} in a shop besides, which {friend} has recommended. How many {goods} are in the collection "
        "of {name} after that?",
        (
            "{start} + {found} = {some} {goods}.",
            "{packs} * {size} = {bought} bought.",
            "{some} + {bought} = {whole} {goods}.",
        ),
    ),
    Template(
        {"adults": (2, 9), "price": (6, 15), "children": (3, 12), "less": (2, 5)},
        "{name} buys tickets for {choice} at {spot}. A ticket for an adult costs ${price}, and a ticket for a "
        "child costs ${less}. On {day} {adults} adults and {children} children come along, among them {friend}. "
        "How many dollars does {name} pay for all the tickets together?",
        ("{adults} * {price} = ${one}.", "{children} * {less} = ${two}.", "{one} + {two} = ${both}."),
        choices=("a concert", "a play", "a film"),
    ),
    Template(
        {"count": (3, 9), "price": (2, 11)},
        "{name} needs a few {goods} for a party and sees that they cost ${price} each at {spot}. On {day} {name} "
        "buys {count} of them and pays with a note of ${choice} that {friend} has lent. How many dollars does "
        "{name} get back from the shopkeeper?",
        ("{count} * {price} = ${cost}.", "{choice} - {cost} = ${change}."),
        choices=("100", "200"),
    ),
)


def read_problems(path: Path, *, skip_bad_lines: bool = False) -> Items[Problem]:
    """Reads a file with one ``{"question": text, "answer": text}`` in a line; ignores other fields.

    Raises:
        ConfigError: as ``read_lines``.
    """
    decoder = msgspec.json.Decoder(Problem)
    return read_lines(path, decoder.decode, expected=PROBLEMS, skip_bad_lines=skip_bad_lines)


class Problems(NamedTuple):
    """The problems of a workload."""

    items: Sequence[Problem]
    counts: dict[str, int]
    """As ``WorkloadSessions.counts``."""


def problems_from(source: Source, count: int, *, settings: str) -> Problems:
    """Generates word problems from the seed, or takes the first of a data set in GSM8K's format.

    Args:
        source: seed or data set; the seed does not change which problems of a data set are taken.
        count: number of problems.
        settings: as in ``check_enough``.

    Raises:
        ConfigError: the data set cannot be read or is too short.
    """
    if source.dataset is None:
        return Problems(list(islice(generate_problems(source.seed), count)), {})
    read = read_problems(source.dataset, skip_bad_lines=source.skip_bad_lines)
    check_enough(source, "problems", len(read.items), count, settings=settings)
    return Problems(read.items[:count], bad_lines(read.n_bad_lines))


def groups(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    """Yields the problems in groups of ``size``."""
    return (problems[start : start + size] for start in range(0, len(problems), size))
