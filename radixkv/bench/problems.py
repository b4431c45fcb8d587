"""Worked problems in the manner of school mathematics: made from a seed, or read from a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from radixkv.errors import ConfigError

NAMES = ("Amara", "Bela", "Carlos", "Dina", "Emeka", "Farah", "Goran", "Hana", "Idris", "Julia", "Kenji", "Lena")
MORE_NAMES = (
    "Marta",
    "Nadia",
    "Omar",
    "Priya",
    "Quentin",
    "Rosa",
    "Samir",
    "Tessa",
    "Umar",
    "Vera",
    "Wanda",
    "Yusuf",
)
GOODS = ("candles", "notebooks", "scarves", "mugs", "lanterns", "postcards", "baskets", "puzzles", "kites", "jars")
FRUITS = ("apples", "pears", "plums", "oranges", "lemons", "peaches", "mangoes", "apricots")
PLACES = ("the market", "the school fair", "the harbour", "the village hall", "the library", "the station")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


class Problem(msgspec.Struct, frozen=True):
    """A question, and its answer in steps that ends in ``#### number``."""

    question: str
    answer: str


class Draw(NamedTuple):
    """What a template fills its gaps with."""

    rng: random.Random
    name: str
    friend: str
    goods: str
    fruit: str
    place: str
    day: str

    def number(self, least: int, most: int) -> int:
        return self.rng.randint(least, most)


