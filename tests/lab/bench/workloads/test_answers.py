"""Checks of answers, beyond the tests of the workloads."""

import pytest

from radixkv.lab.bench.workloads.problems import Problem, majority_result_check, mention_check, result_check
from support.sessions import said


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
        ("Paris, France", "paris, France", True),
        ("Paris, France", "Paris France", False),
        ("1, 2 and 13", "1, 2 and 13", True),
        ("1, 2 and 13", "12 and 13", False),
        ("inf", "infinity", False),
        ("18", "18 apples", False),
    ],
)
def test_results_are_compared_as_numbers_or_words(right, given, same):
    problem = Problem("How many?", f"Some.\n#### {right}")
    assert result_check(problem)(said(f" Well.\n#### {given}\n")) is same
    assert majority_result_check(problem)(said(f"#### {given}", "")) is same


def test_a_problem_without_a_result_is_not_checked():
    problem = Problem("Why?", "Because.")
    assert result_check(problem) is majority_result_check(problem) is mention_check(problem) is None


@pytest.mark.parametrize(
    ("right", "text"),
    [
        ("$45", " $45."),
        ("$45", " It costs 45 dollars."),
        ("$45", " 45"),
        ("$45", " See (45)\nnothing"),
        ("Paris, France", " It is in Paris, France."),
        ("paris, france", " #### Paris, France"),
        ("1,050", " It is 1050."),
        ("1050", " That makes $1,050 in all"),
        ("1050", " $1,050.00."),
        ("18", " It costs $18.00, or 18,500 cents"),
        ("0.5", " .5 litres"),
        ("-3", " It is -3 degrees"),
        ("3", " 10 - 3 - 4 = 3"),
        ("3", " Of (3)"),
        ("10:15", " At 10:15."),
        ("1,5 kg", " 15 kg"),
        ("C++", " In C++, mostly"),
        ("nan", " Ask Nan."),
    ],
)
def test_without_the_mark_a_mention_is_enough_and_compared_as_a_result_is(right, text):
    assert mention_check(Problem("Which?", f"#### {right}"))(said(text))


@pytest.mark.parametrize(
    ("right", "text"),
    [
        ("18", " 18.5"),
        ("18", " 18,500"),
        ("18", " 2.18"),
        ("18", " at 18:30"),
        ("18", " at 9:18"),
        ("18", " 18th"),
        ("3", " It is -3 degrees"),
        ("3", " -$3"),
        ("3", " 2026-03-05"),
        ("-3", " 3"),
        ("5 kg", " 3.5 kg"),
        ("10:15", " 10:15:30"),
        ("Paris, France", " Paris. France"),
        ("one", " twenty-one"),
        ("nan", " nano"),
        ("$45", ""),
        ("$45", " 450"),
        ("$45", " 145"),
        ("$45", " four\n45"),
        ("$45", " 45, but then\n#### 44"),
        ("$45", " a45"),
    ],
)
def test_a_mention_must_be_a_word_or_number_of_the_first_line(right, text):
    assert not mention_check(Problem("Which?", f"#### {right}"))(said(text))
