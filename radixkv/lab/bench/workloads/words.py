"""Vocabulary of the problem generators."""

from __future__ import annotations

NAMES = tuple(
    "Amara Bela Carlos Dina Emeka Farah Goran Hana Idris Julia Kenji Lena Marta Nadia Omar Priya Quentin Rosa "
    "Samir Tessa Umar Vera Wanda Yusuf Anton Bianca Cyril Delia Edgar Fiona Gustav Helga Ivan Jasmin Karim Lucia "
    "Milan Nora Oskar Paula Rafael Selma Tomas Ursula Viktor Willa Xenia Zoran".split()
)
GOODS = tuple("candles notebooks scarves mugs lanterns postcards baskets puzzles kites jars".split())
FRUITS = tuple("apples pears plums oranges lemons peaches mangoes apricots".split())
SPOTS = (
    "the market",
    "the school fair",
    "the harbour",
    "the village hall",
    "the library",
    "the station",
    "the castle",
    "the old mill",
)
"""Places of events."""
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
TOWNS = tuple(
    "Alden Brackley Corvale Dunmere Eastry Farlow Grenholm Hartwell Inverleigh Kestrel Lowick Marden".split()
)
STREETS = tuple(
    "Elm Oak Mill Bridge Church River Garden Castle Market Station Harbour Forest Meadow Orchard Tower Lake".split()
)
SHOPS = tuple("bakery bookshop chemist florist grocer butcher barber tailor cafe bank museum cinema".split())
COLOURS = tuple("red blue green yellow black white brown grey purple orange pink golden".split())
MATERIALS = tuple("brass wooden silver glass paper leather copper woollen stone plastic velvet iron".split())
THINGS = tuple(
    "lantern key umbrella compass kettle ladder violin hammer basket camera clock teapot helmet mirror blanket "
    "whistle candle hat map box".split()
)
CORNERS = tuple(
    "attic cellar kitchen garage hallway cupboard drawer wardrobe garden shed office balcony bathroom workshop "
    "pantry stable greenhouse bedroom".split()
)
"""Places where things are kept."""
CLOTHES = tuple("coat scarf hat jacket shirt sweater dress bag".split())
ANIMALS = tuple("dog cat horse parrot rabbit goat donkey hamster".split())
PET_NAMES = tuple(
    "Pim Bruno Coco Dot Fidget Ginger Hazel Jolly Kiki Lumpy Mochi Nuts Pepper Rusty Socks Toffee".split()
)
CLUBS = tuple("chess choir drama dance rowing history film garden poetry running science sewing".split())
GATES = tuple("gate door safe locker vault hatch lift barrier".split())
FOODS = tuple("soup rice bread cheese salad noodles pancakes beans fish pizza porridge cake".split())
JOBS = tuple("teacher nurse farmer baker painter pilot carpenter driver singer doctor gardener writer".split())
