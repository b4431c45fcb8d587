import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.catalog import load_workload, warmup_sessions, workload_names
from support.sessions import collect_requests, comparable_fields, make

NAMES = (
    "agents chat fewshot judge long-document-qa multiturn "
    "pressure rag self-consistency tool-pauses trace tree-of-thought unshared"
).split()


def test_every_shipped_workload_loads():
    assert workload_names() == NAMES
    for name in NAMES:
        assert type(load_workload(name)).__struct_config__.tag == name


@pytest.mark.parametrize("name", sorted({*NAMES} - {"trace"}))
def test_a_shipped_workload_has_the_defaults_of_its_class(name):
    workload = load_workload(name)
    assert workload == type(workload)()


def test_overrides_replace_the_parameters_of_a_workload_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "fewshot"\nnum_prompts = 5\nnum_shots = 1\n')
    workload = load_workload(str(path), num_shots=0, output_len=9)
    assert (workload.num_prompts, workload.num_shots, workload.output_len) == (5, 0, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "nothing"', "kind 'nothing'.* fewshot, multiturn, .*trace"),
        ("kind = [1]", r"kind \[1\]"),
        ("num_prompts = 3", "has no kind"),
        ('kind = "fewshot"\nnum_prompt = 3', "num_prompt;.* num_prompts, num_shots"),
        ('kind = "fewshot"\nnum_prompts = "x"', "toml': num_prompts is 'x'"),
        ('kind = "trace"\nmax_context = "8k"', "max_context is '8k'"),
        ('kind = "trace"\nform = "xml"', 'form is \'xml\'.* "tokens" or "text"'),
        ('kind = "fewshot"\nnum_prompts = 0', "num_prompts 0 "),
        ("kind = ", "is not TOML"),
        ("a = " + 5000 * "[", "is not TOML"),
        ('kind = "tree-of-thought"\nwidth = 2\nbeam = 3', "beam 3 .*width 2"),
        ('kind = "self-consistency"\nnum_samples = 65', "num_samples 65 .*64"),
        ('kind = "judge"\nnum_facts = 10.5', "num_facts is 10.5"),
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
        ("multiturn", {"num_prompts": 3}, "'multiturn' .*num_prompts.* num_sessions"),
        ("fewshot", {"num_turns": 3}, "'fewshot' .*num_turns"),
        ("unshared", {"num_sessions": 3}, "'unshared' .*num_sessions"),
        ("multiturn", {"num_turns": 0}, "num_turns 0 "),
        ("multiturn", {"num_sessions": 10**7}, "num_sessions 10000000 .*1000000"),
        ("unshared", {"num_shots": -1}, "num_shots -1 "),
        ("judge", {"num_shots": 1}, "'judge' .*num_shots.* num_documents"),
        ("tree-of-thought", {"width": 1}, "beam 2 .*width 1"),
        ("long-document-qa", {"num_questions": 0}, "num_questions 0 "),
    ],
)
def test_an_override_that_is_no_parameter_is_named(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_workload(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("judge", {"num_questions": 20, "num_facts": 10}, "20 questions need as many facts; there are 10"),
        (
            "long-document-qa",
            {"num_questions": 20, "num_facts": 10},
            "20 questions need as many facts; there are 10",
        ),
        ("judge", {"num_facts": 2001}, "1 to 2000 facts, not 2001"),
        (
            "pressure",
            {"num_turns": 3, "num_questions": 4, "num_facts": 11},
            "12 questions need as many facts; there are 11",
        ),
        ("rag", {"num_chunks": 17}, "num_chunks 17 must be at most num_documents 16"),
        ("rag", {"num_documents": 101}, "a corpus has at most 2000 facts, not 2020"),
        ("rag", {"num_questions": 21}, "21 questions need as many facts"),
    ],
)
def test_impossible_sizes_are_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(name, **changes)


def test_an_unknown_workload_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"'fewshots' .*agents, .*fewshot, "):
        load_workload("fewshots")
    with pytest.raises(ConfigError, match="No such file"):
        load_workload("nowhere/fewshot.toml")


def test_warm_up_texts_share_no_prefix_with_prompts():
    warmup = collect_requests(warmup_sessions(4, 0))
    prompts = [collect_requests(make(name).sessions[:1])[0].prompt for name in NAMES]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    assert len({request.prompt[:4] for request in warmup} | {text[:4] for text in texts}) >= 4 + 3
    assert not {request.prompt[:4] for request in warmup} & {text[:4] for text in texts}
    assert list(map(comparable_fields, warmup)) == list(
        map(comparable_fields, collect_requests(warmup_sessions(4, 0)))
    )
