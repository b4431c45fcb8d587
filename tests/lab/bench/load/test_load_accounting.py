"""Token counts of client, usage and server metrics; prompts as token ids."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from radixkv.errors import CheckpointError
from radixkv.lab.bench.load.accounting import accounting
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.requests import PromptEncoder
from radixkv.lab.bench.load.server_counters import DraftTokenCounts, TokenCounts, server_counts
from radixkv.lab.bench.session import BenchRequest
from support.loads import OUTPUT_LEN, ask, send

RADIXKV = """# TYPE radixkv:prompt_tokens_total counter
radixkv:prompt_tokens_total {prompt}.0
# TYPE radixkv:generation_tokens_total counter
radixkv:generation_tokens_total {generated}.0
# TYPE radixkv:prefix_cache_hits_total counter
radixkv:prefix_cache_hits_total {cached}.0
"""
VLLM = """# HELP vllm:prompt_tokens_total Prefilled.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}.0
vllm:prompt_tokens_total{{engine="1",model_name="m"}} 7.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{{engine="0",model_name="m"}} 1.7e+09
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {cached}.0
"""
SGLANG = """# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="m"}} {prompt}.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{model_name="m"}} {generated}.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{{cache_source="device",model_name="m"}} {cached}.0
"""


def token_counts(address):
    return server_counts(ask(address, OpenAIClient.metrics)).tokens


@pytest.mark.parametrize("metrics", [RADIXKV, VLLM, SGLANG], ids=["radixkv", "vllm", "sglang"])
def test_counts_agree_with_the_metrics_of_each_engine(fake, metrics):
    fake.metrics = metrics
    before = token_counts(fake.address)
    records = send(fake.address, ["same start, one", BenchRequest("same start, two", OUTPUT_LEN, n=2)]).records
    reported = accounting(records, token_counts(fake.address) - before)
    assert (
        reported["usage"] == reported["metrics"] == {"prompt": 30, "generated": 12, "cached": len("same start, ")}
    )
    assert reported["client"] == {"prompt": 30, "generated": 12, "cached": None}
    assert reported["agree"] is True


def test_a_count_that_differs_is_reported(fake):
    records = send(fake.address, ["one"]).records
    assert accounting(records, TokenCounts(3, 4, 0))["agree"] is True
    for wrong in (TokenCounts(4, 4, 0), TokenCounts(3, 5, 0), TokenCounts(3, 4, 1)):
        assert accounting(records, wrong)["agree"] is False
    records[0].choices[0].token_ids.append(9)
    assert accounting(records, None)["agree"] is False


def test_counts_that_the_server_does_not_report_are_none(fake):
    fake.returns_ids = fake.reports_cached = False
    assert ask(fake.address, OpenAIClient.metrics) is None
    reported = accounting(send(fake.address, ["one"]).records, None)
    assert reported == {
        "client": {"prompt": None, "generated": None, "cached": None},
        "usage": {"prompt": 3, "generated": 4, "cached": None},
        "metrics": None,
        "agree": True,
    }
    assert server_counts("# TYPE other:tokens counter\nother:tokens_total 3\n") is None
    assert server_counts("<html>no metrics</html>") is None


def test_counts_of_a_run_with_failures_are_not_compared(fake):
    fake.fault = "http_500"
    reported = accounting(send(fake.address, ["one", "FAULT"]).records, TokenCounts(3, 4, 0))
    assert (reported["usage"]["prompt"], reported["agree"]) == (3, None)


DRAFTS = """# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {0}.0
vllm:spec_decode_num_draft_tokens_total{{engine="1"}} 2.0
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{{engine="0"}} 1.7e+09
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {1}.0
"""
BY_SOURCE = """# TYPE radixkv:spec_decode_num_steps_without_overlap_total counter
radixkv:spec_decode_num_steps_without_overlap_total {0}.0
# TYPE radixkv:spec_decode_num_draft_tokens_by_source_total counter
radixkv:spec_decode_num_draft_tokens_by_source_total{{source="tree"}} {1}.0
radixkv:spec_decode_num_draft_tokens_by_source_total{{source="prompt"}} 5.0
# TYPE radixkv:spec_decode_num_accepted_tokens_by_source_total counter
radixkv:spec_decode_num_accepted_tokens_by_source_total{{source="tree"}} {2}.0
radixkv:spec_decode_num_accepted_tokens_by_source_total{{source="prompt"}} 1.0
"""


def test_drafts_of_vllm_and_radixkv_are_counted():
    counts = {"prompt": 3, "generated": 9, "cached": 0}
    texts = [VLLM.format(**counts) + DRAFTS.format(*numbers) for numbers in ((10, 4), (30, 9))]
    before, after = map(server_counts, texts)
    assert (after - before).drafts == DraftTokenCounts(20, 5)
    assert before.drafts == DraftTokenCounts(12, 4)
    texts = [
        RADIXKV.format(**counts) + (DRAFTS.format(*drafts) + BY_SOURCE.format(*sources)).replace("vllm", "radixkv")
        for drafts, sources in (((5, 1), (7, 0, 0)), ((25, 9), (8, 20, 8)))
    ]
    before, after = map(server_counts, texts)
    assert (after - before).drafts == DraftTokenCounts(20, 8, 1, {"tree": (20, 8)}), (
        "prompt has guessed nothing since"
    )


@pytest.mark.parametrize("metrics", [RADIXKV, VLLM, SGLANG], ids=["radixkv", "vllm", "sglang"])
def test_a_server_without_drafts_has_no_counts_of_them(metrics):
    counts = server_counts(metrics.format(prompt=3, generated=4, cached=0))
    assert (counts.drafts, (counts - counts).drafts) == (None, None)


@pytest.fixture
def folder(tmp_path):
    """Folder of a word tokenizer that adds ``<s>`` to texts, and of a chat template that has ``<s>`` itself."""
    words = ["<s>", "?", "hi", "there", "you", "user", "assistant"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "<s> {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


def test_prompts_are_encoded_as_by_the_server(fake, folder):
    messages = [{"role": "user", "content": "hi there"}]
    prompts = [BenchRequest("hi you", 2), BenchRequest(messages, 2, n=2), BenchRequest((4, 4), 2)]
    send(fake.address, prompts, encoder=PromptEncoder(folder), max_concurrency=1)
    assert fake.paths == ["/v1/completions"] * 3
    assert [body["prompt"] for body in fake.bodies] == [[0, 2, 4], [0, 5, 2, 3, 6], [4, 4]]
    assert fake.bodies[1]["n"] == 2


def test_a_prompt_that_cannot_be_encoded_is_an_error_of_its_own(fake, folder):
    records = send(fake.address, ["hi", "hi \ud800"], encoder=PromptEncoder(folder)).records
    assert [record.error_kind for record in records] == [None, "prompt"]
    assert "U+D800" in records[1].error


def test_chats_without_a_template_cannot_be_encoded(fake, folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        send(fake.address, [BenchRequest([{"role": "user", "content": "hi"}], 2)], encoder=PromptEncoder(folder))
    assert fake.bodies == []


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e400"])
def test_a_counter_that_is_no_finite_number_is_unknown(value):
    text = "# TYPE vllm:{0}_total counter\nvllm:{0}_total {1}\n"
    tokens = server_counts(text.format("prompt_tokens", 7) + text.format("generation_tokens", value)).tokens
    assert (tokens.prompt, tokens.generated) == (7, None)
