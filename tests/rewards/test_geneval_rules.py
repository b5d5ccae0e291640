import numpy as np
import pytest

from flowgrpo_ray.rewards.geneval_rules import (
    COLOURS,
    FLOW_GRPO_RANGE,
    MOST_OBJECTS,
    Detection,
    by_class,
    classes_of,
    judge,
    metadata_problem,
    relations,
)


def box(label, left, top, size=10, confidence=0.95):
    return Detection(label, confidence, (left, top, left + size, top + size))


def colours(**by_left):
    """A namer of colours by the left edge of an object's box."""
    return lambda name, objects: [by_left[f"x{round(o.box[0])}"] for o in objects]


def no_colours(name, objects):
    raise AssertionError("no colour was asked for")


def scores(detections, metadata, namer=no_colours):
    """(flow_grpo, geneval)"""
    assert metadata_problem(metadata) is None
    verdict = judge(detections, metadata, namer)
    assert (verdict.geneval == 1) == (verdict.reasons == ())
    return verdict.flow_grpo, verdict.geneval


def row(names):
    """Objects from the left to the right, 20 pixels from one to the next."""
    return [box(name, 20 * i, 0) for i, name in enumerate(names.split())]


ONE = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
TWO = {"tag": "two_object", "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}]}
THREE = {"tag": "counting", "include": [{"class": "dog", "count": 3}], "exclude": [{"class": "dog", "count": 4}]}
COLOUR = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}
ATTRIBUTES = {"tag": "color_attr", "include": [{"class": "dog", "count": 1, "color": "red"},
                                               {"class": "cat", "count": 1, "color": "blue"}]}
PLACE = {"tag": "position", "include": [{"class": "cat", "count": 1},
                                        {"class": "dog", "count": 1, "position": ["left of", 0]}]}


# Counts ---------------------------------------------------------------------------------------------------------------

# Of the graded score these are the numbers that the published reward server gives for the same detections.

@pytest.mark.parametrize(("found", "expected"), [(0, (0, 0)), (1, (1, 1)), (2, (0, 1)), (3, (-1, 1)), (4, (-2, 1))])
def test_one_object_or_more(found, expected):
    assert scores(row("dog " * found) + [box("cat", 0, 0)], ONE) == expected


@pytest.mark.parametrize(("found", "expected"), [
    ("", (0, 0)), ("dog", (0.5, 0)), ("cat", (0.5, 0)), ("dog cat", (1, 1)), ("dog dog", (0, 0)), ("bird", (0, 0)),
    ("dog dog cat", (0.5, 1)), ("dog dog cat cat", (0, 1)), ("dog dog dog cat", (0, 1)),
])
def test_two_objects(found, expected):
    assert scores(row(found), TWO) == expected


@pytest.mark.parametrize(("found", "graded"), [
    (0, 0), (1, 1 / 3), (2, 2 / 3), (3, 1), (4, 2 / 3), (5, 1 / 3), (6, 0), (9, -1), (16, 1 - 13 / 3), (20, 1 - 13 / 3),
])
def test_counts_are_graded_on_both_sides(found, graded):
    assert scores(row("dog " * found), THREE) == (pytest.approx(graded), float(found == 3))
    # Too many cost by their count alone: what is excluded plays no part.
    assert scores(row("dog " * found), THREE | {"exclude": None}) == (pytest.approx(graded), float(found >= 3))


def test_the_range_is_that_of_the_graded_score():
    assert scores(row("dog " * 20), ONE) == (FLOW_GRPO_RANGE[0], 1) and FLOW_GRPO_RANGE == (1 - (MOST_OBJECTS - 1), 1)


def test_an_excluded_class_that_is_not_included():
    metadata = TWO | {"exclude": [{"class": "bird", "count": 1}]}
    assert scores(row("dog cat"), metadata) == (1, 1)
    assert scores(row("dog cat bird"), metadata) == (1, 0)


@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (4, 3, 5)])
def test_every_clause_of_exclude_holds(counts):
    metadata = ONE | {"exclude": [{"class": "dog", "count": count} for count in counts]}
    assert [scores(row("dog " * n), metadata)[1] for n in (1, 2, 3, 4, 5)] == [1, 1, 0, 0, 0]


def test_thresholds_of_confidence():
    weak, middling, sure = (box("dog", 20 * i, 0, confidence=c) for i, c in enumerate((0.3, 0.31, 0.91)))
    assert by_class([weak, middling, sure], "single_object") == {"dog": [sure, middling]}
    assert by_class([weak, middling, sure], "counting") == {"dog": [sure]}
    many = [box("dog", i, 0, confidence=0.5 + i / 100) for i in range(20)]
    assert by_class(many, "colors")["dog"] == many[:3:-1]
    assert scores([weak], ONE) == (0, 0) and scores([middling], ONE) == (1, 1)


