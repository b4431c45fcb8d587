"""Times whole batches with half of their rows under JSON schemas, and the same batches without grammars.

The batches have ``--rows`` requests with the same prompts and ``--output-len`` tokens each. In the constrained ones
every second request has one of three schemas, whose arrays go on past the last token, so that both kinds have
equally many tokens. The kinds alternate; the ratio of each pair is the throughput with grammars over that without.
The model has dummy weights and a made vocabulary of JSON's signs, numbers and words.

Then measures what the first use of a schema of 50 fields adds to the time of its request, alone in the engine.

    python bench/structured.py --output-file bench/results/structured.jsonl
    python bench/structured.py --small --device cpu --rows 8 --output-len 64
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from engine import open_llm
from result_lines import add_gpu_flags, report, script_parser
from shapes import LLAMA_8B, SMALL, Config, write_model

from gpu import gpu_provenance
from radixkv import LLM, SamplingParams
from radixkv.wire.structured_outputs import StructuredOutputs

PROMPT_TOKENS = 64
WORD_LETTERS = "aeiou" * 3 + "bcdfghklmnprstvw"


def schemas() -> list[str]:
    """Returns three schemas whose documents need not end."""
    name = {"type": "string", "maxLength": 12}
    rows = {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "name": name, "kind": {"enum": ["tool", "place", "person"]}},
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    }
    points = {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}
    flags = {
        "type": "object",
        "properties": {
            "is_open": {"type": "boolean"},
            "tags": {"type": "array", "items": name, "minItems": 1, "maxItems": 4},
            "owner": {"anyOf": [name, {"type": "null"}]},
        },
        "required": ["is_open", "tags", "owner"],
        "additionalProperties": False,
    }
    return [json.dumps({"type": "array", "items": item, "minItems": 2000}) for item in (rows, points, flags)]


def large_schema(number: int) -> str:
    """Returns a schema of 50 fields, another for each number."""
    kinds = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["low", "high"]})
    fields = {f"field_{number}_{index}": kinds[index % len(kinds)] for index in range(50)}
    return json.dumps(
        {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    )


def write_made_tokenizer(config: Config, folder: Path) -> None:
    """Writes a byte-level tokenizer with signs of JSON, numbers and made words, up to the vocabulary's size."""
    rng = random.Random(0)
    signs = ['{"', '"}', '":', '", "', "}, {", '": "', '": {', '": [', "], ", "},", "true", "false", "null"]
    texts = dict.fromkeys([chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"])
    texts |= dict.fromkeys(sign.replace(" ", "Ġ") for sign in signs)
    texts |= dict.fromkeys(str(number) for number in range(1000))
    while len(texts) < config["vocab_size"] - 1:
        word = "".join(rng.choices(WORD_LETTERS, k=rng.randrange(2, 9)))
        texts |= dict.fromkeys((rng.choice(("", "Ġ")) + word,))
    vocab = {text: index for index, text in enumerate(texts)}
    end = config["vocab_size"] - 1
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": end, "content": "<end>", "special": True, **_PLAIN_TOKEN}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


_PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--pairs", type=int, default=10)
    parser.set_defaults(cache="on", settings={})
    arguments = parser.parse_args()
    config = SMALL if arguments.small else LLAMA_8B
    config = config | {"eos_token_id": config["vocab_size"] - 1}
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(config, Path(name))
        write_made_tokenizer(config, folder)
        llm = open_llm(arguments, folder)
        about = {
            "benchmark": "structured",
            "model": "small" if arguments.small else "llama-3.1-8b, dummy weights",
            "vocab": config["vocab_size"],
            **gpu_provenance(arguments.device, arguments.commit),
        }
        report(arguments.output_file, compare(llm, arguments), about)
        report(arguments.output_file, first_uses(llm), about)


def compare(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the throughputs of pairs of batches, and their ratios."""
    rng = random.Random(0)
    prompts = [[rng.randrange(30_000) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.rows)]
    grammars = [StructuredOutputs(json=schema) for schema in schemas()]

    def seconds(has_grammars: bool) -> float:
        sampling = [
            SamplingParams(
                temperature=0.8,
                seed=row,
                max_tokens=arguments.output_len,
                ignore_eos=True,
                structured_outputs=grammars[row // 2 % 3] if has_grammars and row % 2 else None,
            )
            for row in range(arguments.rows)
        ]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - begun
        n_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert n_tokens == arguments.rows * arguments.output_len, "answers end before their length"
        return n_tokens / elapsed

    seconds(False), seconds(True)
    pairs = []
    for index in range(arguments.pairs):
        kinds = (False, True) if index % 2 == 0 else (True, False)
        found = {kind: seconds(kind) for kind in kinds}
        pairs.append((found[False], found[True]))
        print(f"{found[False]:.0f} tokens/s without, {found[True]:.0f} with", flush=True)
    ratios = sorted(constrained / free for free, constrained in pairs)
    return {
        "rows": arguments.rows,
        "output_len": arguments.output_len,
        "pairs": arguments.pairs,
        "tokens_per_s_without": round(median(free for free, _ in pairs), 1),
        "tokens_per_s_with": round(median(constrained for _, constrained in pairs), 1),
        "ratio_median": round(median(ratios), 4),
        "ratio_min": round(ratios[0], 4),
        "ratio_max": round(ratios[-1], 4),
    }


def first_uses(llm: LLM) -> dict[str, Any]:
    """Returns what the first use of schemas of 50 fields adds to a request of one token, in milliseconds."""

    def milliseconds(schema: str) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, structured_outputs=StructuredOutputs(json=schema))
        begun = time.perf_counter()
        llm.generate([[17] * PROMPT_TOKENS], sampling, use_tqdm=False)
        return 1e3 * (time.perf_counter() - begun)

    milliseconds(large_schema(-1))
    first = [milliseconds(large_schema(number)) for number in range(10)]
    again = [milliseconds(large_schema(number)) for number in range(10)]
    added = sorted(one - other for one, other in zip(first, again, strict=True))
    return {
        "fields": 50,
        "first_use_added_ms_median": round(median(added), 1),
        "first_use_added_ms_max": round(added[-1], 1),
    }


if __name__ == "__main__":
    main()
