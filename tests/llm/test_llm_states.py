"""Prompts of models with recurrent layers go on from states in the tree, with the bits of cold ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from radixkv import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from radixkv.checkpoints import resolve
from support import hits_in_bfloat16
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, load_oracle, random_ids
from support.greedy_oracle import check_greedy

END = 2
"""A token that ends a message, as the checkpoint's configuration says."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
ARCHITECTURES = ["qwen3.5", "qwen3.5-moe", "qwen3-next", "nemotron-h"]

of_all_of_qwen = pytest.mark.parametrize("folder", rest_nightly(ARCHITECTURES, kept=(0, 1, 2)), indirect=True)
"""With every change; other tests run with every change for one architecture."""


@pytest.fixture(scope="module", params=rest_nightly(ARCHITECTURES, kept=(0,)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(folder, **{**HYBRIDS[request.param], "eos_token_id": END})
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 4096, **settings}
    return LLM(folder, device="cpu", **settings)


def text(n: int, seed: int) -> list[int]:
    return [one for one in random_ids(2 * n, seed=seed) if one != END][:n]


def answers(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(one)} for one in prompts], params, use_tqdm=False)


def bits(output: RequestOutput) -> Any:
    """Returns the tokens of an answer with all their logprobs."""
    (answer,) = output.outputs
    return bits_of(answer)


def bits_of(answer: CompletionOutput) -> Any:
    assert answer.logprobs is not None
    return [{token: one.logprob for token, one in position.items()} for position in answer.logprobs]


SYSTEM = [*text(141, 1), END]
CHAT = [*SYSTEM, *text(40, 2), END, *text(3, 3)]
PLAIN = text(300, 7)
PROMPTS = [
    CHAT,
    [*SYSTEM, *text(75, 4), END, *text(3, 3)],
    [*CHAT[:-3], *text(30, 5), END, *text(60, 6), END, *text(3, 3)],
    PLAIN,
    *([*PLAIN[:210], *text(90, seed)] for seed in (8, 9, 10)),
    PLAIN,
    CHAT,
]
"""The second chat finds the end of the system prompt; each turn that of the one before, though the template has
changed its answer; prompts without messages find where the one before them forked off."""
N_CACHED = [0, 128, 128, 0, 0, 192, 192, 256, 128]


@of_all_of_qwen
def test_chats_behind_one_system_prompt_go_on_from_states_with_the_bits_of_cold_ones(folder: Path) -> None:
    """The answers are also those of Transformers, which computes in blocks and rounds differently."""
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = [bits(one) for one in answers(llm, PROMPTS)]
    with opened(folder) as llm:
        warm = [answers(llm, [one])[0] for one in PROMPTS]
    assert [bits(one) for one in warm] == cold
    assert [one.num_cached_tokens for one in warm] == N_CACHED
    oracle = load_oracle(resolve(str(folder)))
    check_greedy(oracle, [(one.prompt_token_ids, one.outputs[0].token_ids) for one in warm], margin=0.02)


def test_in_bfloat16_prompts_that_go_on_from_states_have_nearly_the_scores_of_cold_ones(folder: Path) -> None:
    with opened(folder, dtype="bfloat16") as llm:
        warm = hits_in_bfloat16.answer_prompts(llm, END)
    assert [one.num_cached_tokens for one in warm] == hits_in_bfloat16.N_CACHED
    with opened(folder, dtype="bfloat16", enable_prefix_caching=False) as llm:
        assert hits_in_bfloat16.typical_error(warm, llm) < 0.1


def chat(llm: LLM, params: SamplingParams, seed: int = 0, *, n_turns: int = 3, n_left_out: int = 0) -> Any:
    """Returns the prompt of each turn and its answer. Each next turn repeats the answers without their first
    tokens, as where a template leaves reasoning out."""
    prompt = [*text(100, seed), END, *text(50, seed + 1), END, *text(3, 3)]
    turns = []
    for turn in range(n_turns):
        (output,) = answers(llm, [prompt], params)
        turns.append((prompt, output))
        prompt = [*prompt, *output.outputs[0].token_ids[n_left_out:], END, *text(40, seed + turn), END, *text(3, 3)]
    return turns


