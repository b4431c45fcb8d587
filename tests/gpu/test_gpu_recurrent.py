"""Models with delta nets or Mamba2 on a GPU against float64, the CPU, themselves alone, cold and without graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_oracle import bits, check_hits, check_same_bits, check_scores, first_difference
from gpu_support import (
    SHAPE,
    check_same_answers,
    engine_scores,
    family,
    greedy,
    opened,
    random_ids,
    save,
    two_gpus,
)

from radixkv import LLM, BeamSearchParams
from radixkv.llm.outputs import RequestOutput
from support.quantized_checkpoints import save_quantized

DELTA_NETS: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
"""Heads of the size of all published models. With these weights another prefix changes log-probabilities fifteen
times as much as rounding to bfloat16 does; with larger ones four times."""
MAMBA2: Mapping[str, Any] = {
    "model_type": "nemotron_h",
    "mamba_num_heads": 8,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 2,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
"""Heads and states of the sizes of Nemotron Nano 9B v2."""
EXPERTS: Mapping[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5": {"model_type": "qwen3_5_text", **DELTA_NETS},
    "qwen3.5-moe": {"model_type": "qwen3_5_moe_text", **DELTA_NETS, **EXPERTS},
    "qwen3-next": {"model_type": "qwen3_next", **DELTA_NETS, **EXPERTS},
    "nemotron-h": {
        **MAMBA2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]
        + ["linear_attention", "full_attention", "mlp", "linear_attention"],
    },
    "nemotron-3": {
        **MAMBA2,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 256,
        "routed_scaling_factor": 2.5,
    },
}
WHOLE_PARTS: Mapping[str, Any] = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
"""Each of two ranks has whole blocks of 128."""
STATE_BYTES = {
    "qwen3.5": 3 * (4 * 128 * 128 * 4 + 3 * 1024 * 2),
    "nemotron-h": 3 * (8 * 128 * 80 * 4 + 3 * (8 * 80 + 2 * 2 * 128) * 2),
}
"""The states of a sequence in bfloat16, of the models whose answers are compared."""
NOISE = 2.5
"""Allowed distance from float32, as a multiple of that of the CPU's own bfloat16."""
NEAR_TIE = 0.3
"""Difference of two log-probabilities that noise may turn round."""
END = 2
"""A token that ends a message."""


@contextmanager
def on_gpu(folder: Path, **settings: Any) -> Iterator[LLM]:
    """Opens a model whose prompts run on the Triton kernel, so that nothing is compiled by nvcc."""
    with opened(folder, **{"attention_backend": "triton", "max_num_seqs": 16, **settings}) as llm:
        yield llm


@pytest.fixture(scope="module", params=list(STATE_BYTES))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(name), **MODELS[name])


def test_a_layer_of_model_size_follows_the_rule() -> None:
    """With rows of one token, ragged prompts, starts within blocks, padding and saved states."""
    # Imported here, because it imports Triton, which is not installed where these tests are skipped.
    from delta_net_world import PADDING, Span, World, check, delta_net
    from mamba2_world import Mamba2World, mamba2

    spans = [
        Span(3, 5, 1, is_decode=True),
        Span(0, 0, 1, is_decode=True),
        Span(PADDING, 0, 1, is_decode=True),
        Span(1, 0, 64),
        Span(4, 64, 1),
        Span(2, 40, 300, saves={64: 2, 128: 1, 320: 0}),
        Span(5, 0, 191),
    ]
    for dtype in (torch.bfloat16, torch.float16):
        check(World(delta_net(16, 32, 128, 128), spans, dtype))
        for head_size in (64, 80):
            check(Mamba2World(mamba2(8, 128, 128, head_size), spans, dtype))


@pytest.mark.parametrize(
    ("model", "settings", "noise"),
    [
        *((model, {}, NOISE) for model in MODELS),
        ("qwen3.5", {"page_size": 64, "enforce_eager": True}, NOISE),
        ("qwen3.5", {"quantization": "fp8"}, 40.0),
        ("nemotron-h", {"enforce_eager": True}, NOISE),
        ("nemotron-h", {"quantization": "fp8"}, 60.0),
    ],
)
def test_scores_are_those_of_the_cpu_up_to_rounding(
    model: str, settings: dict[str, Any], noise: float, tmp_path: Path
) -> None:
    compare_scores(model, settings, noise, tmp_path)


