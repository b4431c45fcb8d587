"""How often the embedded model answers right through the engine: held-out problems by family and length of prompt.

Appends a JSON line for each family: percent right and how many were asked, cache on, greedy, in float32 on the CPU.
Another line says how many of Transformers' answers to some of these prompts, in float32, have the same tokens. With
``--gsm8k``, real problems are asked as well, behind eight worked examples and without any.

From the repository's root, and with ``-m``: Transformers would take ``kernels.py`` in this folder for a package.

    python -m bench.tiny_scores --gsm8k gsm8k_test.jsonl --output-file bench/results/tiny_scores.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.bench.environment import origin
from radixkv.bench.workloads.answers import right_result
from radixkv.bench.workloads.datasets.gsm8k import read_problems
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.checkpoints import resolve
from training.cases import LENGTHS, OUTPUT_TOKENS, Case, cases, families

COMPARED_LENGTHS = (500, 2000)
GSM8K_SHOTS = 8
GSM8K_TOKENS = 256
"""Of an answer, at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--families", nargs="*", choices=families(), default=families())
    parser.add_argument("--cases", type=int, default=150, help="of each family, with prompts up to 2000 tokens")
    parser.add_argument("--long-cases", type=int, default=30, help="of each family, with longer prompts; 0: none")
    parser.add_argument("--compare", type=int, default=5, help="prompts of each family and of two lengths; 0: none")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE")
    parser.add_argument("--gsm8k-problems", type=int, default=50)
    arguments = parser.parse_args()
    common = {"model": "tiny", **origin()}
    for line in lines(LLM("tiny", device="cpu"), arguments):
        print(json.dumps(line), flush=True)
        if arguments.output_file is not None:
            with arguments.output_file.open("a", encoding="utf-8") as output:
                output.write(json.dumps(line | common) + "\n")


def lines(llm: LLM, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All that is asked for."""
    for family in arguments.families:
        counts = {length: arguments.cases if length <= 2000 else arguments.long_cases for length in LENGTHS}
        yield scored(llm, family, {length: count for length, count in counts.items() if count})
    if arguments.compare:
        yield compared(llm, arguments.compare)
    if arguments.gsm8k is not None:
        yield real_problems(llm, arguments.gsm8k, arguments.gsm8k_problems)


def scored(llm: LLM, family: str, n_cases: Mapping[int, int]) -> dict[str, Any]:
    """Percent right by length, with the numbers of cases and of prompt tokens."""
    percents: dict[int, float] = {}
    n_tokens: dict[int, int] = {}
    for length, count in n_cases.items():
        taken = list(islice(cases(family, length), count))
        outputs = answered(llm, taken)
        n_right = sum(case.is_right(text_of(output)) for case, output in zip(taken, outputs, strict=True))
        percents[length] = round(100 * n_right / count, 1)
        n_tokens[length] = sum(len(output.prompt_token_ids) for output in outputs) // count
        print(f"{family} at {length}: {n_right} of {count} right", flush=True)
    return {"family": family, "cases": dict(n_cases), "right_pct": percents, "mean_prompt_tokens": n_tokens}


def answered(llm: LLM, taken: Sequence[Case]) -> list[RequestOutput]:
    """Greedy answers, which may end early."""
    prompts = [case.prompt if isinstance(case.prompt, str) else llm.chat_prompt(case.prompt) for case in taken]
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS), use_tqdm=False)


def compared(llm: LLM, n_cases: int) -> dict[str, int]:
    """How many greedy answers of Transformers have the very tokens of the engine's."""
    model = LlamaForCausalLM.from_pretrained(resolve("tiny").folder, dtype=torch.float32)
    same = []
    for family in families():
        for length in COMPARED_LENGTHS:
            for output in answered(llm, list(islice(cases(family, length), n_cases))):
                prompt = torch.tensor([output.prompt_token_ids])
                ids = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=OUTPUT_TOKENS,
                    pad_token_id=0,
                )
                theirs = ids[0, prompt.shape[1] :].tolist()
                ours = list(output.outputs[0].token_ids)
                same.append(theirs[: len(ours)] == ours and len(theirs) - len(ours) in (0, 1))  # 1: the end
    return {"compared_with_transformers": len(same), "equal": sum(same)}


def real_problems(llm: LLM, path: Path, n_problems: int) -> dict[str, Any]:
    """Percent right of GSM8K's problems behind the file's first eight, and asked alone."""
    problems = read_problems(path).items
    shots, problems = worked(problems[:GSM8K_SHOTS]), problems[GSM8K_SHOTS : GSM8K_SHOTS + n_problems]
    sampling = SamplingParams(temperature=0.0, max_tokens=GSM8K_TOKENS)
    percents: dict[int, float] = {}
    for n_shots, head in {GSM8K_SHOTS: shots, 0: ""}.items():
        outputs = llm.generate([head + asked(problem) for problem in problems], sampling, use_tqdm=False)
        checks = [right_result(problem) for problem in problems]
        n_right = sum(
            check is not None and check([text_of(output)]) for check, output in zip(checks, outputs, strict=True)
        )
        percents[n_shots] = round(100 * n_right / len(problems), 1)
    return {"gsm8k_problems": len(problems), "right_pct_by_shots": percents}


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


if __name__ == "__main__":
    main()
