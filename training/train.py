"""Trains the embedded model from scratch, in seven minutes on one GPU; README.md has the details.

    python -m training.train --output FOLDER

runs from the repository's root and writes the whole checkpoint and ``scores.json`` to the folder. For a short test
on a CPU add ``--steps 2 --batch-tokens 1024 --n-workers 0 --score-cases 1``.

Learning rate and row lengths follow the clock, so the training always ends within its time limit.
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
from training.llama import Llama, ModelShape
from training.scores import score
from training.texts import HELD_OUT_SEEDS, Texts, held_out_questions
from training.tokenizer import save_tokenizer, train_tokenizer
from training.trainer import Clock, Trainer

STAGES = (
    Stage(0.0, (512, 1024), (0.5, 0.5)),
    Stage(0.2, (1024, 2048), (0.4, 0.6)),
    Stage(0.55, (1024, 2048, 8192), (0.2, 0.4, 0.4)),
)
RESERVE_S = 60
"""Seconds of the time limit reserved for the scores."""
VOCAB_SIZE = 3072


def main() -> None:
    """Trains the model, writes the checkpoint and scores it."""
    started_s = time.monotonic()
    options = _options()
    output: Path = options.output
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_tokenizer_texts(), VOCAB_SIZE)
    shape = ModelShape(vocab_size=tokenizer.get_vocab_size())
    save_tokenizer(tokenizer, output, shape.context_length)
    model = Llama(shape).to(options.device)
    n_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{n_parameters:,} parameters, {shape}", flush=True)

    progress = multiprocessing.get_context("fork").Value("d", 0.0)
    held_out = held_out_questions(SCORE_SEEDS)
    batches = Batches(output / "tokenizer.json", held_out, STAGES, options.batch_tokens, options.seed, progress)
    loaded = load_batches(batches, options.n_workers)
    clock = Clock(time.monotonic(), started_s + options.time_limit_s - RESERVE_S, options.steps)
    history = Trainer(model).run(loaded, clock, progress)
    del loaded  # stops the worker processes

    save(model, tokenizer, output)
    record = {"parameters": n_parameters, "seconds": round(time.monotonic() - started_s), "history": history}
    write_json(output / "scores.json", record)
    is_cuda = options.device == "cuda"
    scores = score(
        load(output, shape).to(options.device, torch.bfloat16 if is_cuda else torch.float32),
        tokenizer,
        options.score_cases,
        LENGTHS[-1] if is_cuda else LENGTHS[1],
    )
    print(json.dumps(scores), flush=True)
    write_json(output / "scores.json", record | {"cases": options.score_cases, "scores": scores})
    print(f"done in {time.monotonic() - started_s:.0f} s", flush=True)


def _tokenizer_texts() -> Iterator[str]:
    texts = Texts(HELD_OUT_SEEDS.stop, frozenset())
    for _ in range(3000):
        yield "".join(part.text for part in texts.text(500))
    yield from islice(sentences(HELD_OUT_SEEDS.stop), 20_000)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--time-limit-s", type=float, default=420, help="total time, scores included")
    parser.add_argument("--steps", type=int, help="number of training steps, replaces the time limit")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--n-workers", type=int, default=14, help="processes that generate texts; 0: none")
    parser.add_argument("--score-cases", type=int, default=64, help="cases of each family and length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