@of_all_of_qwen
@pytest.mark.parametrize(
    "n_left_out", rest_nightly([0, 30], kept=(0,)), ids=["repeats answers", "leaves reasoning out"]
)
def test_turns_that_repeat_answers_go_on_from_their_ends_with_the_bits_of_cold_ones(
    folder: Path, n_left_out: int
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=45, logprobs=1, ignore_eos=True)
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = chat(llm, params, n_left_out=n_left_out)
    with opened(folder) as llm:
        warm = chat(llm, params, n_left_out=n_left_out)
        llm._open_loop.check()
    assert [bits(output) for _, output in warm] == [bits(output) for _, output in cold]
    # The last token of an answer is not computed; a generation prompt has three tokens behind a message's end.
    behind = 44 if not n_left_out else -3
    ends = [(len(prompt) + behind) // 64 * 64 for prompt, _ in warm]
    assert [output.num_cached_tokens for _, output in warm] == [0, *ends[:-1]]


@pytest.mark.nightly
@pytest.mark.parametrize("is_stopped", rest_nightly([False, True], kept=(1,)), ids=["length", "stop"])
def test_an_answer_that_ends_at_a_state_and_one_token_before_and_behind(folder: Path, is_stopped: bool) -> None:
    """The state is that of tokens that are known: steps that were launched before the end count for nothing."""
    prompt = [*text(100, 1), END, *text(50, 2), END, *text(2, 3)]
    options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    with opened(folder) as llm, opened(folder, enable_prefix_caching=False) as without:
        (free,) = answers(llm, [prompt], SamplingParams(**options))
        ids = list(free.outputs[0].token_ids)
        for n_new in (38, 39, 40):
            end = {"stop_token_ids": [ids[n_new - 1]]} if is_stopped else {"max_tokens": n_new}
            n_known = len(prompt) + (ids.index(ids[n_new - 1]) + 1 if is_stopped else n_new)
            inputs = {"prompt_token_ids": prompt, "cache_salt": str(n_new)}
            (output,) = llm.generate([inputs], SamplingParams(**{**options, **end}), use_tqdm=False)  # type: ignore[list-item]
            turn = [*prompt, *output.outputs[0].token_ids, *text(30, 4)]
            (warm,) = llm.generate([{**inputs, "prompt_token_ids": turn}], PARAMS, use_tqdm=False)  # type: ignore[list-item]
            assert len(turn) == n_known + 30
            assert bits(warm) == bits(answers(without, [turn])[0])
            assert warm.num_cached_tokens == (n_known - 1) // 64 * 64
        llm._open_loop.check()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"state_memory_bytes": 130_000}, marks=pytest.mark.nightly),
        pytest.param({"max_total_tokens": 640, "num_reserved_decode_tokens": 0}, marks=pytest.mark.nightly),
        pytest.param(
            {"max_num_batched_tokens": 79, "page_size": 8, "host_memory_bytes": "16MiB", "load_policy": "always"},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["few states", "few pages", "host memory"],
)
def test_bits_of_many_chats_that_repeat_answers(folder: Path, settings: dict[str, Any]) -> None:
    """Three chats at once, with two choices of which the second one is repeated; then all of it again."""
    prompts = [[*text(90 + 20 * n, n), END, *text(3, 3)] for n in range(3)]
    params = SamplingParams(n=2, temperature=0.8, seed=5, max_tokens=70, logprobs=1, ignore_eos=True)

    def turns(llm: LLM, starts: Sequence[list[int]]) -> list[Any]:
        found, chats = [], [list(one) for one in starts]
        for turn in range(2):
            outputs = answers(llm, chats, params)
            found += [[bits_of(one) for one in output.outputs] for output in outputs]
            ids = [output.outputs[1].token_ids for output in outputs]
            chats = [[*one, *more, END, *text(20, turn), END] for one, more in zip(chats, ids, strict=True)]
        return found

    with opened(folder, enable_prefix_caching=False) as llm:
        cold = turns(llm, prompts)
    with opened(folder, **settings) as llm:
        for _ in range(2):
            assert turns(llm, prompts) == cold
        llm._open_loop.check()


