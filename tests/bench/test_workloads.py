import ast
import json
import operator
import re
from itertools import islice

import pytest

from radixkv.bench.problems import made_problems
from radixkv.bench.workloads import WorkloadChanges, load_workload, warmup_sessions, workload_names
from radixkv.errors import ConfigError


def write(folder, problems):
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return path


def calculate(node):
    if isinstance(node, ast.Constant):
        return node.value
    kinds = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
    return kinds[type(node.op)](calculate(node.left), calculate(node.right))


def test_the_shipped_workload_has_the_published_defaults():
    workload = load_workload("fewshot")
    values = (workload.num_prompts, workload.num_shots, workload.output_len, workload.max_concurrency)
    assert values == (48, 8, 32, 8)


def test_every_shipped_workload_loads_and_is_as_its_kind_has_it():
    assert workload_names() == ["fewshot", "multiturn", "unshared"]
    for name in workload_names():
        workload = load_workload(name)
        assert workload == type(workload)()
        assert type(workload).__struct_config__.tag == name


def prompts_of(name, seed=0, dataset=None, **changes):
    """Of a workload whose sessions have one turn."""
    return [prompt for (prompt,) in load_workload(name, WorkloadChanges(**changes)).sessions(seed, dataset)]


def test_prompts_share_the_shots_and_ask_different_questions():
    prompts = prompts_of("fewshot")
    shots = prompts[0][: prompts[0].rindex("Question: ")]
    assert all(prompt.startswith(shots) for prompt in prompts)
    questions = [prompt[len(shots) :] for prompt in prompts]
    assert len(set(questions)) == 48
    assert all(q.startswith("Question: ") and q.endswith("\nAnswer:") and q.count("\n") == 1 for q in questions)
    assert len(re.findall(r"^#### -?[\d.]+$", shots, re.MULTILINE)) == shots.count("Question: ") == 8
    assert not any(question.removesuffix("\nAnswer:") in shots for question in questions)


def test_chats_share_the_system_prompt_and_ask_different_questions():
    workload = load_workload("multiturn")
    sessions = workload.sessions(0, None)
    assert (len(sessions), {len(turns) for turns in sessions}) == (16, {4})
    system = sessions[0][0][: sessions[0][0].rindex("Question: ")]
    assert system.count("Question: ") == system.count("\n#### ") == 3
    assert all(turns[0].startswith(system) for turns in sessions)
    asked = [turn for turns in sessions for turn in (turns[0][len(system) :], *turns[1:])]
    assert len(set(asked)) == 64
    assert all(turn.count("Question: ") == 1 and turn.endswith("?\nAnswer:") for turn in asked)
    assert all(turn.startswith("\n\nQuestion: ") for turns in sessions for turn in turns[1:])


def test_prompts_that_share_nothing_differ_from_the_first_word():
    prompts = prompts_of("unshared")
    assert len(prompts) == len({prompt.split()[0] for prompt in prompts}) == 32
    assert {prompt.count("Question: ") for prompt in prompts} == {5}
    lines = [line for prompt in prompts for line in prompt.split("Question: ")[1:]]
    assert len({line.split("\n")[0] for line in lines}) == 32 * 5


@pytest.mark.parametrize("name", ["fewshot", "multiturn", "unshared"])
def test_the_seed_decides_the_text(name):
    workload = load_workload(name)
    assert workload.sessions(3, None) == workload.sessions(3, None)
    assert workload.sessions(3, None)[0] != workload.sessions(4, None)[0]


def test_made_problems_are_right_different_and_as_long_as_those_of_schoolbooks():
    problems = list(islice(made_problems(1), 2000))
    assert len({problem.question for problem in problems}) == 2000
    for problem in problems:
        steps = re.findall(r"([\d.*+/() -]+) = \$?([\d.]+)", problem.answer)
        assert steps, problem.answer
        for left, right in steps:
            assert calculate(ast.parse(left.strip(" -"), mode="eval").body) == pytest.approx(
                float(right.rstrip("."))
            ), problem.answer
        assert problem.answer.rsplit("#### ", 1)[1] == steps[-1][1].rstrip(".")
    words = sum(len(problem.question.split()) for problem in problems) / len(problems)
    assert 40 <= words <= 60
    assert 40 <= sum(len(problem.answer.split()) for problem in problems) / len(problems) <= 70


def test_no_question_is_asked_twice_however_many_there_are():
    problems = islice(made_problems(0), 60000)  # of that many draws, some are alike
    assert len({problem.question for problem in problems}) == 60000


