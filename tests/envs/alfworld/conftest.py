"""A kitchen small enough to read, with everything the engine's quirks need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl.agentopsd.envs.alfworld.generate import load_assets

SINK = "sink_bar_1_bar_sinkbasin"
RECEPTACLES = {
    # id -> class, location
    "stoveburner_bar_1": ("StoveBurner", "loc_stove"),
    "stoveburner_bar_2": ("StoveBurner", "loc_stove"),
    "cabinet_bar_1": ("Cabinet", "loc_wall"),
    "fridge_bar_1": ("Fridge", "loc_corner"),
    "microwave_bar_1": ("Microwave", "loc_counter"),
    SINK: ("SinkBasin", "loc_window"),
}
OBJECTS = {
    # id -> class, receptacle, affordances
    "kettle_bar_1": ("Kettle", "stoveburner_bar_1", "pickupable cleanable isReceptacleObject"),
    "knife_bar_1": ("Knife", SINK, "pickupable"),
    "egg_bar_1": ("Egg", SINK, "pickupable cleanable heatable coolable"),
    "apple_bar_1": ("Apple", SINK, "pickupable cleanable heatable coolable sliceable"),
    "desklamp_bar_1": ("DeskLamp", "cabinet_bar_1", "toggleable"),
}
OPENABLE = ("cabinet_bar_1", "fridge_bar_1", "microwave_bar_1")
CAN_CONTAIN = ("StoveBurner Kettle", "SinkBasin Kettle", "SinkBasin Egg", "Fridge Egg", "Fridge Apple")
GOALS = {
    "kettle in the sink": "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r)"
    " (objectType ?o KettleType) (receptacleType ?r SinkBasinType))))",
    "clean kettle in the sink": "(exists (?r - receptacle) (exists (?o - object) (and (cleanable ?o)"
    " (objectType ?o KettleType) (receptacleType ?r SinkBasinType) (isClean ?o) (inReceptacle ?o ?r))))",
    "two eggs in the sink": "(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 EggType)"
    " (receptacleType ?r SinkBasinType) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2))"
    " (objectType ?o2 EggType) (receptacleType ?r SinkBasinType) (inReceptacle ?o2 ?r))))))",
    "egg at the lamp": "(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and"
    " (objectType ?ot DeskLampType) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)"
    " (inReceptacle ?ot ?r))) (exists (?o - object ?a - agent) (and (objectType ?o EggType) (holds ?a ?o)))",
}


@pytest.fixture(scope="session")
def small_game_data() -> Callable[..., dict[str, Any]]:
    """``make(goal, more_facts="")``: the ``game.tw-pddl`` object of the small kitchen.

    The kettle stands on stoveburner 2, which shares its location with stoveburner 1; apple, egg and knife are in the
    sink; the lamp is shut into the cabinet; an egg is filed as being in the kettle.
    """

    def make(goal: str = "kettle in the sink", more_facts: str = "", more_objects: str = "") -> dict[str, Any]:
        lines = ["(define (problem small) (:domain alfred) (:objects agent1 - agent ButterKnifeType - otype"]
        lines += [f"{cls}Type - otype {thing} - object" for thing, (cls, _, _) in OBJECTS.items()]
        lines += [f"{cls}Type - rtype" for cls in sorted({cls for cls, _ in RECEPTACLES.values()})]
        lines += [f"{entity} - receptacle" for entity in RECEPTACLES]
        lines += [
            f"{place} - location" for place in sorted({"loc_door", *(place for _, place in RECEPTACLES.values())})
        ]
        lines += [more_objects, ") (:init (atLocation agent1 loc_door)"]
        for entity, (cls, place) in RECEPTACLES.items():
            lines.append(f"(receptacleType {entity} {cls}Type) (receptacleAtLocation {entity} {place})")
        for thing, (cls, receptacle, affordances) in OBJECTS.items():
            lines.append(f"(objectType {thing} {cls}Type) (objectAtLocation {thing} {RECEPTACLES[receptacle][1]})")
            lines.append(f"(inReceptacle {thing} {receptacle})")
            lines += [f"({affordance} {thing})" for affordance in affordances.split()]
        lines += [f"(openable {entity})" for entity in OPENABLE]
        lines += ["(canContain {}Type {}Type)".format(*pair.split()) for pair in CAN_CONTAIN]
        lines += ["(inReceptacleObject egg_bar_1 kettle_bar_1)", more_facts, f") (:goal (and {GOALS[goal]})))"]
        assets = load_assets()
        return {
            "pddl_domain": assets.domain,
            "grammar": assets.grammar.replace("UNKNOWN GOAL.", f"{goal}."),
            "pddl_problem": "\n".join(lines),
            "solvable": True,
            "walkthrough": [],
        }

    return make
