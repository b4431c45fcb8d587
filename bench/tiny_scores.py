"""Accuracy of the embedded model on held-out problems, by family and prompt length, through the engine.

Appends a JSON line for each family: percent correct and number of cases, with the cache on, greedy; in float32 on
the CPU, unless ``--setting`` says otherwise. A case of an agent is correct if all its calls and its answer are.
Another line has the number of Transformers' answers (in float32) to some of these prompts that have the same
tokens. ``--gsm8k`` adds GSM8K's problems, with eight worked examples and without any. With ``--grammar`` all tools
are strict, and JSON must match its schema. ``answers`` is a hash of all tokens of a family's answers: two runs with
the same hash, such as with the cache on and off, gave the same answers.

Run it from the repository's root with ``-m``: otherwise Transformers takes ``kernels.py`` here for a package.

    python -m bench.tiny_scores --gsm8k gsm8k_test.jsonl --output-file bench/results/tiny_scores.jsonl
    python -m bench.tiny_scores --setting 'device="cuda"' --setting 'quantization="fp8"' --compare 0
    python -m bench.tiny_scores --setting enable_prefix_caching=false --cases 40 --long-cases 0 --compare 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench.gpu import gpu_provenance
from bench.result_lines import add_setting_flag, report, script_parser
from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.tools import parse_tool_use
from radixkv.lab.bench.session import Reply
from radixkv.lab.bench.workloads.arithmetic import read_problems
from radixkv.lab.bench.workloads.problems import question_prompt, result_check, worked_examples
from radixkv.text.chat_template import ChatTemplate
from radixkv.wire.structured_outputs import StructuredOutputs
from training.cases import OUTPUT_TOKENS, Step, cases, count_right, families, fitting_cases, lengths
from training.chat_format import ChatFormat, Conversation

COMPARED_LENGTHS = (500, 2000)
GSM8K_SHOTS = 8
GSM8K_TOKENS = 256
"""Maximum tokens of an answer to a GSM8K problem."""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="a variant of it, such as one with quantized weights")
    add_setting_flag(parser)
    parser.add_argument("--commit", help="the commit that is checked out, if there is no .git folder")
    parser.add_argument("--families", nargs="*", choices=families(), default=families())
    parser.add_argument("--cases", type=int, default=150, help="of each family, with prompts up to 2000 tokens")
    parser.add_argument("--long-cases", type=int, default=30, help="of each family, with longer prompts; 0: none")
    parser.add_argument("--compare", type=int, default=5, help="prompts of each family and of two lengths; 0: none")
    parser.add_argument("--grammar", action="store_true", help="constrain calls and JSON by their schemas")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE")
    parser.add_argument("--gsm8k-problems", type=int, default=50)
    arguments = parser.parse_args()
    settings = {"device": "cpu", **dict(arguments.settings)}
    environment = gpu_provenance(settings["device"], arguments.commit)
    common = {"model": Path(arguments.model).name, "settings": settings, **environment}
    for line in lines(LLM(arguments.model, **settings), arguments):
        report(arguments.output_file, line, common)


def lines(llm: LLM, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the requested result lines."""
    for family in arguments.families:
        counts = {length: arguments.cases if length <= 2000 else arguments.long_cases for length in lengths(family)}
        counts = {length: count for length, count in counts.items() if count}
        yield score(llm, family, counts, has_grammar=arguments.grammar)
    if arguments.compare:
        yield compare_with_transformers(llm, arguments.compare)
    if arguments.gsm8k is not None:
        yield score_gsm8k(llm, arguments.gsm8k, arguments.gsm8k_problems)