def made_problems(seed: int) -> Iterator[Problem]:
    """Endless different problems, the same for the same seed.

    The templates come in turns, in an order that the seed shuffles, so that neighbours differ in kind.
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


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of a file in GSM8K's format: ``{"question": ..., "answer": ...}`` a line, empty lines aside.

    Raises:
        ConfigError: no such file, or a line that is not such an object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"cannot read the data set {path}: {error.strerror}; give a file in GSM8K's format"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line, type=Problem)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'line {number} of {path} is not {{"question": text, "answer": text}}: {error}; '
                "give a file in GSM8K's format"
            ) from None


def _draw(rng: random.Random) -> Draw:
    return Draw(
        rng=rng,
        name=rng.choice(NAMES),
        friend=rng.choice(MORE_NAMES),
        goods=rng.choice(GOODS),
        fruit=rng.choice(FRUITS),
        place=rng.choice(PLACES),
        day=rng.choice(DAYS),
    )


def _stall(d: Draw) -> Problem:
    boxes, each, broken, price = d.number(4, 19), d.number(6, 24), d.number(3, 17), d.number(2, 9)
    total = boxes * each
    left = total - broken
    return Problem(
        f"{d.name} brings {boxes} boxes of {d.goods} to {d.place} on {d.day}. Each box holds {each} {d.goods}, but "
        f"{broken} of them turn out to be damaged and have to be thrown away. If {d.name} sells every one that is "
        f"left for ${price}, how many dollars does the stall take that day?",
        f"The {boxes} boxes hold {boxes} * {each} = {total} {d.goods} altogether.\n"
        f"After throwing the damaged ones away, {d.name} has {total} - {broken} = {left} {d.goods} left to sell.\n"
        f"At ${price} for each of them the stall takes {left} * {price} = ${left * price} on {d.day}.\n"
        f"#### {left * price}",
    )


def _savings(d: Draw) -> Problem:
    week, weeks, gift = d.number(8, 35), d.number(4, 15), d.number(10, 60)
    spare = d.number(5, 40)
    saved = week * weeks
    total = saved + gift
    price = total - spare
    return Problem(
        f"{d.name} wants to buy a bicycle that costs ${price}. For {weeks} weeks {d.name} puts ${week} into "
        f"a savings "
        f"box every {d.day}, and at the end {d.friend} adds a birthday present of ${gift}. How much money "
        f"will still "
        f"be in the box after the bicycle has been paid for?",
        f"Saving ${week} a week for {weeks} weeks gives {week} * {weeks} = ${saved}.\n"
        f"Together with the present from {d.friend} there are {saved} + {gift} = ${total} in the box.\n"
        f"The bicycle costs ${price}, so {total} - {price} = ${spare} stay in the box once it has been paid for.\n"
        f"#### {spare}",
    )


def _journey(d: Draw) -> Problem:
    first, hours, second, more = d.number(30, 60), d.number(2, 5), d.number(62, 95), d.number(2, 4)
    one, two = first * hours, second * more
    return Problem(
        f"On {d.day} morning {d.name} drives from {d.place} towards the mountains at {first} miles an hour "
        f"for {hours} "
        f"hours. After a short rest the road gets better, and the next {more} hours are driven at {second} "
        f"miles an "
        f"hour. How many miles has {d.name} driven in all when the car finally stops?",
        f"In the first part of the journey {d.name} covers {first} * {hours} = {one} miles.\n"
        f"In the second part, on the better road, the car covers {second} * {more} = {two} miles.\n"
        f"The whole journey is the sum of the two parts, which makes {one} + {two} = {one + two} miles.\n"
        f"#### {one + two}",
    )


def _orchard(d: Draw) -> Problem:
    rows, trees, per_tree = d.number(3, 12), d.number(4, 11), d.number(12, 40)
    crates = d.number(4, 9)
    count = rows * trees
    harvest = count * per_tree * crates
    return Problem(
        f"An orchard near {d.place} has {rows} rows with {trees} trees in every row. {d.name} counts that "
        f"each tree "
        f"bears {per_tree * crates} {d.fruit} this year. The harvest is packed into crates that hold "
        f"{crates} {d.fruit} "
        f"each. How many crates does {d.name} need so that nothing is left over?",
        f"There are {rows} * {trees} = {count} trees in the orchard.\n"
        f"They bear {count} * {per_tree * crates} = {harvest} {d.fruit} in total.\n"
        f"Each crate takes {crates} of them, so {d.name} needs {harvest} / {crates} = {harvest // crates} crates "
        f"to pack the whole harvest.\n#### {harvest // crates}",
    )


def _ages(d: Draw) -> Problem:
    young, times, years = d.number(4, 14), d.number(2, 5), d.number(3, 16)
    old = young * times
    total = old + young + 2 * years
    return Problem(
        f"{d.name} is {times} times as old as {d.friend}, who turned {young} last {d.day} and had a party at "
        f"{d.place}. The two of them like to work out how old they will be later on. What will the sum of both of "
        f"their ages be {years} years from now, when they meet again?",
        f"{d.friend} is {young}, so {d.name} is {young} * {times} = {old} years old today.\n"
        f"In {years} years {d.friend} will be {young} + {years} = {young + years} and {d.name} will be "
        f"{old} + {years} = {old + years}.\n"
        f"The sum of both their ages will then be {young + years} + {old + years} = {total}.\n#### {total}",
    )


def _bakery(d: Draw) -> Problem:
    trays, buns, sold, price = d.number(5, 16), d.number(12, 30), d.number(20, 45), d.number(2, 5)
    baked = trays * buns
    rest = baked - sold
    return Problem(
        f"A bakery next to {d.place} bakes {trays} trays of buns with {buns} buns on each tray. By noon on {d.day} "
        f"{sold} buns have been sold at ${price} each. In the afternoon {d.name} buys all the others at half that "
        f"price for a party. How much money does the bakery take for its buns?",
        f"The bakery bakes {trays} * {buns} = {baked} buns.\n"
        f"Until noon it takes {sold} * {price} = ${sold * price}, and {baked} - {sold} = {rest} buns are left.\n"
        f"Half the price of {rest} buns is {rest} * {price} / 2 = ${rest * price / 2:g}.\n"
        f"Altogether the bakery takes {sold * price} + {rest * price / 2:g} = "
        f"${sold * price + rest * price / 2:g}.\n"
        f"#### {sold * price + rest * price / 2:g}",
    )


def _reading(d: Draw) -> Problem:
    per_day, days, faster, left = d.number(9, 28), d.number(3, 8), d.number(4, 15), d.number(2, 7)
    read = per_day * days
    rest = (per_day + faster) * left
    return Problem(
        f"{d.name} borrows a novel of {read + rest} pages from {d.friend}. For the first {days} days "
        f"{d.name} reads "
        f"{per_day} pages a day on the way to {d.place}. Then the story becomes exciting, and {d.name} reads "
        f"{faster} pages more each day than before. How many more days does it take to finish the novel?",
        f"In the first {days} days {d.name} reads {per_day} * {days} = {read} pages.\n"
        f"That leaves {read + rest} - {read} = {rest} pages of the novel.\n"
        f"From then on {d.name} reads {per_day} + {faster} = {per_day + faster} pages a day.\n"
        f"The rest takes {rest} / {per_day + faster} = {left} more days.\n#### {left}",
    )


def _garden(d: Draw) -> Problem:
    width, longer, price = d.number(5, 18), d.number(3, 14), d.number(3, 12)
    length = width + longer
    around = 2 * (width + length)
    return Problem(
        f"{d.name} and {d.friend} lay out a vegetable garden behind {d.place}. It is {width} metres wide and "
        f"{longer} metres longer than it is wide. They want to put a fence around the whole garden, and "
        f"every metre "
        f"of fence costs ${price}. How much do they have to pay for the fence?",
        f"The garden is {width} + {longer} = {length} metres long.\n"
        f"The fence has to go around it, which takes 2 * ({width} + {length}) = {around} metres.\n"
        f"At ${price} a metre, {d.name} and {d.friend} pay {around} * {price} = ${around * price} for the whole "
        f"fence.\n#### {around * price}",
    )


def _school(d: Draw) -> Problem:
    buses, seats, adults, cost = d.number(2, 7), d.number(24, 52), d.number(4, 19), d.number(3, 11)
    people = buses * seats
    children = people - adults
    return Problem(
        f"A school hires {buses} buses for a trip to {d.place} on {d.day}. Every bus has {seats} seats, and all of "
        f"them are taken. {d.name} counts {adults} adults; all the other passengers are children. A child's ticket "
        f"costs ${cost} and adults get in free. How much does the school pay for the tickets?",
        f"The buses carry {buses} * {seats} = {people} people to {d.place}.\n"
        f"Of these, {people} - {adults} = {children} are children.\n"
        f"Adults get in free, so the school pays only for the children: {children} * {cost} = "
        f"${children * cost} for all the tickets.\n#### {children * cost}",
    )


def _sharing(d: Draw) -> Problem:
    each, friends, eaten = d.number(5, 19), d.number(3, 9), d.number(4, 22)
    bags = d.number(2, 6)
    total = each * friends * bags
    return Problem(
        f"{d.friend} picks {total + eaten} {d.fruit} near {d.place} and eats {eaten} of them on the way home. The "
        f"rest is put into {bags} bags with the same number in each. {d.name} takes one of the bags and shares it "
        f"equally among {friends} friends. How many {d.fruit} does each friend get?",
        f"After eating some, {d.friend} has {total + eaten} - {eaten} = {total} {d.fruit}.\n"
        f"Each of the {bags} bags then holds {total} / {bags} = {each * friends} {d.fruit}.\n"
        f"{d.name} shares one bag among {friends} friends, so each of them gets {each * friends} / {friends} = "
        f"{each} {d.fruit}.\n#### {each}",
    )


def _wages(d: Draw) -> Problem:
    rate, hours, extra = d.number(11, 24), d.number(20, 40), d.number(2, 9)
    base, over = rate * hours, rate * 2 * extra
    return Problem(
        f"{d.name} works at {d.place} and earns ${rate} an hour. The first {hours} hours of a week are paid "
        f"at this "
        f"rate, and every hour beyond them is paid double. Last week {d.name} worked {hours + extra} hours because "
        f"{d.friend} was ill from {d.day} on. How much did {d.name} earn last week?",
        f"The first {hours} hours bring {hours} * {rate} = ${base}.\n"
        f"There were {hours + extra} - {hours} = {extra} hours beyond them, each paid {rate} * 2 = ${rate * 2}.\n"
        f"These hours bring {extra} * {rate * 2} = ${over} more.\n"
        f"In all {d.name} earned {base} + {over} = ${base + over} last week.\n#### {base + over}",
    )


def _collection(d: Draw) -> Problem:
    start, fraction, given, bought = d.number(6, 30), d.number(2, 5), d.number(2, 5), d.number(3, 25)
    total = start * fraction
    kept = total - start
    return Problem(
        f"{d.name} owns {total} old {d.goods}. One out of every {fraction} of them is given to {d.friend} as a "
        f"present. On {d.day} {d.name} finds {bought} more at {d.place}, and buys {given} packs of 6 in a shop "
        f"besides. How many {d.goods} are in the collection of {d.name} after that?",
        f"{d.friend} receives {total} / {fraction} = {start} of the {d.goods}, which leaves {total} - "
        f"{start} = {kept}.\n"
        f"The packs from the shop hold {given} * 6 = {given * 6} {d.goods}.\n"
        f"With those found at {d.place} the collection has {kept} + {bought} + {given * 6} = "
        f"{kept + bought + given * 6} {d.goods}.\n#### {kept + bought + given * 6}",
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
)
