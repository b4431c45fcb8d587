"""Checks of answers, where the kinds' own tests do not reach."""

import pytest

from radixkv.bench.families.problem import Problem
from radixkv.bench.kinds.answers import mostly_right_result, right_mention, right_result


@pytest.mark.parametrize(
    ("right", "given", "same"),
    [
        ("18", "18.0", True),
        ("18", "$18", True),
        ("1,050", "1050", True),
        ("-3", "- 3", False),
        ("0.5", ".5", True),
        ("18", "180", False),
        ("Garage", "garage", True),
        ("nan", "nan", True),
        ("inf", "infinity", False),
        ("18", "18 apples", False),
    ],
)
def test_results_are_compared_as_numbers_or_words(right, given, same):
    problem = Problem("How many?", f"Some.\n#### {right}")
    assert right_result(problem)([f" Well.\n#### {given}\n"]) is same
    assert mostly_right_result(problem)([f"#### {given}", ""]) is same


def test_a_problem_without_a_result_is_not_checked():
    problem = Problem("Why?", "Because.")
    assert right_result(problem) is mostly_right_result(problem) is right_mention(problem) is None


@pytest.mark.parametrize("text", [" $45.", " It costs 45 dollars.", " 45", " See (45)\nnothing"])
def test_a_mention_is_enough_without_the_mark(text):
    assert right_mention(Problem("How much?", "#### $45"))([text])


@pytest.mark.parametrize("text", ["", " 450", " 145", " four\n45", " 45, but then\n#### 44", " a45"])
def test_a_mention_is_a_word_of_the_first_line(text):
    assert not right_mention(Problem("How much?", "#### $45"))([text])