def test_a_data_set_gives_its_first_problems_as_shots(tmp_path):
    path = write(tmp_path, [{"question": f"q{n}?", "answer": f"a{n}\n#### {n}", "more": 1} for n in range(5)])
    shots = "Question: q0?\nAnswer: a0\n#### 0\n\nQuestion: q1?\nAnswer: a1\n#### 1\n\n"
    prompts = prompts_of("fewshot", 7, path, num_prompts=3, num_shots=2)
    assert prompts == [f"{shots}Question: q{n}?\nAnswer:" for n in (2, 3, 4)]
    changes = WorkloadChanges(num_sessions=2, num_turns=2, num_shots=1)
    (first, second), (third, fourth) = load_workload("multiturn", changes).sessions(7, path)
    assert first.endswith("Question: q0?\nAnswer: a0\n#### 0\n\nQuestion: q1?\nAnswer:")
    assert (second, fourth) == ("\n\nQuestion: q2?\nAnswer:", "\n\nQuestion: q4?\nAnswer:")
    assert third == first.replace("q1", "q3")
    assert prompts_of("unshared", 7, path, num_prompts=2, num_shots=1) == [
        "1. Question: q0?\nAnswer: a0\n#### 0\n\nQuestion: q1?\nAnswer:",
        "2. Question: q2?\nAnswer: a2\n#### 2\n\nQuestion: q3?\nAnswer:",
    ]


def test_a_data_set_that_is_too_short_names_both_counts(tmp_path):
    path = write(tmp_path, [{"question": "q", "answer": "a"}] * 10)
    with pytest.raises(ConfigError, match="has 10 problems; the workload needs 56"):
        load_workload("fewshot").sessions(0, path)


@pytest.mark.parametrize(
    "line", [b"{oops", b'{"question": "q"}', b'{"question": 1, "answer": "a"}', b'["q", "a"]', b"\xff"]
)
def test_a_line_in_another_format_is_named(tmp_path, line):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"line 3 of .*problems\.jsonl is not"):
        load_workload("fewshot").sessions(0, path)


def test_a_data_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the data set .*none\.jsonl: No such file"):
        load_workload("fewshot").sessions(0, tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_workload("fewshot").sessions(0, tmp_path)


def test_a_workload_may_be_a_file_and_changes_go_over_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "fewshot"\nnum_prompts = 5\nnum_shots = 1\n')
    workload = load_workload(str(path), WorkloadChanges(num_shots=0, output_len=9))
    assert (workload.num_prompts, workload.num_shots, workload.output_len) == (5, 0, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "nothing"', "nothing"),
        ("num_prompts = 3", "has no kind"),
        ('kind = "fewshot"\nnum_prompt = 3', "num_prompt"),
        ('kind = "fewshot"\nnum_prompts = "3"', "num_prompts"),
        ('kind = "fewshot"\nnum_prompts = 0', "num_prompts 0 must be between 1"),
        ("kind = ", "is not TOML"),
    ],
)
def test_a_wrong_workload_file_is_one_clear_error(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_workload(str(path))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("multiturn", {"num_prompts": 3}, "workload 'multiturn' has no num_prompts; it has .*num_sessions"),
        ("fewshot", {"num_turns": 3}, "workload 'fewshot' has no num_turns"),
        ("unshared", {"num_sessions": 3}, "workload 'unshared' has no num_sessions"),
        ("multiturn", {"num_turns": 0}, "num_turns 0 must be between 1"),
        ("multiturn", {"num_sessions": 10**7}, "num_sessions 10000000 must be between 1 and 1000000"),
        ("unshared", {"num_shots": -1}, "num_shots -1 must be between 0"),
    ],
)
def test_a_change_that_the_kind_does_not_take_is_named(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_workload(name, WorkloadChanges(**changes))


def test_an_unknown_workload_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"'fewshots' is unknown; use one of fewshot"):
        load_workload("fewshots")
    with pytest.raises(ConfigError, match="No such file"):
        load_workload("nowhere/fewshot.toml")


def test_warm_up_text_begins_like_no_prompt():
    warmup = warmup_sessions(4, 0)
    firsts = [load_workload(name).sessions(0, None)[0] for name in workload_names()]
    assert len({turns[0][:4] for turns in [*warmup, *firsts]}) == 7
    assert warmup == warmup_sessions(4, 0)
