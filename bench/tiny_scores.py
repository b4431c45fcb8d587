"""How often the embedded model answers right through the engine: held-out problems by family and length of prompt.

Appends one JSON line: percent right and how many were asked, cache on, greedy, in float32 on the CPU. With
``--compare``, Transformers answers the first prompts of each family at the shortest lengths too, in float32, and the
line says how many answers have the same tokens. With ``--gsm8k``, real problems are asked as well, behind eight
worked examples and without any; the answers may be 256 tokens long.

    python bench/tiny_scores.py --gsm8k gsm8k_test.jsonl --output-file bench/results/tiny_scores.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.bench.datasets.gsm8k import read_problems
from radixkv.bench.environment import environment
from radixkv.bench.families.layout import asked, worked
from radixkv.bench.kinds.answers import right_result
from radixkv.checkpoints import resolve
from training.cases import LENGTHS, OUTPUT_TOKENS, Case, cases, families

COMPARED_LENGTHS = (500, 2000)
GSM8K_SHOTS = 8
GSM8K_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--cases", type=int, default=200, help="of each family, with prompts up to 2000 tokens")
    parser.add_argument("--long-cases", type=int, default=50, help="of each family, with longer prompts")
    parser.add_argument("--compare", type=int, default=10, help="cases of each family and length")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE")
    parser.add_argument("--gsm8k-problems", type=int, default=50)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    llm = LLM("tiny", device="cpu")
    line: dict[str, Any] = {"model": "tiny", "engine": "radixkv", "dtype": "float32", "cache": "on"}
    line |= scored(llm, lambda length: arguments.cases if length <= 2000 else arguments.long_cases)
    line["scores_s"] = round(time.perf_counter() - begun)
    if arguments.compare:
        line["transformers"] = compared(llm, arguments.compare)
    if arguments.gsm8k is not None:
        line["gsm8k"] = real_problems(llm, arguments.gsm8k, arguments.gsm8k_problems)
    line |= {"date": date.today().isoformat(), "environment": environment()}
    print(json.dumps(line))
    if arguments.output_file is not None:
        with arguments.output_file.open("a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")


def scored(llm: LLM, n_cases: Callable[[int], int]) -> dict[str, Any]:
    """Percent right by family and length, with the numbers of cases and of prompt tokens."""
    percents: dict[str, dict[int, float]] = {}
    prompt_tokens: dict[str, dict[int, int]] = {}
    for family in families():
        percents[family], prompt_tokens[family] = {}, {}
        for length in LENGTHS:
            taken = list(islice(cases(family, length), n_cases(length)))
            outputs = answered(llm, taken)
            n_right = sum(case.is_right(text_of(output)) for case, output in zip(taken, outputs, strict=True))
            percents[family][length] = round(100 * n_right / len(taken), 1)
            prompt_tokens[family][length] = sum(len(output.prompt_token_ids) for output in outputs) // len(taken)
            print(f"{family} at {length}: {n_right} of {len(taken)} right", flush=True)
    return {
        "n_cases": {length: n_cases(length) for length in LENGTHS},
        "right_pct": percents,
        "mean_prompt_tokens": prompt_tokens,
    }


def answered(llm: LLM, taken: Sequence[Case]) -> list[RequestOutput]:
    """Greedy answers, which may end early."""
    prompts = [case.prompt if isinstance(case.prompt, str) else llm.chat_prompt(case.prompt) for case in taken]
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS), use_tqdm=False)


def compared(llm: LLM, n_cases: int) -> dict[str, int]:
    """How many greedy answers of Transformers have the very tokens of the engine's."""
    model = LlamaForCausalLM.from_pretrained(resolve("tiny").folder, dtype=torch.float32).eval()
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
    print(f"the tokens of Transformers: {sum(same)} of {len(same)}", flush=True)
    return {"compared": len(same), "equal": sum(same)}


def real_problems(llm: LLM, path: Path, n_problems: int) -> dict[str, float]:
    """Percent right of GSM8K's problems behind the file's first eight, and asked alone."""
    problems = read_problems(path).items
    shots, problems = worked(problems[:GSM8K_SHOTS]), problems[GSM8K_SHOTS : GSM8K_SHOTS + n_problems]
    sampling = SamplingParams(temperature=0.0, max_tokens=GSM8K_TOKENS)
    percents: dict[str, float] = {"problems": len(problems)}
    for name, head in {"shots_8_right_pct": shots, "shots_0_right_pct": ""}.items():
        outputs = llm.generate([head + asked(problem) for problem in problems], sampling, use_tqdm=False)
        checks = [right_result(problem) for problem in problems]
        n_right = sum(
            check is not None and check([text_of(output)]) for check, output in zip(checks, outputs, strict=True)
        )
        percents[name] = round(100 * n_right / len(problems), 1)
    print(f"GSM8K: {percents}", flush=True)
    return percents


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


if __name__ == "__main__":
    main()