def test_one_token_more_or_less_than_a_state_and_the_whole_prompt_again(folder: Path) -> None:
    """The last token of a prompt is always computed: one that ends at a state goes on from the state before."""
    long = text(300, 1)
    prompts = [long, *(long[:n] for n in (191, 192, 193, 255, 256, 257, 258))] * 2
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = [bits(one) for one in answers(llm, prompts)]
    with opened(folder) as llm:
        warm = [answers(llm, [one])[0] for one in prompts]
    assert [bits(one) for one in warm] == cold
    found = [one.num_cached_tokens for one in warm]
    assert found[:8] == [0, 0, 128, 192, 192, 192, 256, 256]
    assert found[8:] == [256, 128, 128, 192, 192, 192, 256, 256]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    rest_nightly(
        [
            {"state_memory_bytes": 130_000},
            {"max_total_tokens": 1024},
            {"max_num_batched_tokens": 79, "page_size": 8},
            {"max_total_tokens": 592, "max_num_seqs": 5, "num_reserved_decode_tokens": 0},
        ],
        kept=(0,),
    ),
    ids=["few states", "few pages", "short chunks", "preemptions"],
)
def test_bits_with_little_memory_and_many_requests_at_once(folder: Path, settings: dict[str, Any]) -> None:
    """Seeded and greedy, of two salts, three times over: states and pages are evicted and come again."""
    stems = [text(n, seed) for n, seed in ((130, 1), (200, 2), (330, 3))]
    prompts = [[*stem[: len(stem) - cut], *text(20 + cut, cut)] for cut in (0, 10, 70) for stem in stems]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=1, ignore_eos=True)
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = [bits(one) for one in answers(llm, prompts, params)]
    with opened(folder, **settings) as llm:
        for salt in ("", "a", ""):
            inputs = [{"prompt_token_ids": one, **({"cache_salt": salt} if salt else {})} for one in prompts]
            assert [bits(one) for one in llm.generate(inputs, params, use_tqdm=False)] == cold  # type: ignore[arg-type]
        metrics = llm.get_metrics()
        if "num_reserved_decode_tokens" in settings:
            assert metrics.preemptions_total > 0


def test_a_salt_finds_no_state_of_another(folder: Path) -> None:
    prompt = text(200, 1)
    with opened(folder) as llm:
        found = [
            llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], PARAMS, use_tqdm=False)[0]
            for salt in ("a", "b", "a")
        ]
    assert [one.num_cached_tokens for one in found] == [0, 0, 192]
    assert bits(found[0]) == bits(found[1]) == bits(found[2])


def test_an_explanation_says_where_the_nearest_state_is(folder: Path) -> None:
    stem = text(300, 1)
    with opened(folder) as llm:
        for prompt in (stem, [*stem[:200], *text(60, 2)]):
            explained = llm.explain({"prompt_token_ids": prompt})
            answers(llm, [prompt])
        found = [llm.explain({"prompt_token_ids": [*stem[:n], *text(60, 3)]}) for n in (100, 150, 200, 280)]
        again = llm.explain({"prompt_token_ids": stem[:272]})
    assert (explained.reason, explained.n_cached, explained.n_without_state) == ("no_state", 0, 192)
    assert [(one.reason, one.n_cached, one.n_without_state) for one in found] == [
        ("no_state", 0, 96),
        ("no_state", 0, 144),
        ("differs", 192, 0),
        ("differs", 256, 0),
    ]
    assert [one.first_difference for one in found] == [100, 150, 200, 280]
    assert (again.reason, again.n_cached, again.n_without_state) == ("whole", 256, 16)


