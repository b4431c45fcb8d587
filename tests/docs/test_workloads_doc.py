"""Tests of docs/workloads.md against the code."""

import ast
import json
import re
from dataclasses import replace

import pytest

from radixkv.checkpoints.resolve import resolve, resolve_tokenizer
from radixkv.lab.bench.flags import OVERRIDES
from radixkv.lab.bench.load.requests import PromptEncoder
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.catalog import load_workload, workload_names
from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams
from support.cases import rest_nightly
from support.paths import ROOT
from support.sessions import collect_requests, collect_turns, said

TEXT = (ROOT / "docs" / "workloads.md").read_text()


def parameters():
    """Yields kind, names and documented default of each row of the table of parameters."""
    kind = None
    for row in re.findall(
        r"^\|(.*)\|(.*)\|(.*)\|.*\|$", TEXT.partition("## Parameters")[2].partition("\n## ")[0], re.M
    ):
        first, names, default = (cell.strip() for cell in row)
        if not (names := re.findall(r"`(\w+)`", names)):
            continue
        kind = first.strip("`") or kind
        yield kind, names, default


def test_the_table_has_every_parameter_with_its_default():
    documented = {}
    for kind, names, default in parameters():
        values = [value.replace(",", "") for value in re.findall(r'"\w+"|none|\d\.\d+|\d[\d,]*\d|\d', default)]
        values = [None if value == "none" else ast.literal_eval(value) for value in values]
        documented.setdefault(kind, {}).update(zip(names, values, strict="shipped" not in default))
    assert sorted(documented) == workload_names()
    for name, values in documented.items():
        kind = type(load_workload(name))()
        values["max_concurrency"] = 8
        assert values == {field: getattr(kind, field) for field in kind.__struct_fields__}


@pytest.mark.parametrize(
    "command",
    rest_nightly(re.findall(r"^radixkv bench (--workload .*--num.*)$", TEXT, re.M), kept=(0, 1, 2, 3, 4, 6)),
)
def test_the_large_sizes_fit_the_embedded_model_or_name_another(command):
    words = command.split()
    flags = dict(zip(words[::2], words[1::2], strict=True))
    name, model = flags.pop("--workload"), flags.pop("--model", "tiny")
    changes = {flag[2:].replace("-", "_"): int(value) for flag, value in flags.items()}
    sessions = load_workload(name, **changes).make(Source()).sessions
    encoder = PromptEncoder(resolve_tokenizer("tiny"))
    longest = 0
    for session in sessions[:4]:
        *_, (request, *_) = collect_turns(session, lambda request: ["word " * request.output_len] * request.n)
        tools = [{"role": "system", "content": json.dumps(tool)} for tool in request.tools]
        prompt = [*tools, *request.prompt] if tools else request.prompt
        encoded = encoder.encode(replace(request, prompt=prompt, tools=()))
        longest = max(longest, len(encoded.prompt) + request.output_len)
    assert (longest <= resolve("tiny").max_position_embeddings) == (model == "tiny")


def test_all_parameters_have_a_flag_except_the_documented_ones():
    (sentence,) = re.findall(r"Only (`\w+`.*?) have no flag", TEXT, re.DOTALL)
    named = {*re.findall(r"`(\w+)`", sentence)} - {"trace"}
    fields = {field for name in workload_names() for field in load_workload(name).__struct_fields__}
    assert named == fields - {*OVERRIDES}


@pytest.fixture
def example(tmp_path):
    """The page's example workload, built from its two files."""
    (toml,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (problems,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "desk.toml").write_text(toml)
    (tmp_path / "desk.jsonl").write_text(problems)
    return load_workload(str(tmp_path / "desk.toml")).make(Source(0, tmp_path / "desk.jsonl"))


def test_the_example_sends_the_documented_requests(example):
    first, *_ = requests = collect_requests(example.sessions)
    assert len(requests) == 3
    assert first.prompt.count("#### ") == 2
    assert first.check(said(" 7 * 6 = $42.\n100 - 42 = $58.\n#### 58"))
    assert example.counts == {}


def test_the_embedded_model_answers_the_example_rightly(example):
    requests = collect_requests(example.sessions)
    llm = LLM("tiny", max_total_tokens=2048, max_model_len=512)
    sampling = SamplingParams(temperature=0.0, max_tokens=requests[0].output_len, ignore_eos=True)
    answers = llm.generate([request.prompt for request in requests], sampling)
    llm.shutdown()
    assert all(
        request.check(said(answer.outputs[0].text)) for request, answer in zip(requests, answers, strict=True)
    )