# Colours --------------------------------------------------------------------------------------------------------------

def test_a_colour():
    dog = row("dog")
    assert scores(dog, COLOUR, colours(x0="red")) == (1, 1)
    assert scores(dog, COLOUR, colours(x0="blue")) == (0.5, 0)
    assert scores([], COLOUR) == (0, 0)


def test_the_benchmark_looks_at_the_surest_objects_and_the_graded_score_wants_the_count():
    dogs = [box("dog", 0, 0, confidence=0.5), box("dog", 20, 0, confidence=0.9)]
    assert scores(dogs, COLOUR, colours(x20="blue")) == (0, 0)
    assert scores(dogs, COLOUR, colours(x20="red")) == (0, 1)
    assert scores(row("dog " * 4), COLOUR, colours(x0="red")) == (-1, 1)


def test_colours_of_several_objects_are_a_share():
    metadata = {"tag": "colors", "include": [{"class": "dog", "count": 2, "color": "red"}]}
    dogs = row("dog dog")
    assert scores(dogs, metadata, colours(x0="red", x20="red")) == (1, 1)
    assert scores(dogs, metadata, colours(x0="red", x20="blue")) == (0.75, 0)
    assert scores(dogs[:1], metadata) == (0.25, 0)


def test_colours_of_two_objects_do_not_mix():
    both = row("dog cat")
    assert scores(both, ATTRIBUTES, colours(x0="red", x20="blue")) == (1, 1)
    assert scores(both, ATTRIBUTES, colours(x0="red", x20="red")) == (0.75, 0)
    assert scores(both, ATTRIBUTES, colours(x0="blue", x20="red")) == (0.5, 0)
    assert scores(both[:1], ATTRIBUTES, colours(x0="red")) == (0.5, 0)


# Positions ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("left", "top", "expected"), [
    (0, 50, {"left of"}), (100, 50, {"right of"}), (50, 0, {"above"}), (50, 100, {"below"}),
    (0, 0, {"left of", "above"}), (100, 100, {"right of", "below"}),
    (50, 50, set()),     # the same place
    (48.5, 50, set()),   # within 0.1 of both widths
    (47, 50, set()),     # beyond it, by less than half of the distance
    (44, 50, {"left of"}),
    (0, 35, {"left of"}),  # the vertical distance is the smaller part
])
def test_relations(left, top, expected):
    assert relations(box("a", left, top), box("b", 50, 50)) == expected


def test_the_margin_grows_with_the_objects():
    small, large = box("a", 0, 0, 10), box("b", 30, 0, 10)
    assert relations(small, large) == {"left of"}
    wide = Detection("b", 1, (-165, 0, 235, 10))  # the same centre, 400 wide: the margin is 41 pixels
    assert relations(small, wide) == set()


def test_a_position():
    cat, left, right = box("cat", 50, 50), box("dog", 0, 50), box("dog", 90, 50)
    assert scores([cat, left], PLACE) == (1, 1)
    assert scores([cat, right], PLACE) == (0.75, 0)  # both counts 1, the position 0 and 1
    assert scores([cat], PLACE) == (pytest.approx(1 / 3), 0)
    assert scores([right], PLACE) == (pytest.approx(1 / 3), 0)
    assert scores([], PLACE) == (0, 0)


def test_a_position_where_there_are_more_than_asked_for():
    cat, far, left = box("cat", 50, 50), box("cat", 150, 50, confidence=0.5), box("dog", 0, 50)
    assert scores([cat, far, left], PLACE) == (pytest.approx(1 / 3), 1)  # 0 for two cats, 1 for the dog, 0 for its place
    assert scores([cat, left, box("dog", 100, 50, confidence=0.5)], PLACE) == (pytest.approx(1 / 3), 1)


def test_a_position_holds_between_all_of_the_objects():
    metadata = {"tag": "position", "include": [{"class": "cat", "count": 1},
                                               {"class": "dog", "count": 2, "position": ["left of", 0]}]}
    cat = box("cat", 50, 50)
    assert scores([cat, box("dog", 0, 50), box("dog", 10, 50)], metadata) == (1, 1)
    assert scores([cat, box("dog", 0, 50), box("dog", 100, 50)], metadata) == (0.75, 0)


