"""Problems of school mathematics, generated or read from a file in GSM8K's format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from radixkv.bench.workloads.base import Source, bad_lines, check_enough
from radixkv.bench.workloads.datasets import PROBLEMS, Items, read_lines
from radixkv.bench.workloads.problems import Problem
from radixkv.bench.workloads.words import DAYS, FRUITS, GOODS, NAMES, SPOTS


class Draw(NamedTuple):
    """Random values for the gaps of a template."""

    rng: random.Random
    name: str
    friend: str
    goods: str
    fruit: str
    spot: str
    day: str

    def number(self, minimum: int, maximum: int) -> int:
        return self.rng.randint(minimum, maximum)

    def one_of(self, *texts: str) -> str:
        return self.rng.choice(texts)


def generate_problems(seed: int) -> Iterator[Problem]:
    """Yields endless different problems; equal seeds give equal problems.

    Each round has one problem of every template, in shuffled order, so that neighbours differ.
    """
    rng = random.Random(seed)
    templates = list(_TEMPLATES)
    seen: set[str] = set()
    while True:
        rng.shuffle(templates)
        for template in templates:
            problem = template(_draw(rng))
            while problem.question in seen:
                problem = template(_draw(rng))
            seen.add(problem.question)
            yield problem


def _draw(rng: random.Random) -> Draw:
    name, friend = rng.sample(NAMES, 2)
    return Draw(rng, name, friend, rng.choice(GOODS), rng.choice(FRUITS), rng.choice(SPOTS), rng.choice(DAYS))


def _stall(d: Draw) -> Problem:
    boxes, each, broken, price = d.number(3, 9), d.number(4, 11), d.number(2, 9), d.number(2, 9)
    total = boxes * each
    left = total - broken
    opening = d.one_of(
        f"{d.name} brings {boxes} boxes of {d.goods} to {d.spot} on {d.day}.",
        f"On {d.day} {boxes} boxes of {d.goods} stand on the stall of {d.name} at {d.spot}.",
    )
    return Problem(
        f"{opening} Each box holds {each} {d.goods}, but {broken} of them turn out to be damaged and have to be "
        f"thrown away. If {d.name} sells every one that is left for ${price}, how many dollars does the stall "
        "take that day?",
        f"{boxes} * {each} = {total} {d.goods}.\n{total} - {broken} = {left} left.\n"
        f"{left} * {price} = ${left * price}.\n#### {left * price}",
    )


def _savings(d: Draw) -> Problem:
    week, weeks, gift, spare = d.number(3, 12), d.number(3, 9), d.number(8, 40), d.number(2, 15)
    saved = week * weeks
    total = saved + gift
    goal = d.one_of("a bicycle", "a guitar", "a telescope", "a tent")
    return Problem(
        f"{d.name} wants to buy {goal} that costs ${total - spare}. For {weeks} weeks {d.name} puts ${week} into "
        f"a savings box every {d.day}, and at the end {d.friend} adds a birthday present of ${gift}. How much "
        "money will still be in the box after it has been paid for?",
        f"{week} * {weeks} = ${saved} saved.\n{saved} + {gift} = ${total}.\n"
        f"{total} - {total - spare} = ${spare}.\n#### {spare}",
    )


def _journey(d: Draw) -> Problem:
    first, hours, second, more = d.number(11, 50), d.number(2, 5), d.number(21, 70), d.number(2, 5)
    one, two = first * hours, second * more
    opening = d.one_of(f"On {d.day} morning {d.name} drives", f"Together with {d.friend}, {d.name} drives")
    return Problem(
        f"{opening} from {d.spot} towards the mountains at {first} miles an hour for {hours} hours. After a short "
        f"rest the road gets better, and the next {more} hours are driven at {second} miles an hour. How many "
        f"miles has {d.name} driven in all when the car finally stops?",
        f"{first} * {hours} = {one} miles.\n{second} * {more} = {two} miles.\n{one} + {two} = {one + two} miles.\n"
        f"#### {one + two}",
    )


def _orchard(d: Draw) -> Problem:
    rows, trees, young, baskets = d.number(3, 9), d.number(4, 11), d.number(2, 9), d.number(2, 5)
    count = rows * trees
    bearing = count - young
    return Problem(
        f"An orchard near {d.spot} has {rows} rows with {trees} trees in every row. {d.name} counts that {young} "
        f"of the trees are still too young to bear {d.fruit}. Each of the others gives {baskets} baskets this "
        f"year. How many baskets of {d.fruit} does {d.name} carry home before {d.day}?",
        f"{rows} * {trees} = {count} trees.\n{count} - {young} = {bearing} trees.\n"
        f"{bearing} * {baskets} = {bearing * baskets} baskets.\n#### {bearing * baskets}",
    )


def _ages(d: Draw) -> Problem:
    young, times, years = d.number(4, 14), d.number(2, 6), d.number(3, 30)
    old = young * times
    relation = d.one_of("a neighbour", "a cousin", "an old friend")
    return Problem(
        f"{d.name} is {times} times as old as {d.friend}, {relation} who turned {young} last {d.day} and had a "
        f"party at {d.spot}. The two of them like to work out how old they will be later on. How old will "
        f"{d.name} be {years} years from now, when they want to meet there again?",
        f"{young} * {times} = {old} years.\n{old} + {years} = {old + years} years.\n#### {old + years}",
    )


def _bakery(d: Draw) -> Problem:
    trays, buns, bags, each = d.number(5, 9), d.number(6, 11), d.number(2, 4), d.number(3, 6)
    baked, rest = trays * buns, bags * each
    sold = baked - rest
    return Problem(
        f"A bakery next to {d.spot} bakes {trays} trays of buns with {buns} buns on each tray while it is still "
        f"dark. By noon on {d.day} {sold} buns have been sold. In the afternoon {d.name} packs all the others "
        f"into {bags} bags with the same number in each. How many buns are there in one bag?",
        f"{trays} * {buns} = {baked} buns.\n{baked} - {sold} = {rest} left.\n"
        f"{rest} / {bags} = {each}.\n#### {each}",
    )


def _reading(d: Draw) -> Problem:
    per_day, days, faster, left = d.number(9, 28), d.number(3, 7), d.number(5, 12), d.number(2, 9)
    read, rest = per_day * days, faster * left
    book = d.one_of("novel", "diary", "book")
    return Problem(
        f"{d.name} borrows a {book} of {read + rest} pages from {d.friend}. For the first {days} days {d.name} "
        f"reads {per_day} pages a day on the way to {d.spot}. From {d.day} on there is less time, and {d.name} "
        f"reads only {faster} pages a day. How many more days does it take to finish the {book}?",
        f"{per_day} * {days} = {read} pages.\n{read + rest} - {read} = {rest} left.\n{rest} / {faster} = {left} "
        f"days.\n#### {left}",
    )


def _garden(d: Draw) -> Problem:
    width, longer = d.number(5, 40), d.number(3, 30)
    length = width + longer
    half = width + length
    what = d.one_of("vegetable garden", "flower garden", "playground")
    return Problem(
        f"{d.name} and {d.friend} lay out a {what} behind {d.spot}. It is {width} metres wide and {longer} metres "
        f"longer than it is wide. On {d.day} they want to put a fence around the whole {what}, with no gap for a "
        "gate. How many metres of fence do they have to buy?",
        f"{width} + {longer} = {length} metres.\n{width} + {length} = {half} metres.\n{half} * 2 = {half * 2} "
        f"metres.\n#### {half * 2}",
    )


def _school(d: Draw) -> Problem:
    buses, seats, adults = d.number(2, 8), d.number(21, 59), d.number(4, 29)
    people = buses * seats
    opening = d.one_of("A school", "A sports club", "A choir")
    return Problem(
        f"{opening} hires {buses} buses for a trip to {d.spot} on {d.day}. Every bus has {seats} seats, and all "
        f"of them are taken. At the first stop {d.name} counts {adults} adults; all the other passengers are "
        f"children. How many children does {d.name} have to look after when they get out?",
        f"{buses} * {seats} = {people} people.\n{people} - {adults} = {people - adults} children.\n"
        f"#### {people - adults}",
    )


def _sharing(d: Draw) -> Problem:
    each, friends, eaten = d.number(3, 12), d.number(3, 9), d.number(4, 30)
    rest = each * friends
    return Problem(
        f"{d.friend} picks {rest + eaten} {d.fruit} near {d.spot} on {d.day} and eats {eaten} of them on the way "
        f"home. The rest is given to {d.name}, who shares the {d.fruit} equally among {friends} friends and keeps "
        f"none of them. How many {d.fruit} does each of the friends get?",
        f"{rest + eaten} - {eaten} = {rest} left.\n{rest} / {friends} = {each} {d.fruit}.\n#### {each}",
    )


def _wages(d: Draw) -> Problem:
    rate, hours, bonus, rent = d.number(11, 29), d.number(3, 9), d.number(10, 60), d.number(5, 40)
    base = rate * hours
    total = base + bonus
    return Problem(
        f"{d.name} works at {d.spot} and earns ${rate} an hour. Last week {d.name} worked {hours} hours, because "
        f"{d.friend} was ill from {d.day} on, and got a bonus of ${bonus} for it. Out of this money {rent} "
        f"dollars were spent on a present for {d.friend}. How much money is left?",
        f"{rate} * {hours} = ${base}.\n{base} + {bonus} = ${total}.\n{total} - {rent} = ${total - rent}.\n"
        f"#### {total - rent}",
    )


def _collection(d: Draw) -> Problem:
    start, found, packs, size = d.number(12, 90), d.number(5, 40), d.number(2, 9), d.number(3, 9)
    some = start + found
    return Problem(
        f"{d.name} owns {start} old {d.goods}. On {d.day} {d.name} finds {found} more of them at {d.spot}, and "
        f"buys {packs} packs of {size} in a shop besides, which {d.friend} has recommended. How many {d.goods} "
        f"are in the collection of {d.name} after that?",
        f"{start} + {found} = {some} {d.goods}.\n{packs} * {size} = {packs * size} bought.\n"
        f"{some} + {packs * size} = {some + packs * size} {d.goods}.\n#### {some + packs * size}",
    )


def _tickets(d: Draw) -> Problem:
    adults, price, children, less = d.number(2, 9), d.number(6, 15), d.number(3, 12), d.number(2, 5)
    one, two = adults * price, children * less
    show = d.one_of("a concert", "a play", "a film")
    return Problem(
        f"{d.name} buys tickets for {show} at {d.spot}. A ticket for an adult costs ${price}, and a ticket for a "
        f"child costs ${less}. On {d.day} {adults} adults and {children} children come along, among them "
        f"{d.friend}. How many dollars does {d.name} pay for all the tickets together?",
        f"{adults} * {price} = ${one}.\n{children} * {less} = ${two}.\n{one} + {two} = ${one + two}.\n#### "
        f"{one + two}",
    )


def _change(d: Draw) -> Problem:
    count, price, note = d.number(3, 9), d.number(2, 11), d.one_of("100", "200")
    cost = count * price
    return Problem(
        f"{d.name} needs a few {d.goods} for a party and sees that they cost ${price} each at {d.spot}. On "
        f"{d.day} {d.name} buys {count} of them and pays with a note of ${note} that {d.friend} has lent. How "
        f"many dollars does {d.name} get back from the shopkeeper?",
        f"{count} * {price} = ${cost}.\n{note} - {cost} = ${int(note) - cost}.\n#### {int(note) - cost}",
    )


_TEMPLATES: tuple[Callable[[Draw], Problem], ...] = (
    _stall,
    _savings,
    _journey,
    _orchard,
    _ages,
    _bakery,
    _reading,
    _garden,
    _school,
    _sharing,
    _wages,
    _collection,
    _tickets,
    _change,
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
