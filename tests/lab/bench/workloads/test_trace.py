import itertools
from operator import eq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.catalog import load_workload
from radixkv.lab.bench.workloads.mooncake import TraceRequest, generate_trace
from radixkv.lab.bench.workloads.trace import Trace
from support.cases import examples
from support.json_lines import write_lines
from support.sessions import collect_requests


def line(ids, input_length=None, output_length=64, timestamp=0):
    return {
        "timestamp": timestamp,
        "input_length": 512 * len(ids) if input_length is None else input_length,
        "output_length": output_length,
        "hash_ids": ids,
    }


def load(folder, lines, **parameters):
    path = write_lines(folder / "trace.jsonl", *lines)
    return Trace(**{"num_prompts": len(lines), **parameters}).make(Source(dataset=path))


def prompts_of(load):
    return [request.prompt for request in collect_requests(load.sessions)]


def n_common(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_times_lengths_and_blocks_equal_those_of_the_trace(tmp_path):
    lines = [
        line([0, 1, 2], 1100, 7, timestamp=2000),
        line([0, 1, 3], 1500, 9, timestamp=2000),
        line([4], 3, 1, timestamp=3250),
    ]
    run = load(tmp_path, lines)
    assert run.counts == {}
    assert [session.arrival_s for session in run.sessions] == [0.0, 0.0, 1.25]
    assert [session.n_requests for session in run.sessions] == [1, 1, 1]
    first, second, third = collect_requests(run.sessions)
    assert [len(each.prompt) for each in (first, second, third)] == [1100, 1500, 3]
    assert [each.output_len for each in (first, second, third)] == [7, 9, 1]
    assert n_common(first.prompt, second.prompt) == 1024
    assert {token for each in (first, second, third) for token in each.prompt} <= set(range(256, 1024))


IDS = st.lists(st.integers(0, 5), min_size=1, max_size=5)
LINES = st.lists(st.tuples(IDS, st.integers(1, 512)), min_size=2, max_size=6)


@examples(60)
@given(lines=LINES, block_len=st.integers(1, 512), far=st.integers(0, 2**62))
def test_prompts_share_exactly_the_blocks_that_they_share_in_the_trace(tmp_path_factory, lines, block_len, far):
    lines = [line([far + each for each in ids], 512 * len(ids) - 512 + last) for ids, last in lines]
    n_digits = 1
    while 768**n_digits <= far + 5:
        n_digits += 1
    block_len = max(block_len, n_digits)
    prompts = prompts_of(load(tmp_path_factory.getbasetemp(), lines, block_len=block_len))
    for (one, a), (other, b) in itertools.combinations(zip(lines, prompts, strict=True), 2):
        n_blocks = n_common(one["hash_ids"], other["hash_ids"])
        assert n_common(a, b) == min(n_blocks * block_len, len(a), len(b))
    for each, prompt in zip(lines, prompts, strict=True):
        assert -(-len(prompt) // block_len) == len(each["hash_ids"])
        assert len(prompt) == -(-each["input_length"] * block_len // 512)


@examples(60)
@given(one=st.integers(0, 2**63 - 1), other=st.integers(0, 2**63 - 1), times=st.integers(1, 10**6))
def test_different_blocks_differ_within_their_first_tokens(tmp_path_factory, one, other, times):
    near = one + 768 * times if one < 2**62 else one - 768 * times  # the first digit is the same
    prompts = prompts_of(load(tmp_path_factory.getbasetemp(), [line([each]) for each in (one, other, near)]))
    pairs = itertools.combinations((one, other, near), 2)
    for (a, b), (p, q) in zip(pairs, itertools.combinations(prompts, 2), strict=True):
        assert (a == b) == (n_common(p, q) == 512)
        if a != b:
            assert n_common(p, q) < 7
            assert sum(map(eq, p[7:], q[7:])) < 20  # as many as by chance
    assert n_common(prompts[0], prompts[2]) >= 1


def test_words_share_what_tokens_share(tmp_path):
    lines = [line([0, 1, 2], 1100), line([0, 1, 3], 1500), line([0, 1])]
    words = [prompt.split(" ") for prompt in prompts_of(load(tmp_path, lines, form="text"))]
    assert [len(each) for each in words] == [1100, 1500, 1024]
    assert [n_common(a, b) for a, b in itertools.combinations(words, 2)] == [1024, 1024, 1024]


def test_requests_above_the_context_are_left_out_and_counted(tmp_path):
    lines = [line([0, 1], 1000, 24), line([0, 2], 1000, 25, timestamp=500), line([3], 5, 999, timestamp=900)]
    run = load(tmp_path, lines, max_context=1024)
    assert [len(prompt) for prompt in prompts_of(run)] == [1000, 5]
    assert [session.arrival_s for session in run.sessions] == [0.0, 0.9]
    assert run.counts == {"too_long": 1}


def test_scaling_uses_the_longest_blocks_that_fit_the_context(tmp_path):
    lines = [line([0, 1, 2, 3], 2048, 100), line([0, 4], 513, 10)]
    run = load(tmp_path, lines, max_context=300, too_long="scale")
    first, second = collect_requests(run.sessions)
    assert (len(first.prompt), first.output_len) == (4 * 71, 14)  # blocks of 72: 288 + 15 tokens
    assert (len(second.prompt), second.output_len) == (72, 2)
    assert n_common(first.prompt, second.prompt) == 71
    assert run.counts == {"scaled": 2}
    assert load(tmp_path, lines, max_context=2148, too_long="scale").counts == {}


def test_scaled_requests_that_are_still_too_long_are_left_out(tmp_path):
    run = load(tmp_path, [line([0, 1]), line([0])], block_len=16, max_context=20)
    assert [len(prompt) for prompt in prompts_of(run)] == [16]
    assert run.counts == {"too_long": 1, "scaled": 1}


def test_max_output_len_shortens_answers(tmp_path):
    run = load(tmp_path, [line([0], output_length=200), line([0], output_length=30)], max_output_len=50)
    assert [request.output_len for request in collect_requests(run.sessions)] == [50, 30]
    assert run.counts == {"shortened_answers": 1}


def test_a_part_of_a_trace_starts_at_time_0(tmp_path):
    lines = [line([number], timestamp=1000 * number) for number in range(6)]
    run = load(tmp_path, lines, start=2, num_prompts=3)
    assert [session.arrival_s for session in run.sessions] == [0.0, 1.0, 2.0]
    assert prompts_of(run) == prompts_of(load(tmp_path, lines))[2:5]


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"max_context": 100}, "max_context 100.* 576 tokens"),
        ({"num_prompts": 3}, "has 2 requests; the workload needs 3"),
        ({"num_prompts": 2, "start": 1}, "has 2 requests; the workload needs 3"),
        ({"max_context": 2, "too_long": "scale"}, "blocks of 0 tokens"),
        ({"block_len": 2, "vocab_size": 258}, "blocks of 2 tokens .*4 .*3"),
        ({"block_len": 513}, "block_len 513 .*512"),
        ({"too_long": "scale"}, "needs max_context"),
        ({"vocab_size": 257}, "vocab_size 257 .*first_token 256"),
    ],
)
def test_unusable_parameters_are_refused(tmp_path, parameters, fault):
    with pytest.raises(ConfigError, match=fault):
        load(tmp_path, [line([0, 1, 2]), line([4])], **parameters)


def test_the_shipped_workload_needs_no_file_and_fits_the_embedded_model():
    workload = load_workload("trace")
    run = workload.make(Source(seed=1))
    assert len(run.sessions) == workload.num_prompts
    for request in collect_requests(run.sessions):
        assert len(request.prompt) + request.output_len <= 8192


def test_a_synthetic_trace_has_sessions_that_grow():
    requests = generate_trace(5, 400)
    assert [request.timestamp for request in requests] == sorted(request.timestamp for request in requests)
    for request in requests:  # valid as a line of a file
        assert len(request.hash_ids) == -(-request.input_length // 512)
        assert request.hash_ids[0] == 0
    before: dict[int, TraceRequest] = {}
    n_later = 0
    for request in requests:
        if (last := before.get(request.hash_ids[1])) is not None:
            n_later += 1
            whole = last.hash_ids[: last.input_length // 512]
            assert request.hash_ids[: len(whole)] == whole
            assert request.input_length > last.input_length + last.output_length
        before[request.hash_ids[1]] = request
    assert 100 < n_later < 350