def test_a_target_of_the_wrong_colour_is_no_target():
    metadata = {"tag": "position", "include": [{"class": "cat", "count": 1, "color": "red"},
                                               {"class": "dog", "count": 1, "position": ["left of", 0]}]}
    found = [box("cat", 50, 50), box("dog", 0, 50)]
    assert scores(found, metadata, colours(x50="red")) == (1, 1)
    assert scores(found, metadata, colours(x50="blue")) == (0.5, 0)


def test_a_target_that_is_not_in_its_own_place_is_no_target():
    metadata = PLACE | {"include": [*PLACE["include"], {"class": "bird", "count": 1, "position": ["above", 1]}]}
    cats, dog, bird = [box("cat", 50, 50), box("cat", 90, 50, confidence=0.5)], box("dog", 0, 50), box("bird", 0, 0)
    assert scores([cats[0], dog, bird], metadata) == (1, 1)
    assert scores([cats[0], box("dog", 150, 50), bird], metadata) == (pytest.approx(4 / 6), 0)  # 1, 1, 0, 1, 1, 0
    assert scores([*cats, dog, bird], metadata) == (pytest.approx(2 / 5), 1)  # 0, 1, 0, 1, 0


def test_of_a_wrong_colour_the_place_is_no_part():
    metadata = {"tag": "x", "include": [{"class": "cat", "count": 1},
                                        {"class": "dog", "count": 1, "color": "red", "position": ["left of", 0]}]}
    found = [box("cat", 50, 50), box("dog", 0, 50)]
    assert scores(found, metadata, colours(x0="red")) == (1, 1)
    assert scores(found, metadata, colours(x0="blue")) == (pytest.approx(2 / 3), 0)  # 1, 1, 0
    assert scores(found[:1], metadata) == (pytest.approx(1 / 3), 0)  # 1, 0, and one 0 for both


def test_reasons_say_why_the_benchmark_does_not_take_it():
    assert judge([box("cat", 0, 0)], PLACE, no_colours).reasons == ("dog: 0 found, 1 or more asked for",)
    assert judge(row("cat dog"), PLACE, no_colours).reasons == ("dog: not left of item 0 of include",)
    assert judge(row("dog " * 5), THREE, no_colours).reasons == ("dog: 5 found, 3 allowed",)
    assert judge(row("dog"), COLOUR, colours(x0="blue")).reasons == ("dog: blue found, 1 red asked for",)


# Metadata -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("metadata", [ONE, TWO, THREE, COLOUR, ATTRIBUTES, PLACE])
def test_good_metadata(metadata):
    assert metadata_problem(metadata) is None
    # Parquet fills what a row lacks with nulls.
    assert metadata_problem({"exclude": None} | metadata | {"include": [
        {"color": None, "position": None} | item for item in metadata["include"]]}) is None


def with_item(**changes):
    return {"tag": "x", "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1} | changes]}


@pytest.mark.parametrize(("metadata", "message"), [
    ({}, "has no tag; an example is"),
    ({"tag": 3, "include": ONE["include"]}, "has no tag"),
    ({"tag": "x"}, "includes no object"),
    ({"tag": "x", "include": {"dog": 1}}, "lists of objects"),
    ({"tag": "x", "include": ["dog"]}, "include[0] is a str"),
    ({"tag": "x", "include": [{"name": "dog", "count": 1}]}, "include[0] has no class (its keys are name, count)"),
    (with_item(count=0), "include[1] has the count 0"),
    (with_item(count=None), "include[1] has the count None"),
    (with_item(count=True), "include[1] has the count True"),
    (with_item(color="gren"), "include[1] has the color 'gren'; did you mean green?"),
    (with_item(position="left of"), "include[1] has the position 'left of'"),
    (with_item(position=["lefty of", 0]), "did you mean left of?"),
    (with_item(position=["left of", 1]), "include[1] is left of item 1, which is no earlier item"),
    (with_item(position=["left of", -1]), "no earlier item"),
    (with_item(position=["left of", "cat"]), "no earlier item"),
    (with_item() | {"exclude": [{"class": "dog"}]}, "exclude[0] has the count None"),
    (with_item(count=3) | {"exclude": [{"class": "dog", "count": 3}]}, "exclude[0] allows fewer than 3 of 'dog'"),
])
def test_bad_metadata_is_named(metadata, message):
    assert message in metadata_problem(metadata)


def test_an_index_may_be_a_text_as_in_parquet():
    metadata = with_item(position=["left of", "0"])
    assert metadata_problem(metadata) is None
    assert judge([box("cat", 50, 0), box("dog", 0, 0)], metadata, no_colours).geneval == 1


def test_names():
    assert classes_of(THREE) == ["dog"] and classes_of(PLACE) == ["cat", "dog"]
    assert len(COLOURS) == 10 and np.unique(COLOURS).size == 10
