"""Trains the embedded model from scratch, in five minutes on one GPU; README.md has the details.

    python -m training.train --output FOLDER

from the repository's root. The folder gets the whole checkpoint and ``scores.json``. On a CPU,
``--steps 2 --batch-tokens 1024 --n-workers 0 --score-cases 1`` tries it.

The learning rate and the lengths of the rows follow the clock: the training always ends within its time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from training.batches import Batches, Stage, load_batches
from training.cases import LENGTHS, SCORE_SEEDS
from training.checkpoint import load, save, write_json
from training.english import sentences
from training.llama import Llama, Shape
from training.scores import score
from training.texts import HELD_OUT_SEEDS, Texts, held_out_questions
from training.tokenizer import save_tokenizer, train_tokenizer
from training.trainer import Clock, Trainer

STAGES = (
    Stage(0.0, (512,), (1.0,)),
    Stage(0.2, (512, 2048), (0.3, 0.7)),
    Stage(0.55, (512, 2048, 8192), (0.1, 0.5, 0.4)),
)
RESERVE_S = 45
"""Of the time, for the scores."""
VOCAB_SIZE = 3072


def main() -> None:
    """Trains, writes, scores."""
    began = time.monotonic()
    options = _options()
    output: Path = options.output
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_tokenizer_texts(), VOCAB_SIZE)
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    save_tokenizer(tokenizer, output, shape.context_length)
    model = Llama(shape).to(options.device)
    n_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{n_parameters:,} parameters, {shape}", flush=True)

    progress = multiprocessing.get_context("fork").Value("d", 0.0)
    held_out = held_out_questions(SCORE_SEEDS)
    batches = Batches(output / "tokenizer.json", held_out, STAGES, options.batch_tokens, options.seed, progress)
    loaded = load_batches(batches, options.n_workers)
    clock = Clock(time.monotonic(), began + options.time_limit_s - RESERVE_S, options.steps)
    history = Trainer(model).run(loaded, clock, progress)
    del loaded  # ends the workers

    save(model, tokenizer, output)
    lines = {"parameters": n_parameters, "seconds": round(time.monotonic() - began), "history": history}
    write_json(output / "scores.json", lines)
    is_cuda = options.device == "cuda"
    scored = score(
        load(output, shape).to(options.device, torch.bfloat16 if is_cuda else torch.float32),
        tokenizer,
        options.score_cases,
        LENGTHS if is_cuda else LENGTHS[:2],
    )
    print(json.dumps(scored), flush=True)
    write_json(output / "scores.json", lines | {"cases": options.score_cases, "scores": scored})
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


def _tokenizer_texts() -> Iterator[str]:
    texts = Texts(HELD_OUT_SEEDS.stop, frozenset())
    for _ in range(3000):
        yield "".join(piece.text for piece in texts.text(500))
    yield from islice(sentences(HELD_OUT_SEEDS.stop), 20_000)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--time-limit-s", type=float, default=290, help="of everything")
    parser.add_argument("--steps", type=int, help="instead of the time")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--n-workers", type=int, default=14, help="processes that make texts; 0: none")
    parser.add_argument("--score-cases", type=int, default=64, help="of each family and length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