def test_an_explanation_of_a_prompt_that_is_cached_whole_says_if_a_state_is_missing(folder: Path) -> None:
    """Where a request finds fewer tokens than pages, a state is missing, or none can be there."""
    stem = text(300, 1)
    with opened(folder) as llm:
        for n in (300, 200, 130):  # states at 256, 192 and 128
            answers(llm, [stem[:n]])
        for n in (5, 63, 64, 65, 100, 128, 129, 192, 193, 250, 300):
            explained = llm.explain({"prompt_token_ids": stem[:n]})
            (output,) = answers(llm, [stem[:n]])
            last_place = (n - 1) // 64 * 64
            assert explained.n_cached == output.num_cached_tokens
            assert explained.reason == ("whole" if explained.n_cached == last_place else "no_state"), n
            assert explained.n_cached + explained.n_without_state == n // 16 * 16


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "n_hits"),
    rest_nightly(
        [
            ({}, 3),
            ({"max_num_seqs": 2}, 3),
            ({"state_memory_bytes": 60_000}, 3),
            ({"enable_prefix_caching": False}, 0),
        ],
        kept=(2,),
    ),
    ids=["states", "fewer rows than choices", "a single state", "no cache"],
)
def test_choices_have_the_bits_of_separate_requests(folder: Path, settings: dict[str, Any], n_hits: int) -> None:
    """All choices but the first go on from the state at the prompt's end, though its last message is far before, or
    compute the prompt. Each is the answer to a request with its seed."""
    prompt = [*text(100, 1), END, *text(168, 2), 7]
    options = {"temperature": 0.9, "max_tokens": 5, "logprobs": 2, "ignore_eos": True}
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = [bits(answers(llm, [prompt], SamplingParams(seed=3 + n, **options))[0]) for n in range(4)]
    with opened(folder, **settings) as llm:
        (output,) = answers(llm, [prompt], SamplingParams(n=4, seed=3, **options))
        stats = llm.get_metrics()
    assert [bits_of(one) for one in output.outputs] == cold
    assert output.num_cached_tokens == 0
    assert stats.states is not None
    assert (stats.states.hits_total, stats.states.missed_tokens_total) == (n_hits, 0)


@pytest.mark.nightly
def test_beams_are_those_of_transformers_whatever_the_memory(folder: Path) -> None:
    """Beams go on from each other's states, or are computed again where rows or pages are few. Transformers
    computes in blocks and rounds differently, so its scores may order two beams otherwise."""
    prompts, n_new, width = [text(20, 1), text(150, 2)], 10, 4
    params = BeamSearchParams(beam_width=width, max_tokens=n_new, ignore_eos=True)
    found = []
    few_pages = {"max_total_tokens": 192, "page_size": 8, "num_reserved_decode_tokens": 0}
    for settings in ({}, {"max_num_seqs": 3}, few_pages):
        with opened(folder, **settings) as llm:
            outputs = llm.beam_search([{"prompt_token_ids": one} for one in prompts], params)
            found.append([[(beam.tokens, beam.cum_logprob) for beam in one.sequences] for one in outputs])
            preemptions = llm.get_metrics().preemptions_total
    assert preemptions > 0
    assert found[1] == found[2] == found[0]
    oracle = load_oracle(resolve(str(folder)))
    oracle.generation_config = GenerationConfig()  # its end token would count
    for prompt, beams in zip(prompts, found[0], strict=True):
        config = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=n_new,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        expected = oracle.generate(torch.tensor([prompt]), generation_config=config)
        scores = [logprob / n_new for _, logprob in beams]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)
        assert (
            len({tuple(tokens) for tokens, _ in beams} & {tuple(one) for one in expected.sequences.tolist()}) >= 3
        )


@pytest.mark.nightly
def test_states_come_back_from_host_memory(folder: Path) -> None:
    """Chats of a system prompt and their turns, of two salts; other prompts take the device's pages and states."""
    system = [*text(141, 1), END]
    chats = [[*system, *text(75 + n, 10 + n), END, *text(3, 3)] for n in range(2)]
    prompts = [*chats, *([*chat, *text(30, 20), END, *text(40, 21), END, *text(3, 3)] for chat in chats)]
    others = [text(200, 30 + n) for n in range(3)]
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = [bits(one) for one in answers(llm, prompts)]
    settings = {"state_memory_bytes": 150_000, "max_total_tokens": 640, "host_memory_bytes": "16MiB"}
    with opened(folder, **settings, load_policy="always") as llm:
        for salt in ("", "a", ""):
            for prompt, expected in zip(prompts, cold, strict=True):
                inputs = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
                (found,) = llm.generate([inputs], PARAMS, use_tqdm=False)  # type: ignore[list-item]
                assert bits(found) == expected
                answers(llm, others)
        assert found.num_cached_tokens == 256
        assert found.num_loaded_tokens > 200, "the device has a page or two"
        host = llm.get_metrics().host
        assert host is not None
        assert host.copies_failed_total == 0
        assert host.compute_seconds_per_token is not None, "steps of 144 tokens are measured, too"


