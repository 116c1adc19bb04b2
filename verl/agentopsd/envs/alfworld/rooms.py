"""Synthetic homes for generated games: floor plans, and where things lie in them.

A floor plan fixes a room's receptacles and how they share locations; every game in it draws its own objects. The bands
of numbers are AI2-THOR's (kitchens from 1, living rooms from 201, bedrooms from 301, bathrooms from 401, 30 each); how
many of each receptacle and object there are follows the ALFWorld games. What fits where comes from ALFWorld itself
(``Affordances``).
"""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field

FIRST_PLAN = {"kitchen": 1, "living": 201, "bedroom": 301, "bath": 401}
PLANS_PER_KIND = 30
UNSEEN_PLANS_PER_KIND = 5
"""The last plans of each band: only ``valid_unseen`` plays there."""

ROOM_KINDS = {
    "pick_and_place_simple": ("kitchen", "living", "bedroom", "bath"),
    "look_at_obj_in_light": ("living", "bedroom"),
    "pick_clean_then_place_in_recep": ("kitchen", "bath"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
    "pick_two_obj_and_place": ("kitchen", "living", "bedroom", "bath"),
}

_LAYOUT: Mapping[str, Mapping[str, tuple[int, int]]] = {
    # receptacle class -> fewest, most
    "kitchen": {
        "Cabinet": (4, 14), "Drawer": (2, 10), "CounterTop": (1, 3), "StoveBurner": (4, 4), "Fridge": (1, 1),
        "Microwave": (1, 1), "SinkBasin": (1, 1), "CoffeeMachine": (1, 1), "Toaster": (1, 1), "GarbageCan": (1, 1),
        "DiningTable": (0, 1), "SideTable": (0, 1), "Shelf": (0, 3),
    },
    "living": {
        "Sofa": (1, 1), "ArmChair": (1, 2), "CoffeeTable": (0, 1), "SideTable": (1, 3), "Drawer": (0, 8),
        "Shelf": (0, 5), "Dresser": (0, 1), "DiningTable": (0, 1), "TVStand": (0, 1), "Cabinet": (0, 4),
        "GarbageCan": (1, 1),
    },
    "bedroom": {
        "Bed": (1, 1), "Desk": (1, 1), "Drawer": (2, 9), "Shelf": (0, 6), "SideTable": (0, 2), "Dresser": (0, 1),
        "LaundryHamper": (0, 1), "Safe": (0, 1), "ArmChair": (0, 1), "GarbageCan": (1, 1),
    },
    "bath": {
        "SinkBasin": (1, 2), "CounterTop": (1, 1), "Toilet": (1, 1), "BathtubBasin": (0, 1), "Cabinet": (0, 6),
        "Drawer": (0, 4), "ToiletPaperHanger": (1, 1), "TowelHolder": (1, 1), "HandTowelHolder": (1, 2),
        "Shelf": (0, 2), "Cart": (0, 1), "GarbageCan": (1, 1),
    },
}  # fmt: skip
_SMALL_OBJECTS = {
    "kitchen": (
        "Apple Bread Tomato Potato Lettuce Egg Mug Cup Plate Bowl Fork Spoon Knife ButterKnife Spatula Ladle Pan Pot "
        "Kettle SaltShaker PepperShaker DishSponge SoapBottle Glassbottle WineBottle Statue Vase Book CreditCard"
    ),
    "living": (
        "Book Newspaper RemoteControl CreditCard KeyChain Watch Pillow Laptop Vase Statue Box TissueBox Candle Pen "
        "Pencil Plate Bowl CellPhone WateringCan"
    ),
    "bedroom": (
        "Book AlarmClock CD CellPhone CreditCard KeyChain Laptop Mug Bowl Pen Pencil Pillow BaseballBat BasketBall "
        "TeddyBear TissueBox Cloth Box Watch TennisRacket"
    ),
    "bath": (
        "Candle Cloth SoapBar SoapBottle SprayBottle ToiletPaper HandTowel Towel Plunger ScrubBrush TissueBox "
        "DishSponge"
    ),
}
OBJECTS = {kind: tuple(names.split()) for kind, names in _SMALL_OBJECTS.items()}
_FIXTURES = {
    "kitchen": ("StoveKnob", "Window", "LightSwitch", "Sink"),
    "living": ("Painting", "Window", "LightSwitch", "Television"),
    "bedroom": ("Mirror", "Window", "Blinds", "LightSwitch"),
    "bath": ("Mirror", "ShowerDoor", "LightSwitch", "Sink"),
}
LAMPS = {"living": ("DeskLamp", "FloorLamp"), "bedroom": ("DeskLamp",), "kitchen": (), "bath": ()}
_LAMP_STANDS = frozenset({"Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf"})
_SHARED_LOCATION = 0.12
"""How often a receptacle is reached from the location of another one of its class."""
_COPIES = (0, 1, 1, 2, 2, 3)
"""How many of each object class a room has, one drawn at random."""
_SIGNS = ("plus", "minus")


@dataclass(frozen=True)
class Affordances:
    """What ALFWorld says can be done with things, by class name.

    Attributes:
        holds: receptacle class -> object classes that can lie in it.
        actions: ``Heatable`` | ``Coolable`` | ``Cleanable`` | ``Toggleable`` | ``Sliceable`` -> object classes.
        containers: object classes that can hold other objects (a bowl).
        openable: receptacle classes.
    """

    holds: Mapping[str, frozenset[str]]
    actions: Mapping[str, frozenset[str]]
    containers: frozenset[str]
    openable: frozenset[str]


@dataclass(frozen=True)
class FloorPlan:
    """A room without its objects.

    Attributes:
        receptacles: id -> class, in the order they were put up.
        location_of: receptacle id -> location; about one in eight shares its location with a neighbour.
        free_locations: locations without a receptacle, for the agent's start and the fixtures.
    """

    number: int
    kind: str
    receptacles: Mapping[str, str]
    location_of: Mapping[str, str]
    free_locations: Sequence[str]


@dataclass
class Room:
    """A floor plan with objects in it. ``at`` has every object's location, ``inside`` only that of things in things."""

    plan: FloorPlan
    start: str
    objects: dict[str, str] = field(default_factory=dict)
    """id -> class."""
    inside: dict[str, str] = field(default_factory=dict)
    """id -> receptacle id."""
    at: dict[str, str] = field(default_factory=dict)
    """id -> location."""


def plan_numbers(split: str, kind: str) -> range:
    """The floor plans that ``split`` plays in: ``valid_unseen`` has its own, all other splits share the rest."""
    first, end = FIRST_PLAN[kind], FIRST_PLAN[kind] + PLANS_PER_KIND
    unseen = end - UNSEEN_PLANS_PER_KIND
    return range(unseen, end) if split == "valid_unseen" else range(first, unseen)


def floor_plan(number: int, kind: str, seed: int) -> FloorPlan:
    """The floor plan with this number in the homes of this seed."""
    rng = random.Random(f"floor plan {number}/{seed}")
    locations = _locations(rng)
    receptacles: dict[str, str] = {}
    location_of: dict[str, str] = {}
    for cls, (fewest, most) in _LAYOUT[kind].items():
        neighbour = None
        for _ in range(rng.randint(fewest, most)):
            entity = _new_id(rng, cls, receptacles)
            receptacles[entity] = cls
            shared = neighbour is not None and rng.random() < _SHARED_LOCATION
            location_of[entity] = location_of[neighbour] if shared and neighbour else locations.pop()
            neighbour = entity
    return FloorPlan(number, kind, receptacles, location_of, locations[:12])


def furnish(
    plan: FloorPlan,
    rng: random.Random,
    affordances: Affordances,
    *,
    wanted: str,
    copies: int,
    kept_out_of: str,
    lamp: str,
) -> Room | None:
    """Fills a floor plan with objects.

    Args:
        wanted: the object class the task is about.
        copies: how many of it there are.
        kept_out_of: a receptacle class that must not hold any of them at the start.
        lamp: a lamp class to put up, or "".

    Returns:
        The room, or None if something that is needed fits nowhere.
    """
    free = list(plan.free_locations)
    rng.shuffle(free)
    room = Room(plan, start=free.pop())
    fits = {cls: {r for r, objects in affordances.holds.items() if cls in objects} for cls in OBJECTS[plan.kind]}
    for _ in range(copies):
        if not _put(room, rng, wanted, fits[wanted] - {kept_out_of}):
            return None
    if lamp and not _put(room, rng, lamp, _LAMP_STANDS):
        return None
    for cls in OBJECTS[plan.kind]:
        for _ in range(rng.choice(_COPIES) if cls != wanted else 0):
            _put(room, rng, cls, fits[cls])
    for cls in _FIXTURES[plan.kind]:
        _add(room, rng, cls, free.pop())
    return room


def _put(room: Room, rng: random.Random, cls: str, receptacle_classes: Set[str]) -> bool:
    """Adds one object of ``cls`` to a random receptacle of the given classes; False if there is none."""
    candidates = [entity for entity, kind in room.plan.receptacles.items() if kind in receptacle_classes]
    if not candidates:
        return False
    receptacle = rng.choice(candidates)
    room.inside[_add(room, rng, cls, room.plan.location_of[receptacle])] = receptacle
    return True


def _add(room: Room, rng: random.Random, cls: str, location: str) -> str:
    entity = _new_id(rng, cls, room.objects)
    room.objects[entity] = cls
    room.at[entity] = location
    return entity


def _new_id(rng: random.Random, cls: str, taken: Container[str]) -> str:
    """An id as ALFWorld mangles AI2-THOR's: ``Cabinet|+00.12|...`` is ``Cabinet_bar__plus_00_dot_12_bar_...``."""
    base, tail = (cls.removesuffix("Basin"), f"_bar_{cls}") if cls.endswith("Basin") else (cls, "")
    while True:
        coordinates = [f"_{rng.choice(_SIGNS)}_{rng.randrange(4):02d}_dot_{rng.randrange(100):02d}" for _ in "xyz"]
        entity = "_bar_".join((base, *coordinates)) + tail
        if entity not in taken:
            return entity


def _locations(rng: random.Random) -> list[str]:
    """Distinct locations in random order: a grid cell with a heading and a camera angle."""
    cells = [(x, y) for x in range(-9, 10) for y in range(-9, 10)]
    rng.shuffle(cells)
    return [
        f"loc_bar_{_signed(x)}_bar_{_signed(y)}_bar_{rng.randrange(4)}_bar_{rng.choice((0, 15, 30, 45, 60))}"
        for x, y in cells
    ]


def _signed(value: int) -> str:
    return f"_minus_{-value}" if value < 0 else str(value)