def score(llm: LLM, family: str, n_cases: Mapping[int, int], *, has_grammar: bool) -> dict[str, Any]:
    """Returns percent correct by prompt length, with the numbers of cases and of prompt tokens."""
    percents: dict[int, float] = {}
    n_tokens: dict[int, int] = {}
    answers = hashlib.sha256()
    tokenizer = Tokenizer.from_file(str(resolve("tiny").folder / "tokenizer.json"))

    def token_ids(prompt: str | Conversation) -> list[int]:
        ready = prompt_of(llm, prompt)
        return tokenizer.encode(ready).ids if isinstance(ready, str) else ready

    for length, count in n_cases.items():
        taken = fitting_cases(family, length, count, token_ids)
        outputs = generate(llm, [step for case in taken for step in case.steps], has_grammar=has_grammar)
        n_right = count_right(taken, map(text_of, outputs))
        answers.update(json.dumps([list(output.outputs[0].token_ids) for output in outputs]).encode())
        percents[length] = round(100 * n_right / count, 1)
        n_tokens[length] = sum(len(output.prompt_token_ids) for output in outputs) // len(outputs)
        print(f"{family} at {length}: {n_right} of {count} right", flush=True)
    grammar = {"grammar": True} if has_grammar else {}
    return {
        "family": family,
        **grammar,
        "cases": dict(n_cases),
        "right_pct": percents,
        "mean_prompt_tokens": n_tokens,
        "answers": answers.hexdigest()[:16],
    }


def generate(llm: LLM, steps: Sequence[Step], *, has_grammar: bool = False) -> list[RequestOutput]:
    """Returns greedy answers, which may end at the end of sequence."""
    prompts = [prompt_of(llm, step.prompt) for step in steps]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, structured_outputs=constraint)
        for constraint in (constraints(steps) if has_grammar else [None] * len(steps))
    ]
    return llm.generate(prompts, sampling, use_tqdm=False)


def constraints(steps: Sequence[Step]) -> list[StructuredOutputs | None]:
    """Returns what the answers must match if all tools are strict, and JSON matches its schema."""
    folder, chat_format = resolve("tiny").folder, ChatFormat()
    answer_format = AnswerFormat.load(folder, ChatTemplate.load(folder, None))
    assert answer_format is not None, "the model calls tools"

    def constraint(prompt: str | Conversation) -> StructuredOutputs | None:
        if isinstance(prompt, str):
            return None
        if prompt.schema is not None:
            return StructuredOutputs(json=json.dumps(prompt.schema))
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in prompt.tools]
        return answer_format.constraint(chat_format.prompt(prompt), parse_tool_use(tools))

    return [constraint(step.prompt) for step in steps]


def prompt_of(llm: LLM, prompt: str | Conversation) -> str | list[int]:
    """Returns a text unchanged, and a chat as the token ids of the prompt that the chat template makes of it."""
    if isinstance(prompt, str):
        return prompt
    return llm.chat_prompt(prompt.messages, chat_template_kwargs=prompt.template_variables)


def compare_with_transformers(llm: LLM, n_cases: int) -> dict[str, int]:
    """Counts the greedy answers of Transformers that have the same tokens as the engine's."""
    model = LlamaForCausalLM.from_pretrained(resolve("tiny").folder, dtype=torch.float32)
    same = []
    for family in families():
        for length in COMPARED_LENGTHS:
            for output in generate(llm, [case.steps[0] for case in islice(cases(family, length), n_cases)]):
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


def score_gsm8k(llm: LLM, path: Path, n_problems: int) -> dict[str, Any]:
    """Returns percent correct of GSM8K's problems, with the file's first eight as examples and without examples."""
    problems = read_problems(path).items
    shots, problems = worked_examples(problems[:GSM8K_SHOTS]), problems[GSM8K_SHOTS : GSM8K_SHOTS + n_problems]
    sampling = SamplingParams(temperature=0.0, max_tokens=GSM8K_TOKENS)
    percents: dict[int, float] = {}
    for n_shots, head in {GSM8K_SHOTS: shots, 0: ""}.items():
        outputs = llm.generate([head + question_prompt(problem) for problem in problems], sampling, use_tqdm=False)
        checks = [result_check(problem) for problem in problems]
        n_right = sum(
            check is not None and check(Reply((text_of(output),)))
            for check, output in zip(checks, outputs, strict=True)
        )
        percents[n_shots] = round(100 * n_right / len(problems), 1)
    return {"gsm8k_problems": len(problems), "right_pct_by_shots": percents}


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


if __name__ == "__main__":
    main()