@pytest.mark.nightly
def test_the_state_of_an_answer_comes_back_from_host_memory(folder: Path) -> None:
    """Other prompts take the device's pages and states before the next turn."""
    prompt, others = [*text(150, 1), END, *text(3, 3)], [text(200, 30 + n) for n in range(4)]
    settings = {"state_memory_bytes": 150_000, "max_total_tokens": 640, "host_memory_bytes": "16MiB"}
    with opened(folder, **settings, load_policy="always") as llm:
        (first,) = answers(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True))
        answers(llm, others)
        turn = [*prompt, *first.outputs[0].token_ids, *text(40, 5)]
        (warm,) = answers(llm, [turn])
    with opened(folder, enable_prefix_caching=False) as llm:
        (cold,) = answers(llm, [turn])
    assert bits(warm) == bits(cold)
    assert (warm.num_cached_tokens, warm.num_loaded_tokens) == (192, 192)


def test_a_state_that_comes_back_alone_is_no_loaded_token(folder: Path) -> None:
    """Others take the few slots of states, and the pages stay."""
    prompt, others = text(300, 1), [text(140, 50 + n) for n in range(6)]
    settings = {"state_memory_bytes": 30_000, "host_memory_bytes": "16MiB", "load_policy": "always"}
    with opened(folder, **settings) as llm:
        (cold,) = answers(llm, [prompt])
        answers(llm, others)
        (warm,) = answers(llm, [prompt])
        host = llm.get_metrics().host
    assert bits(warm) == bits(cold)
    assert (warm.num_cached_tokens, warm.num_loaded_tokens) == (256, 0)
    assert host is not None
    assert host.pages_loaded_total > 0


def test_states_come_back_from_disk_after_a_restart(folder: Path, tmp_path: Path) -> None:
    """A conversation, and a system prompt from which another goes on. What a damaged file has is computed anew."""
    system = [*text(141, 1), END]
    chat = [*system, *text(200, 2), END, *text(3, 3)]
    prompts = [chat, [*chat, *text(30, 20), END, *text(40, 21), END, *text(3, 3)], [*system, *text(90, 4), END, 5]]
    with opened(folder, enable_prefix_caching=False) as llm:
        cold = [bits(one) for one in answers(llm, prompts)]
    settings = {"host_memory_bytes": "16MiB", "cache_dir": str(tmp_path / "kv"), "load_policy": "always"}
    with opened(folder, **settings) as llm:
        assert bits(answers(llm, prompts[:1])[0]) == cold[0]
    for n_found in ([320, 320, 128], [320, 384, 192]):
        with opened(folder, **settings) as llm:
            found = [answers(llm, [prompt])[0] for prompt in prompts]
            disk = llm.get_metrics().disk
        assert [bits(one) for one in found] == cold
        assert [one.num_cached_tokens for one in found] == n_found
        assert found[0].num_fetched_tokens == 320
        assert disk is not None
        assert disk.pages_lost_total == 0
    pages = [file for file in (tmp_path / "kv").rglob("*") if file.is_file() and file.suffix != ".lock"]
    for file in pages:
        with file.open("r+b") as opened_file:
            opened_file.seek(file.stat().st_size - 100)
            opened_file.write(b"\x55" * 50)
    with opened(folder, **settings) as llm:
        assert [bits(one) for one in answers(llm, prompts)] == cold
        disk = llm.get_metrics().disk
    assert disk is not None
    assert disk.pages_lost_total > 0