@two_gpus
@pytest.mark.parametrize(
    ("model", "settings", "noise"),
    [
        *((model, {}, NOISE) for model in MODELS),
        ("nemotron-h", {"enforce_eager": True}, NOISE),
        ("qwen3.5", {"quantization": "fp8"}, 40.0),
        ("nemotron-h", {"quantization": "fp8"}, 60.0),
    ],
)
def test_scores_of_two_gpus_are_those_of_the_cpu_up_to_rounding(
    model: str, settings: dict[str, Any], noise: float, tmp_path: Path
) -> None:
    compare_scores(model, {"tensor_parallel_size": 2, **settings}, noise, tmp_path)


FP8_CHECKPOINTS = [
    ("qwen3.5", "fp8 blocks 128", {}),
    ("qwen3.5", "fp8 blocks 128", {"enforce_eager": True}),
    ("qwen3.5", "fp8 channels", {}),
    ("qwen3.5-moe", "fp8 blocks 128", {}),
    ("qwen3-next", "fp8 blocks 128", {}),
]


@pytest.mark.parametrize(("model", "form", "settings"), FP8_CHECKPOINTS)
def test_scores_of_fp8_checkpoints_are_those_of_the_dense_matrices(
    model: str, form: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """As published, with gates of delta nets in 16 bits. Numbers of tokens of steps are no multiples of 4."""
    save_quantized(tmp_path, form, **{**SHAPE, **MODELS[model]})
    check_fp8_against_cpu(model, tmp_path, settings)


@two_gpus
@pytest.mark.parametrize(("model", "form", "settings"), FP8_CHECKPOINTS)
def test_scores_of_fp8_checkpoints_on_two_gpus(
    model: str, form: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_quantized(tmp_path, form, **{**SHAPE, **MODELS[model], **WHOLE_PARTS})
    check_fp8_against_cpu(model, tmp_path, {"tensor_parallel_size": 2, **settings})


def check_fp8_against_cpu(model: str, folder: Path, settings: dict[str, Any]) -> None:
    """Compares a checkpoint that ``save_quantized`` saved.

    Rounded inputs choose other experts where two are nearly equal. A CPU in float32 whose products round their
    inputs to FP8 reports 75% of the likeliest tokens of these mixtures, and 99% of the dense model.
    """
    min_share = 0.7 if "num_experts" in MODELS[model] else 0.9
    check_against_cpu(model, folder / "quantized", settings, 40.0, folder / "dense", min_share=min_share)


def test_hits_of_an_fp8_checkpoint_have_the_bits_of_cold_prompts(tmp_path: Path) -> None:
    save_quantized(tmp_path, "fp8 blocks 128", **{**SHAPE, **MODELS["qwen3.5-moe"]})
    check_hits_of_chunks(tmp_path / "quantized")


def compare_scores(model: str, settings: dict[str, Any], noise: float, tmp_path: Path) -> None:
    """Compares a model on the GPU with the CPU."""
    folder = save(tmp_path, **MODELS[model])
    check_against_cpu(model, folder, settings, noise, folder)


def check_against_cpu(
    model: str, folder: Path, settings: dict[str, Any], noise: float, oracle: Path, *, min_share: float = 0.9
) -> None:
    """Prompts in chunks beside answers, and answers in batches, teacher-forced on the CPU in float32."""
    prompts = [random_ids(n, seed=n) for n in (500, 1, 333, 64, 17)]
    with on_gpu(folder, max_num_batched_tokens=200, **settings) as llm:
        outputs = llm.generate(prompts, greedy(24, logprobs=20, prompt_logprobs=20), use_tqdm=False)
    check_scores(f"{model} {settings}", outputs, oracle, noise, min_share=min_share)


def test_hits_have_the_bits_of_cold_prompts_whose_chunks_begin_at_the_same_places(folder: Path) -> None:
    check_hits_of_chunks(folder)


def check_hits_of_chunks(folder: Path) -> None:
    """Then products have as many rows, and blocks the same tokens. Steps of 64 tokens make all chunks so."""
    system = [*random_ids(200, seed=1), END]
    prompts = [[*system, *random_ids(n, seed=n), END, *random_ids(9, seed=n + 1)] for n in (100, 300, 60)]
    prompts += [[*prompts[0][:290], *random_ids(90, seed=seed)] for seed in (5, 6, 7)]
    params = greedy(12, logprobs=20)
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "page_size": 16}
    check_hits(partial(on_gpu, folder, **settings), prompts, params, n_found_first=4 * 192, n_found_again=192)


@pytest.mark.parametrize("n_step", [64, 192], ids=["a block", "three blocks"])
def test_prompts_of_whole_blocks_go_on_from_the_ends_of_others(folder: Path, n_step: int) -> None:
    """Their last rows save the state at their end, and in steps of three blocks that of the block before."""
    prompts = [random_ids(384, seed=1)]
    for seed in (2, 3):
        prompts.append([*prompts[-1], *random_ids(192, seed=seed)])
    found = []
    for is_kept in (False, True):
        with on_gpu(folder, max_num_batched_tokens=n_step, enable_prefix_caching=is_kept) as llm:
            found.append([llm.generate([one], greedy(12, logprobs=20), use_tqdm=False)[0] for one in prompts])
    cold, warm = found
    assert [one.num_cached_tokens for one in warm] == [0, 384, 576]
    check_same_bits(warm, cold)


def test_answers_in_graphs_are_those_without(n_ranks: int, folder: Path) -> None:
    """Numbers of rows between those of graphs: padding must not change a state."""
    prompts = [random_ids(20 + 13 * i, seed=i) for i in range(13)]
    params = greedy(16, logprobs=20)
    with on_gpu(folder, enforce_eager=True, max_num_seqs=13, tensor_parallel_size=n_ranks) as llm:
        eager = llm.generate(prompts, params, use_tqdm=False)
    with on_gpu(folder, max_num_seqs=64, tensor_parallel_size=n_ranks) as llm:
        found = [llm.generate(prompts[:n], params, use_tqdm=False) for n in (13, 5, 3, 1)]
    for answers in found:
        shares = [first_difference(*pair) for pair in zip(eager, answers, strict=False)]
        print(f"{len(answers)} rows: equal for {shares} of 16 tokens")
    token_ids = [one.outputs[0].token_ids for answers in found for one in answers]
    expected = [one for answers in found for one in eager[: len(answers)]]
    check_same_answers(expected, token_ids, tolerance=NEAR_TIE, min_share=0.7)


def test_many_requests_with_few_states_and_few_pages(folder: Path, name: str) -> None:
    """States are evicted and replaced while others load them, and requests are preempted: answers stay right."""
    prompts = [one[:900] for one in family(120, seed=3)]
    params = greedy(12, logprobs=20)
    with on_gpu(folder, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(
        folder,
        state_memory_bytes=5 * STATE_BYTES[name],
        max_num_seqs=7,
        max_total_tokens=4096,
        max_num_batched_tokens=300,
    ) as llm:
        for turn in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.get_metrics()
            n_cached = sum(one.num_cached_tokens or 0 for one in found)
            equal = [first_difference(*pair) for pair in zip(alone, found, strict=True)]
            print(
                f"turn {turn}: {n_cached} cached tokens, {stats.preemptions_total} preemptions, "
                f"equal for {sum(equal) / len(equal):.1f} of 12 tokens on average"
            )
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(alone, answers, tolerance=NEAR_TIE, min_share=0.5)
            assert n_cached > 0


def test_a_request_keeps_its_state_while_others_come_and_go(folder: Path) -> None:
    """A long answer beside prompts in chunks, short answers, and batch slots that change hands."""
    long, others = random_ids(100, seed=50), [random_ids(30 + 40 * i, seed=60 + i) for i in range(30)]
    with on_gpu(folder, max_num_seqs=4, max_num_batched_tokens=128) as llm:
        (alone,) = llm.generate([long], greedy(80, logprobs=20), use_tqdm=False)
        params = [greedy(80, logprobs=20), *(greedy(1 + i % 5) for i in range(30))]
        beside = llm.generate([long, *others], params, use_tqdm=False)
    print("equal for", first_difference(alone, beside[0]), "tokens")
    check_same_answers([alone], [beside[0].outputs[0].token_ids], tolerance=NEAR_TIE, min_share=0.0)


def test_states_come_back_from_host_memory_and_after_a_restart_from_disk(
    n_ranks: int, folder: Path, name: str, tmp_path: Path
) -> None:
    """With the bits of cold prompts, beside other prompts that take pages and states. All chunks have 64 tokens."""
    system = [*random_ids(200, seed=1), END]
    prompts = [[*system, *random_ids(n, seed=n), END, *random_ids(9, seed=n + 1)] for n in (100, 300, 60)]
    others = [random_ids(260, seed=seed) for seed in range(20, 26)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "page_size": 16}
    settings["tensor_parallel_size"] = n_ranks
    tiers = {"host_memory_bytes": 64 << 20, "cache_dir": str(tmp_path / "kv"), "load_policy": "always"}
    few = {"state_memory_bytes": 5 * STATE_BYTES[name], "max_total_tokens": 2048, "max_model_len": 1024}

    def answers(llm: LLM) -> list[RequestOutput]:
        return [llm.generate([one], greedy(12, logprobs=20), use_tqdm=False)[0] for one in prompts]

    with on_gpu(folder, enable_prefix_caching=False, **settings) as llm:
        cold = [bits(one) for one in answers(llm)]
    for is_restarted in (False, True):
        with on_gpu(folder, **settings, **tiers, **few) as llm:
            wait_for_host_memory(llm)
            for turn in range(4):
                found = answers(llm)
                n_found = [(one.num_cached_tokens, one.num_loaded_tokens, one.num_fetched_tokens) for one in found]
                print("cached, loaded and fetched tokens", n_found)
                assert [bits(one) for one in found] == cold
                if turn or is_restarted:
                    assert all((one.num_cached_tokens or 0) >= 192 for one in found)
                llm.generate(others, greedy(12), use_tqdm=False)
            metrics = llm.get_metrics()
        print(metrics.host, metrics.disk)
        assert metrics.host is not None
        assert metrics.disk is not None
        assert (metrics.host.copies_failed_total, metrics.disk.pages_lost_total) == (0, 0)
        assert metrics.host.pages_loaded_total > 0
        assert metrics.disk.pages_fetched_total > 0 or not is_restarted


@pytest.fixture(params=[1, pytest.param(2, marks=two_gpus)])
def n_ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def test_beams_are_those_of_the_scores(n_ranks: int, folder: Path) -> None:
    """Beams go on from each other's states, beside requests that come and go; scored as prompts, all have their
    log-probabilities. With few pages beams are preempted, and computed again from a state of the tree."""
    prompts, n_new = [random_ids(n, seed=n) for n in (300, 17)], 30
    params = BeamSearchParams(beam_width=4, max_tokens=n_new, ignore_eos=True)
    for settings in ({}, {"max_total_tokens": 512, "max_model_len": 400, "num_reserved_decode_tokens": 0}):
        with on_gpu(folder, tensor_parallel_size=n_ranks, **settings) as llm:
            for output in llm.beam_search(prompts, params):
                sequences = [list(beam.tokens) for beam in output.sequences]
                assert len({tuple(one) for one in sequences}) == 4
                scored = llm.generate(sequences, greedy(1, prompt_logprobs=0), use_tqdm=False)
                for beam, one in zip(output.sequences, scored, strict=True):
                    scores, first = engine_scores(one)[0], len(beam.tokens) - n_new
                    total = sum(scores[at, beam.tokens[at]] for at in range(first, len(beam.tokens)))
                    print(f"{settings}: {beam.cum_logprob:.4f}, scored {total:.4f}")
                    assert beam.cum_logprob == pytest.approx(total, abs=3 * NEAR_TIE)


def wait_for_host_memory(llm: LLM) -> None:
    """Returns once the memory is pinned."""
    for n in range(200):
        llm.generate([random_ids(5, seed=n)], greedy(1), use_tqdm=False)
        host = llm.get_metrics().host
        assert host is not None
        assert host.n_state_slots > 10
        if host.n_slots:
            return
        time.sleep(0.05)
    pytest.fail("no memory is pinned")


def test_the_sizes_of_states_are_what_the_settings_say(folder: Path, name: str) -> None:
    from gpu_drive import executor_of

    assert SHAPE["num_hidden_layers"] == 4
    with on_gpu(folder, state_memory_bytes=3 * STATE_BYTES[name]) as llm:
        assert executor_of(llm).n_states == 3
    with on_gpu(folder, state_memory_bytes=4 * STATE_BYTES[name] - 1) as llm:
        assert executor_of(llm).n_states == 3
