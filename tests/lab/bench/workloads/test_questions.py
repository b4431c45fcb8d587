"""Workloads with word problems."""

import re
from collections import Counter
from itertools import islice, pairwise

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.session import BenchRequest
from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.catalog import load_workload
from radixkv.lab.bench.workloads.tree_of_thought import best
from support.json_lines import write_lines
from support.sessions import collect_requests, collect_turns, common_prefix, make, said

ANSWERS = {problem.question: problem.answer for problem in islice(generate_problems(0), 1000)}


def prompts_of(name, *source, **changes):
    return [request.prompt for request in collect_requests(make(name, *source, **changes).sessions)]


def question_of(request: BenchRequest):
    return re.fullmatch(r".*Question: (.*)\nAnswer:.*?", request.prompt, re.DOTALL).group(1)


def expected_answer(request: BenchRequest):
    """Returns the answer of the request's problem."""
    return ANSWERS[question_of(request)]


def test_prompts_share_the_examples_and_have_different_questions():
    prompts = prompts_of("fewshot")
    shots = prompts[0][: prompts[0].rindex("Question: ")]
    assert all(prompt.startswith(shots) for prompt in prompts)
    questions = [prompt[len(shots) :] for prompt in prompts]
    assert len(set(questions)) == 48
    assert all(q.startswith("Question: ") and q.endswith("\nAnswer:") and q.count("\n") == 1 for q in questions)
    assert len(re.findall(r"^#### -?[\d.]+$", shots, re.MULTILINE)) == shots.count("Question: ") == 8
    assert not any(question.removesuffix("\nAnswer:") in shots for question in questions)


def test_chats_share_the_system_prompt_and_have_different_questions():
    sessions = make("multiturn").sessions
    chats = [
        [turn[0].prompt for turn in collect_turns(session, lambda _: [" The answer."])] for session in sessions
    ]
    assert (len(chats), {len(chat) for chat in chats}) == (16, {4})
    system = chats[0][0][: chats[0][0].rindex("Question: ")]
    assert system.count("Question: ") == system.count("\n#### ") == 3
    assert all(chat[0].startswith(system) for chat in chats)
    for chat in chats:
        for before, after in pairwise(chat):
            assert after.startswith(before + " The answer.\n\nQuestion: ")
    questions = [chat[-1][len(system) :].split(" The answer.\n\n") for chat in chats]
    assert len({question for asked in questions for question in asked}) == 64


def test_recorded_answers_of_chats_are_right():
    for session in make("multiturn", history="recorded").sessions:
        requests = [turn[0] for turn in collect_turns(session)]
        for before, after in pairwise(requests):
            answer, _, _ = after.prompt.removeprefix(before.prompt).partition("\n\nQuestion: ")
            assert after.prompt.startswith(before.prompt)
            assert before.check(said(answer))


def test_prompts_that_share_nothing_differ_from_the_first_word():
    prompts = prompts_of("unshared")
    assert len(prompts) == len({prompt.split()[0] for prompt in prompts}) == 64
    assert {prompt.count("Question: ") for prompt in prompts} == {5}
    lines = [line for prompt in prompts for line in prompt.split("Question: ")[1:]]
    assert len({line.split("\n")[0] for line in lines}) == 64 * 5


def test_samples_of_one_prompt_are_choices_of_one_request_with_its_own_seed():
    requests = collect_requests(make("self-consistency", num_samples=3).sessions)
    assert len(requests) == 48
    assert {(request.n, request.temperature) for request in requests} == {(3, 0.7)}
    assert len({request.seed for request in requests}) == 48
    shared = common_prefix([request.prompt for request in requests])
    assert shared.count("#### ") == 4


@pytest.mark.parametrize("name", ["fewshot", "multiturn", "unshared"])
def test_the_expected_answer_is_correct_and_that_of_another_question_is_not(name):
    for request in collect_requests(make(name).sessions):
        answer, result = expected_answer(request), float(expected_answer(request).split("#### ")[1])
        assert request.check(said(f" {answer}\n\nQuestion: And then?\nAnswer: #### 5"))
        assert request.check(said(f" ####  ${result:,.2f}.\n"))
        assert not request.check(said(f" {answer.split('####')[0]}"))
        assert not request.check(said(f" {answer}1"))
        assert request.output_len == 48


def test_the_majority_of_samples_decides():
    (request, *_) = collect_requests(make("self-consistency", num_samples=5).sessions)
    answer = expected_answer(request)
    wrong, other = answer + "0", answer + "00"
    assert request.check(said(answer, wrong, answer, other, other + "0"))
    assert request.check(said(answer, "no idea", "no idea", "no idea", "no idea"))
    assert request.check(said(answer, wrong, "", "", ""))
    assert not request.check(said(wrong, answer, "", "", ""))
    assert not request.check(said(answer, wrong, wrong, other, other + "0"))
    assert not request.check(said(*[""] * 5))


def step(request: BenchRequest):
    """Returns the next line of the expected answer, wrong for odd seeds, followed by more text."""
    answer = request.prompt.rpartition("\nAnswer:")[2]
    lines = (" " + expected_answer(request)).splitlines(keepends=True)
    line = lines[min(answer.count("\n"), len(lines) - 1)].rstrip("\n")
    return [line + ("?" if request.seed % 2 else "") + "\nchatter"]


