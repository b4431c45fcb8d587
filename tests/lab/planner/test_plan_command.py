"""Tests of the ``radixkv plan`` command."""

from __future__ import annotations

import json
import re
from itertools import count

import pytest

from radixkv.checkpoints.embedded import embedded_folder
from radixkv.cli import main
from radixkv.lab.studies.paging.allocators import BestFitAllocator
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.step.window_pool import WindowPool
from radixkv.tree.node import Namespace
from radixkv.wire.messages import pack_tokens
from support.cases import rest_nightly
from support.json_lines import read_lines, write_lines

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
"""Llama 3.1 70B's shape."""
SIZE_13B = {
    "vocab_size": 32_000,
    "hidden_size": 5120,
    "intermediate_size": 13_824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 262_208,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA_4_26B = {
    "architectures": ["Gemma4ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rope_parameters": None,
}
QWEN_3_5_9B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""24 of 32 layers have states, 8 have K and V."""
SMALL_POOL = ("--gpu-memory", "600MB", "--workspace", "0")
"""Of the embedded model: some 1,300 pages."""


def plan(*flags):
    return main(["plan", *map(str, flags)])


def exit_code(*flags):
    """Returns the code with which ``radixkv plan`` ends, also for wrong flags."""
    try:
        return plan(*flags)
    except SystemExit as end:
        return end.code


@pytest.fixture
def planned(tmp_path):
    """Returns the JSON line of a plan."""

    def run(*flags):
        file = tmp_path / "plan.jsonl"
        assert plan(*flags, "--output-file", file) == 0
        return read_lines(file)[-1]

    return run


@pytest.fixture
def model(tmp_path):
    """Returns the path of a ``config.json`` of Llama 3.1 70B's shape with some changes."""

    def write(**changes):
        path = tmp_path / "model" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(LLAMA | changes))
        return path

    return write


def test_slots_of_adapters_take_memory_beside_the_pool(model, planned, capsys):
    """A and B of the seven matrices of each layer of Llama 3.1 70B, in nine slots."""
    file = model()
    sides = (8192 + 8192) + 2 * (8192 + 1024) + (8192 + 8192) + 2 * (8192 + 28_672) + (28_672 + 8192)
    n_bytes = 9 * 80 * 32 * sides * 2
    plan, without = (
        planned(file, "--gpu-memory", "320GB", *more) for more in (("--max-loras", 8, "--max-lora-rank", 32), ())
    )
    assert plan["adapter_bytes"] == n_bytes
    assert plan["pools"][0]["pool_bytes"] == without["pools"][0]["pool_bytes"] - n_bytes
    assert (plan["host_adapter_bytes"], without["host_adapter_bytes"]) == (64 * n_bytes // 9, 0)
    text = " ".join(capsys.readouterr().out.split())
    assert f"adapters (8 + 1 spare slot) x {n_bytes // 9:,} bytes of rank 32 = {n_bytes:,} bytes" in text
    assert (
        f"in host memory at most 64 x {n_bytes // 9:,} bytes of files in bfloat16 = {64 * n_bytes // 9:,}" in text
    )
    assert f"weights - {n_bytes:,} adapters - 3,221,225,472 workspace" in text
    for flags, words in (
        (("--gpu-memory", "160GB", "--max-loras", 60), "the adapters 23.5 and the workspace"),
        (("--gpu-memory", "160GB", "--max-loras", 0), "max_loras 0 must be at least 1"),
        (("--gpu-memory", "160GB", "--max-cpu-loras", 9), "is for a server with slots; give --max-loras, too"),
        (
            ("--gpu-memory", "160GB", "--max-loras", 9, "--max-cpu-loras", 8),
            "max_cpu_loras 8 is less than max_loras",
        ),
        (("--gpu-memory", "160GB", "--max-lora-rank", 129), "max_lora_rank 129 must be at most 128"),
    ):
        assert exit_code(file, *flags) != 0
        assert words in capsys.readouterr().err


def test_slots_of_each_of_several_gpus_have_its_part_of_adapters(model, planned):
    """A of o_proj and down_proj, and B of the others, are divided; with 16 GPUs two have the same KV head."""
    for n_gpus, n_key in ((2, 512), (4, 256), (16, 128)):
        own, inner = 8192 // n_gpus, 28_672 // n_gpus
        sides = (8192 + own) + 2 * (8192 + n_key) + (own + 8192) + 2 * (8192 + inner) + (inner + 8192)
        plan = planned(model(), "--gpu-memory", "160GB", "--gpus", n_gpus, "--max-loras", 8)
        assert plan["adapter_bytes"] == 9 * 80 * 16 * sides * 2
        whole = (8192 + 8192) + 2 * (8192 + 1024) + (8192 + 8192) + 2 * (8192 + 28_672) + (28_672 + 8192)
        assert plan["host_adapter_bytes"] == n_gpus * 64 * 80 * 16 * whole * 2, "each rank has all files"


def test_states_of_recurrent_layers_take_memory_beside_the_pool(model, planned, capsys):
    hybrid = model(**QWEN_3_5_9B)
    plan = planned(hybrid, "--gpu-memory", "80GB")
    each = 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    left = 72 * 10**9 - plan["weight_bytes"]
    n_rows = n_kept = left // 5 // each
    assert plan["states"] == {"n_rows": n_rows, "n_kept": n_kept, "bytes_each": each}
    pool = plan["pools"][0]
    assert pool["kv_bytes_per_token"] == 2 * 8 * 4 * 256 * 2
    states = (n_rows + n_kept) * each
    assert pool["pool_bytes"] == 72 * 10**9 - plan["weight_bytes"] - states - 3 * GIB
    text = " ".join(capsys.readouterr().out.split())
    assert f"({n_rows} rows + {n_kept} in the cache) x {each:,} bytes = {states:,} bytes" in text
    assert f"weights - {states:,} states - 3,221,225,472 workspace" in text
    assert "x 8 layers x 4 KV heads" in text
    assert main(["plan", str(hybrid), "--gpu-memory", "24GB"]) != 0
    error = capsys.readouterr().err
    assert "the states 1.4 and the workspace" in error
    assert "2 of these GPUs hold it" in error, "each has half of the states"
    two = planned(hybrid, "--gpu-memory", "24GB", "--gpus", "2", "--host-memory", "64GiB")
    assert two["states"]["bytes_each"] == each // 2
    pool = two["pools"][0]
    on_device = two["states"]["n_kept"] * each, pool["n_pages"] * 2 * pool["page_bytes"]
    share = min(0.5, on_device[0] / sum(on_device))
    assert pool["n_host_slots"] == pytest.approx((1 - share) * 64 * GIB / (2 * pool["page_bytes"]), rel=0.002)


def test_no_more_rows_than_have_states(model, planned, capsys):
    hybrid = model(**QWEN_3_5_9B)
    flags = ("--gpu-memory", "80GB", "--prompt", 2000)
    plan = planned(hybrid, *flags)
    pool, n_rows = plan["pools"][0], plan["states"]["n_rows"]
    assert pool["n_pages"] // 144 > n_rows
    assert (pool["schemes"][-1]["n_rows"], pool["schemes"][-1]["reason"]) == (n_rows, "states")
    assert f"radix 144 pages {n_rows}, limited by states" in " ".join(capsys.readouterr().out.split())
    assert exit_code(hybrid, "--gpu-memory", "80GB", "--rows", str(n_rows + 1)) == 1
    assert f"states for {n_rows} rows fit" in capsys.readouterr().err
    assert exit_code(hybrid, "--gpu-memory", "80GB", "--state-memory", "70GiB") == 1
    advised = capsys.readouterr().err.partition("--state-memory ")[2].partition(" ")[0]
    assert exit_code(hybrid, "--gpu-memory", "80GB", "--state-memory", advised) == 0
    few = planned(hybrid, *flags[:2], "--prompt", 100_000)["pools"][0]
    assert (few["schemes"][-1]["n_rows"], few["schemes"][-1]["reason"]) == (few["n_pages"] // 6269, None)


def test_state_memory_is_that_of_the_server(model, planned, tmp_path, capsys):
    hybrid = model(**QWEN_3_5_9B)
    for flag in ("--state-memory", "--state-memory-bytes"):
        plan = planned(hybrid, "--gpu-memory", "80GB", flag, "4GiB")
        assert plan["states"]["n_kept"] == 4 * GIB // plan["states"]["bytes_each"] == 83
    assert exit_code(hybrid, "--gpu-memory", "80GB", "--state-memory", "0") == 2
    assert "state_memory_bytes 0 must be at least 1" in capsys.readouterr().err
    assert exit_code(hybrid, "--gpu-memory", "80GB", "--state-memory", "1MiB") == 1
    assert "the states of one sequence take" in capsys.readouterr().err
    assert exit_code(model(), "--gpu-memory", "192GB", "--state-memory", "4GiB") == 1
    assert "model has no recurrent layers; leave it out" in capsys.readouterr().err


def test_layers_with_heads_of_several_shapes(model, planned, capsys):
    """A window page of 25 layers takes as much as ten pages of the five others."""
    plan = planned(model(**GEMMA_4_26B), "--gpu-memory", "192GB", "--prompt", 32_000, "--answer", 768)
    each = 2 * (25 * 8 * 256 + 5 * 2 * 512) * 2
    pool = plan["pools"][0]
    assert pool["kv_bytes_per_token"] == each
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"2 (K, V) x (25 layers x 8 KV heads x 256 + 5 layers x 2 KV heads x 512) x 2 bytes = {each:,} bytes"
        in text
    )
    windows = pool["windows"]
    assert (windows["n_layers"], windows["window"], windows["pages_per_slab"]) == (25, 1024, 10)
    n_slabs = (pool["n_pages"] + 1) * 11 // 10 - 1
    n_rows = int(n_slabs / (2048 / 10 + 66))
    assert (windows["n_slabs"], windows["n_rows"]) == (n_slabs, n_rows)
    assert n_rows > 7 * pool["n_tokens"] // 32_768
    assert f"{n_slabs:,} slabs / (2,048 / 10 + 66) = {n_rows} rows at once" in text


def test_known_sizes_of_a_tokens_kv(model, planned):
    large = planned(model(), "--gpu-memory", "192GB")
    in_16_bits, in_fp8 = large["pools"]
    assert (in_16_bits["kv_bytes_per_token"], in_fp8["kv_bytes_per_token"]) == (327_680, 163_840)
    assert 128 * 1024 * in_16_bits["kv_bytes_per_token"] == 40 * GIB
    assert large["n_values"] == 70_553_706_496  # as the model's card says
    assert large["weight_bytes"] == 2 * 70_553_706_496
    assert planned(model(**SIZE_13B), "--gpu-memory", "80GB")["pools"][0]["kv_bytes_per_token"] == 819_200


def test_the_weights_of_a_folder_and_of_its_config_alone_are_those_of_its_files(tmp_path, planned):
    (tmp_path / "config.json").write_bytes((embedded_folder() / "config.json").read_bytes())
    index = json.loads((embedded_folder() / "model.safetensors.index.json").read_text())
    for name in ("tiny", embedded_folder(), tmp_path, tmp_path / "config.json"):
        assert planned(name, "--gpu-memory", "24GB")["weight_bytes"] == index["metadata"]["total_size"]


def test_quantized_weights_count_as_a_gpu_holds_them(model, planned):
    flags = ("--gpu-memory", "192GB")
    hidden, inner, n_layers, n_dense = 8192, 28_672, 80, 2 * 128_256 * 8192 + (2 * 80 + 1) * 8192
    outputs = [hidden, 1024, 1024, hidden, inner, inner, hidden]
    inputs = [hidden] * 6 + [inner]
    n_values = n_layers * sum(o * i for o, i in zip(outputs, inputs, strict=True))
    by_channel = n_values + n_layers * 4 * sum(outputs)
    assert planned(model(), *flags, "--quantization", "fp8")["weight_bytes"] == 2 * n_dense + by_channel
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert planned(model(quantization_config=blocks), *flags)["weight_bytes"] == (
        2 * n_dense + n_values + n_values // 128**2 * 4
    )
    groups = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    half = planned(model(quantization_config=groups), *flags)["weight_bytes"]
    assert half == 2 * n_dense + n_values // 2 + n_values // 128 * 4


def _rows_that_fit(pool, request, *, with_tree):
    """Fills the engine's page cache with requests until one does not fit, and returns how many did.

    The last token of a prompt is always computed.
    """
    cache = PageCache(n_pages=pool["n_pages"], page_size=16)
    stored = request["prompt"] + request["answer"] - 1
    n_rows = 0
    while True:
        own = range(10_000 * (n_rows + 1), 10_000 * (n_rows + 1) + stored)
        tokens = bytearray(pack_tokens([*range(request["shared"])] + [*own][request["shared"] :]))
        blocks = cache.open(
            Namespace("" if with_tree else str(n_rows)), bytes(tokens[: 4 * (request["prompt"] - 1)])
        )
        if not cache.reserve(blocks, cache.pages_for(stored)):
            return n_rows
        n_rows += 1
        cache.commit(blocks, tokens, stored, 0)
        cache.mark_computed(blocks, stored, 0)


@pytest.mark.parametrize(
    ("prompt", "answer", "shared"),
    rest_nightly(
        [(2000, 300, 1500), (1600, 1, 1600), (100, 60, 0), (33, 17, 32), (7000, 1100, 6999)], kept=(0, 2, 3, 4)
    ),
)
def test_rows_at_once_are_those_that_fit_the_engines_own_cache(planned, prompt, answer, shared):
    flags = ("--prompt", prompt, "--answer", answer, "--shared", shared)
    line = planned("tiny", *SMALL_POOL, *flags)
    assert line["request"] == {"prompt": prompt, "answer": answer, "shared": shared}
    for pool in line["pools"]:
        maximum, power, paged, tree = (scheme["n_rows"] for scheme in pool["schemes"])
        assert paged == _rows_that_fit(pool, line["request"], with_tree=False)
        assert tree == _rows_that_fit(pool, line["request"], with_tree=True)
        answer_slots = next(1 << n for n in count() if 1 << n >= answer)
        for rows, reserved in ((maximum, 8192), (power, min(8192, prompt + answer_slots))):
            allocator = BestFitAllocator(pool["n_tokens"])
            assert rows == next(n for n in count() if allocator.allocate(reserved) is None)


@pytest.mark.parametrize("n_rows", rest_nightly([8, 40], kept=(0,)))
def test_the_longest_context_fits_for_as_many_rows_and_one_token_more_does_not(planned, n_rows):
    schemes = planned("tiny", *SMALL_POOL, "--answer", 100, "--shared", 200, "--rows", n_rows)["pools"][0][
        "schemes"
    ]
    for place, scheme in enumerate(schemes):
        n_tokens = scheme["longest_context"]
        assert 300 < n_tokens < 8192
        assert _rows_of_context(planned, n_tokens, place) >= n_rows > _rows_of_context(planned, n_tokens + 1, place)


def _rows_of_context(planned, n_tokens, place):
    flags = ["--prompt", n_tokens - 100, "--answer", 100, "--shared", 200]
    if place == 0:  # the maximum is what this scheme reserves
        flags += ["--max-model-len", n_tokens]
    return planned("tiny", *SMALL_POOL, *flags)["pools"][0]["schemes"][place]["n_rows"]


def test_a_host_tier_adds_its_slots(planned):
    with_tier = planned("tiny", *SMALL_POOL, "--host-memory", "1GiB")["pools"]
    assert [pool["n_host_slots"] for pool in with_tier] == [GIB // 40_960, GIB // 20_480]
    assert [pool["n_host_slots"] for pool in planned("tiny", *SMALL_POOL)["pools"]] == [None, None]


@pytest.mark.parametrize("flags", [("--host-memory", "64GiB"), ("--gpus", 4, "--rows", 32)])
def test_each_printed_quotient_is_what_a_pocket_calculator_gives(model, capsys, flags):
    assert plan(model(), "--gpu-memory", "192GB", "--shared", 1500, "--rows", 8, *flags) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    cells = re.split(r"  +|\n", printed)
    sums = [match.groups() for cell in cells if (match := re.match(r"([\d,()/x+ -]+) = ([\d,]+)", cell))]
    assert len(sums) > 20
    for left, right in sums:
        expression = left.replace(",", "").replace("x", "*").replace("/", "//")
        assert eval(expression, {}) == int(right.replace(",", "")), left  # noqa: S307, our own output


@pytest.fixture
def trace(tmp_path):
    """Three requests of a Mooncake trace, whose first block of 512 tokens is the same, and the first again."""
    lines = [(1024, 100, [0, 1]), (1536, 200, [0, 2, 3]), (2048, 600, [0, 4, 5, 6]), (1024, 100, [0, 1])]
    requests = [
        {"timestamp": n, "input_length": p, "output_length": a, "hash_ids": ids}
        for n, (p, a, ids) in enumerate(lines)
    ]
    return write_lines(tmp_path / "trace.jsonl", *requests)


def test_a_trace_gives_lengths_and_hit_rates(trace, tmp_path, planned, capsys):
    line = planned("tiny", *SMALL_POOL, "--host-memory", "128MiB", "--trace", trace)
    assert line["request"] == {"prompt": 1408, "answer": 250, "shared": 512}
    sizes = [(pool["n_tokens"], pool["n_host_slots"] * 16) for pool in line["pools"]]
    simulated = tmp_path / "simulated.jsonl"
    capacity = ",".join(f"device={device},host={host}" for device, host in sizes)
    flags = ["--trace", trace, "--capacity", capacity, "--rule", "engine", "--policy", "lru"]
    assert main(["simulate", *map(str, flags), "--output-file", str(simulated)]) == 0
    expected = [row["hit_rate_pct"] for row in read_lines(simulated)]
    assert [row["hit_rate_pct"] for row in line["hit_rates"]] == expected
    n_found = 512 + 512 + 1023  # of the last prompt, one token is computed
    assert expected[-1] == round(100 * n_found / 5632, 3)
    assert f"{n_found:,} / 5,632 prompt tokens" in capsys.readouterr().out


def test_token_ids_have_a_common_prefix_and_need_the_length_of_answers(tmp_path, planned, capsys):
    prompts = [[*range(100), 7, *range(50)], [*range(100), 8], [*range(300)]]
    file = write_lines(tmp_path / "ids.jsonl", *({"prompt_token_ids": prompt} for prompt in prompts))
    line = planned("tiny", *SMALL_POOL, "--trace", file, "--answer", 50)
    assert line["request"] == {"prompt": 184, "answer": 50, "shared": 96}
    assert plan("tiny", *SMALL_POOL, "--trace", file) == 1
    assert "give --answer" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_one_line_that_says_what_would(model, planned, capsys):
    def refused(*flags):
        assert plan(*flags) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line

    error = refused(model(), "--gpu-memory", "80GB")
    assert "67.4 GiB are missing" in error  # 131.4 + 3.0 + 2 pages of 5 MiB - 67.1
    advised = [int(number) for number in re.findall(r"(\d+) GB(?= would|;)", error)]
    assert len(advised) == 2
    in_fp8, in_16_bits = advised
    request = ("--prompt", 2000, "--answer", 300)
    for n_gb, flags in ((in_16_bits, ()), (in_fp8, ("--quantization", "fp8"))):
        fits = planned(model(), "--gpu-memory", f"{n_gb}GB", *request, *flags)
        assert fits["pools"][0]["schemes"][2]["n_rows"] == 1
        capsys.readouterr()
    assert "which fits" in refused(model(), "--gpu-memory", "90GB")
    assert "--quantization" not in refused(model(), "--gpu-memory", "40GB", "--quantization", "fp8")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--gpu-memory eighty", 2, "'eighty' is not a size"),
        ("", 2, "--gpu-memory"),
        ("--gpu-memory 80GB --trace f --prompt 9", 2, "--prompt and --trace"),
        ("--gpu-memory 80GB --trace f --shared 9", 2, "--shared and --trace"),
        ("--gpu-memory 80GB --prompt 1000 --shared 1500", 2, "shared prefix of 1500 tokens"),
        ("--gpu-memory 80GB --shared 2001", 2, "shared prefix of 2001 tokens"),
        ("--gpu-memory 80GB --shared -1", 2, "shared -1"),
        ("--gpu-memory 80GB --prompt 0", 2, "prompt 0"),
        ("--gpu-memory 80GB --rows 0", 2, "rows 0"),
        ("--gpu-memory 80GB --gpus 0", 2, "tensor_parallel_size 0"),
        ("--gpu-memory 80GB --host-memory 0", 2, "host_memory_bytes 0"),
        ("--gpu-memory 80GB --host-memory 9", 1, "host tier of 9 bytes"),
        ("--gpu-memory 80GB --gpu-memory-utilization 2", 2, "gpu_memory_utilization 2"),
        ("--gpu-memory 80GB --tokenizer tiny", 2, "--tokenizer"),
        ("--gpu-memory 80GB --prompt 9000", 1, "longer than max_model_len 8192"),
        ("--gpu-memory 80GB --max-model-len 9000", 1, "max_model_len 9000"),
        ("--gpu-memory 80GB --page-size 17", 1, "page_size 17"),
        ("--gpu-memory 80GB --quantization int3", 1, "'int3'"),
        ("--gpu-memory 80GB --trace /nowhere", 1, "/nowhere"),
    ],
)
def test_wrong_use_is_one_line(flags, code, message, capsys):
    try:
        ended = plan("tiny", *flags.split())
    except SystemExit as usage:
        ended = usage.code
    captured = capsys.readouterr()
    assert (ended, captured.out) == (code, "")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert plan(tmp_path, "--gpu-memory", "80GB") == 1
    assert "config.json" in capsys.readouterr().err


def test_rows_of_a_model_with_windows_in_some_layers(tmp_path, planned, capsys):
    """A page cache holds as many rows, less at most one whose windows need a slab that is in use in part."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    planned_pool = planned(
        tmp_path, "--gpu-memory", "80GB", "--prompt", 32_000, "--answer", 768, "--max-model-len", 32_768
    )["pools"][0]
    windows, radix = planned_pool["windows"], planned_pool["schemes"][-1]
    n_rows = rows_with_windows(windows, 32_768)
    assert windows["n_rows"] - 1 <= n_rows <= windows["n_rows"] == 76
    assert n_rows >= 5 * 13
    assert (radix["n_rows"], radix["reason"]) == (76, "windowed")
    assert [one["n_rows"] for one in planned_pool["schemes"][:-1]] == [13, 13, 13], "those have no window pages"
    text = " ".join(capsys.readouterr().out.split())
    assert "slabs / (2,048 / 6 + 66) = 76 rows" in text
    assert "radix 2,048 pages 76, windowed" in text


def rows_with_windows(windows, n_tokens):
    """Returns how many rows of so many tokens a page cache with these window pages holds."""
    pool = WindowPool(1024, windows["pages_per_slab"], windows["n_slabs"] - 577, 577)
    cache = PageCache(pool.n_slabs * pool.pages_per_slab, 16, window_pages=WindowPages.of(pool, 16))

    def has_room() -> bool:
        blocks = cache.open(Namespace(), b"")
        for end in [*range(8192, n_tokens, 8192), n_tokens]:
            if not cache.reserve(blocks, -(-end // 16)):
                return False
            cache.free_behind(blocks, end)
        return True

    return next(n_rows for n_rows in count() if not has_room())


@pytest.mark.parametrize("n_rows", [40, 60, 300])
def test_the_longest_context_of_rows_with_windows(tmp_path, planned, n_rows):
    """A page cache has room for so many rows of that length, less the slabs that are in use in part."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    pool = planned(tmp_path, "--gpu-memory", "80GB", "--rows", n_rows)["pools"][0]
    longest = pool["schemes"][-1]["longest_context"]
    n_fitting = rows_with_windows(pool["windows"], longest - 1)
    assert n_rows * 0.97 <= n_fitting <= n_rows * 1.03


def test_rows_with_windows_hold_a_shared_prefix_once(tmp_path, planned, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    flags = ("--gpu-memory", "80GB", "--prompt", 32_000, "--answer", 768, "--shared", 20_000)
    pool = planned(tmp_path, *flags)["pools"][0]
    windows = pool["windows"]
    n_rows = int((windows["n_slabs"] - 1250 / 6) / (798 / 6 + 66))
    assert pool["schemes"][-1]["n_rows"] == windows["n_rows"] == n_rows > 2 * 75
    assert f"slabs - 1,250 / 6) / (798 / 6 + 66) = {n_rows} rows" in " ".join(capsys.readouterr().out.split())


def test_two_gpus_have_window_pages_of_half_the_size(tmp_path, planned):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    flags = ("--gpu-memory", "80GB", "--prompt", 32_000, "--answer", 768, "--max-model-len", 32_768)
    one, two = (planned(tmp_path, *flags, "--gpus", n)["pools"][0] for n in (1, 2))
    assert two["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert two["windows"]["pages_per_slab"] == one["windows"]["pages_per_slab"] == 6
    assert two["windows"]["n_rows"] > 2 * one["windows"]["n_rows"]


def test_no_rows_are_promised_where_a_server_keeps_all_pages_of_layers_with_windows(tmp_path, planned, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    settings = ("--gpu-memory", "80GB", "--prompt", 30_000, "--answer", 2_000, "--host-memory", "64GiB")
    assert planned(tmp_path, *settings)["pools"][0]["windows"]["n_rows"] > 70
    capsys.readouterr()
    plan = planned(tmp_path, *settings, "--gpus", 2)
    assert plan["pools"][0]["windows"] is None
    assert "slabs" not in capsys.readouterr().out


def test_rows_of_answers_with_a_budget(model, planned, capsys):
    flags = ("--gpu-memory", "141GB", "--quantization", "fp8", "--prompt", 4000, "--answer", 8000, "--shared", 1500)
    budget = ("--kv-eviction", "paged", "--kv-budget")
    folder = model()
    pool = planned(folder, *flags, *budget, 2048)["pools"][0]
    # 250 pages of the prompt, 128 that an answer reads, and two in passing.
    n_rows = (pool["n_pages"] - 93) // (380 - 93)
    assert pool["budget"] == {
        "kv_budget": 2048,
        "n_pages_a_row": 380,
        "n_shared_pages": 93,
        "n_rows": n_rows,
        "needs_own": False,
    }
    said = " ".join(capsys.readouterr().out.split())
    assert f"/ (380 - 93) = {n_rows} rows at once" in said
    assert "in each request" not in said
    whole = planned(folder, *flags, *budget, 12_000)["pools"][0]
    assert whole["budget"]["n_rows"] == whole["schemes"][-1]["n_rows"], "a budget that is never reached"
    assert planned(folder, *flags)["pools"][0]["budget"] is None


def test_requests_that_are_longer_than_the_pool_need_a_budget_of_their_own(model, planned, capsys):
    flags = ("--gpu-memory", "90GB", "--quantization", "fp8", "--prompt", 4000, "--answer", 120_000)
    pool = planned(model(), *flags, "--kv-eviction", "paged", "--kv-budget", 2048)["pools"][0]
    assert pool["n_tokens"] < 124_000
    assert pool["budget"]["needs_own"]
    n_rows = pool["budget"]["n_rows"]
    assert f"= {n_rows} rows at once, with a kv_budget in each request" in " ".join(capsys.readouterr().out.split())