def test_a_search_continues_from_its_beam():
    workload = load_workload("tree-of-thought")
    for session in workload.make(Source()).sessions:
        turns = collect_turns(session, step)
        assert [len(turn) for turn in turns] == [4, 8, 8, 8]
        heads = {request.prompt for request in turns[0]}
        assert len(heads) == 1
        (head,) = heads
        for before, after in pairwise(turns):
            grown = [request.prompt + step(request)[0].split("\n")[0] + "\n" for request in before]
            branches = list(dict.fromkeys(request.prompt for request in after))
            assert branches == list(dict.fromkeys(best(grown, 2)))
            assert [request.prompt for request in after] == [prompt for prompt in best(grown, 2) for _ in range(4)]
        assert all(prompt.startswith(head) for turn in turns for prompt in [request.prompt for request in turn])
        assert len({request.seed for turn in turns for request in turn}) == 28


def test_tasks_of_a_search_share_worked_examples():
    heads = [collect_turns(session)[0][0].prompt for session in make("tree-of-thought").sessions]
    assert len(set(heads)) == 8
    assert common_prefix(heads).count("#### ") == 4


def test_a_search_is_correct_if_its_last_branch_is():
    (session, *_) = make("tree-of-thought", num_prompts=1).sessions
    *others, last = collect_turns(session, lambda request: [" #### 5\n" if request.seed % 2 else " thinking\n"])
    assert all(request.check is None for turn in others for request in turn)
    result = expected_answer(last[0]).split("#### ")[1]
    for request in last:
        answer = request.prompt.rpartition("\nAnswer:")[2]
        assert request.check(said(f"\n#### {result}")) == ("####" not in answer)
    (session, *_) = make("tree-of-thought", num_prompts=1).sessions
    for request in collect_turns(session, lambda _: [f" #### {result}\n"])[-1]:
        assert request.check(said("anything"))


def test_the_best_branches_are_the_most_frequent():
    assert best(list("abcbcc"), 2) == ["c", "b"]
    assert best(list("abcd"), 3) == ["a", "b", "c"]
    assert best(list("aaaa"), 2) == ["a", "a"]
    assert best(list("aaba"), 3) == ["a", "b", "a"]
    branches = list("mississippi")
    assert Counter(best(branches, len(branches))) == Counter(branches)


def test_a_search_of_any_size_sends_n_requests():
    for width, depth in ((2, 1), (3, 2), (5, 3)):
        for session in make("tree-of-thought", width=width, depth=depth).sessions:
            assert session.n_requests == width * (1 + 2 * (depth - 1))
            assert [len(turn) for turn in collect_turns(session)] == [width, *[2 * width] * (depth - 1)]
    (line, *_) = make("tree-of-thought", width=1, beam=1).sessions
    assert [len(turn) for turn in collect_turns(line)] == [1] * 4
    with pytest.raises(ConfigError, match="beam 2 must be at most width 1"):
        load_workload("tree-of-thought", width=1)


def write(folder, count):
    problems = [{"question": f"q{n}?", "answer": f"a{n}\n#### {n}", "more": 1} for n in range(count)]
    return write_lines(folder / "problems.jsonl", *problems)


def test_a_data_set_gives_its_first_problems_as_shots(tmp_path):
    source = Source(7, write(tmp_path, 5))
    shots = "Question: q0?\nAnswer: a0\n#### 0\n\nQuestion: q1?\nAnswer: a1\n#### 1\n\n"
    prompts = prompts_of("fewshot", source, num_prompts=3, num_shots=2)
    assert prompts == [f"{shots}Question: q{n}?\nAnswer:" for n in (2, 3, 4)]
    assert prompts_of("self-consistency", source, num_prompts=3, num_shots=2) == prompts
    sessions = make("multiturn", source, num_sessions=2, num_turns=2, num_shots=1).sessions
    (first, second), (third, fourth) = ([turn[0].prompt for turn in collect_turns(session)] for session in sessions)
    assert first.endswith("Question: q0?\nAnswer: a0\n#### 0\n\nQuestion: q1?\nAnswer:")
    assert second == first + "Yes.\n\nQuestion: q2?\nAnswer:"
    assert third == first.replace("q1", "q3")
    assert fourth == third + "Yes.\n\nQuestion: q4?\nAnswer:"
    assert prompts_of("unshared", source, num_prompts=2, num_shots=1) == [
        "1. Question: q0?\nAnswer: a0\n#### 0\n\nQuestion: q1?\nAnswer:",
        "2. Question: q2?\nAnswer: a2\n#### 2\n\nQuestion: q3?\nAnswer:",
    ]
    assert {
        request.prompt for request in collect_turns(make("tree-of-thought", source, num_prompts=1).sessions[0])[0]
    } == {"".join(f"Question: q{n}?\nAnswer: a{n}\n#### {n}\n\n" for n in range(4)) + "Question: q4?\nAnswer:"}


@pytest.mark.parametrize(
    ("name", "n_needed"),
    [("fewshot", 56), ("multiturn", 67), ("unshared", 320), ("self-consistency", 52), ("tree-of-thought", 12)],
)
def test_the_error_for_a_short_data_set_has_both_counts_and_the_parameters(tmp_path, name, n_needed):
    make(name, Source(0, write(tmp_path, n_needed)))
    expected = f"has {n_needed - 1} problems; the workload needs {n_needed}; give a longer file, or lower num_"
    with pytest.raises(ConfigError, match=expected) as refused:
        make(name, Source(0, write(tmp_path, n_needed - 1)))
    few = dict.fromkeys(re.findall(r"num_\w+", str(refused.value).partition("lower")[2]), 1)
    make(name, Source(0, write(tmp_path, n_needed - 1)), **few)
