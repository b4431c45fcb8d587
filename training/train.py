"""Trains the embedded model from scratch, in minutes on one GPU.

    python -m training.train --output FOLDER --time-limit-s 480

from the repository's root, with torch, tokenizers, safetensors and this package importable. The folder gets the
whole checkpoint and ``scores.json``. ``--resume FOLDER`` begins with the weights and the tokenizer of such a
folder.
``--steps 20 --batch-tokens 2048 --n-workers 0`` tries it on a CPU.

The learning rate and the lengths of the rows follow the clock: the training always ends within its time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.batches import Batches, Stage, load
from training.english import sentences
from training.llama import Llama, Shape
from training.scores import LENGTHS, score, score_seeds
from training.texts import HELD_OUT_SEEDS, Texts, held_out_questions
from training.tokenizer import BEGIN, END, END_OF_TURN, save_tokenizer, train_tokenizer

SHARD_BYTES = 11_500_000
STAGES = (
    Stage(0.0, (512,), (1.0,)),
    Stage(0.2, (512, 2048), (0.3, 0.7)),
    Stage(0.55, (512, 2048, 8192), (0.1, 0.5, 0.4)),
)


def main() -> None:
    """Trains, scores, writes."""
    began = time.monotonic()
    options = _options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    if options.resume:
        tokenizer = Tokenizer.from_file(str(options.resume / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(_tokenizer_texts(), options.vocab_size)
    save_tokenizer(tokenizer, output, Shape(0).context_length)
    shape = Shape(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        n_layers=options.n_layers,
        n_heads=options.n_heads,
        n_kv_heads=options.n_kv_heads,
    )
    model = Llama(shape).to(options.device)
    if options.resume:
        weights: dict[str, Tensor] = {}
        for file in options.resume.glob("*.safetensors"):
            weights |= load_file(file)
        model.load_state_dict(weights)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {shape}", flush=True)

    progress = multiprocessing.get_context("fork").Value("d", options.begin_at)
    held_out = held_out_questions(score_seeds())
    batches = Batches(output / "tokenizer.json", held_out, STAGES, options.batch_tokens, options.seed, progress)
    loaded = load(batches, options.n_workers)
    trainer = Trainer(model, options.learning_rate, options.optimizer, is_compiled=options.compile)

    def look() -> None:
        save(model, output)
        if options.score_cases:
            model.eval()
            print(json.dumps(score(model, tokenizer, 64, (500, 2000))), flush=True)
            model.train()

    history = trainer.run(loaded, options, began, progress, look)
    del loaded

    save(model, output)
    last: dict[str, object] = {"seconds": round(time.monotonic() - began), "history": history}
    if options.score_cases:
        scored = scores_of(output, shape, tokenizer, options.score_cases, options.device)
        print(json.dumps(scored), flush=True)
        last["scores"] = scored
    last["options"] = {name: str(value) for name, value in vars(options).items()}
    (output / "scores.json").write_text(json.dumps(last, indent=1) + "\n")
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


class Trainer:
    """The model, its optimizers, and the loss."""

    def __init__(self, model: Llama, learning_rate: float, optimizer: str, *, is_compiled: bool) -> None:
        self._model = model
        self._rate = learning_rate
        self._device = next(model.parameters()).device
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        fused = self._device.type == "cuda"
        matrices = [weight for name, weight in model.named_parameters() if "_proj" in name]
        others = [weight for name, weight in model.named_parameters() if "_proj" not in name]
        adam = {"lr": learning_rate, "betas": (0.9, 0.95), "eps": 1e-10, "fused": fused}
        if optimizer == "muon":
            self._optimizers: list[torch.optim.Optimizer] = [
                torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(others, weight_decay=0.0, **adam),
            ]
        else:
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            self._optimizers = [torch.optim.AdamW(groups, **adam)]
        self._loss_of: Callable[..., Tensor] = weighted_loss
        if is_compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self._loss_of = torch.compile(weighted_loss, dynamic=False)

    def run(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        options: argparse.Namespace,
        began: float,
        progress: object,
        look: Callable[[], None],
    ) -> list[dict[str, float]]:
        """Trains until the time or the steps are over, with a line and a ``look`` now and then."""
        history: list[dict[str, float]] = []
        start = reported = looked = time.monotonic()
        end = began + options.time_limit_s - options.reserve_s
        losses: list[Tensor] = []
        n_tokens = n_steps = waited_tokens = 0
        waited = 0.0
        while True:
            now = time.monotonic()
            over = (now - start) / (end - start) if options.steps is None else n_steps / options.steps
            over = options.begin_at + (1 - options.begin_at) * over
            if over >= 1:
                break
            progress.value = over
            self._set_rate(n_steps, over)
            ids, weights = next(batches)
            waited += time.monotonic() - now
            losses.append(self._step(ids.to(self._device).long(), weights.to(self._device)))
            n_tokens += ids.numel()
            waited_tokens += ids.numel()
            n_steps += 1
            if now - reported > options.report_s:
                loss = torch.stack(losses).mean().item()
                spent = time.monotonic() - reported
                line = {
                    "seconds": round(now - start),
                    "steps": n_steps,
                    "million_tokens": round(n_tokens / 1e6, 1),
                    "loss": round(loss, 4),
                    "tokens_per_s": round(waited_tokens / spent),
                    "waiting_pct": round(100 * waited / spent),
                }
                losses.clear()
                waited, waited_tokens, reported = 0.0, 0, time.monotonic()
                history.append(line)
                print(json.dumps(line), flush=True)
                if now - looked > options.look_s:
                    look()
                    looked = reported = time.monotonic()
        return history

    def _step(self, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is torch.bfloat16):
            hidden = self._model(ids, self._dtype)
            loss = self._loss_of(hidden, self._model.model.embed_tokens.weight, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _set_rate(self, n_steps: int, over: float) -> None:
        """Up over 100 steps, level, and down to nothing over the last 40%."""
        rate = self._rate * min(1.0, (n_steps + 1) / 100, max(0.0, (1 - over) / 0.4) + 0.01)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate


def weighted_loss(hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, by the next token's weight."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none")
    counts = weights.roll(-1, 1).float()
    counts = torch.cat((counts[:, :-1], torch.zeros_like(counts[:, :1])), 1).flatten()
    return (losses * counts).sum() / counts.sum()


def scores_of(
    folder: Path, shape: Shape, tokenizer: Tokenizer, n_cases: int, device: str
) -> dict[str, dict[str, float]]:
    """Of the weights as they were written, in bfloat16 on a GPU and float32 elsewhere."""
    model = Llama(shape)
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    model.load_state_dict(weights)
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return score(model, tokenizer, n_cases, LENGTHS if device == "cuda" else LENGTHS[:2])


def save(model: Llama, folder: Path) -> None:
    """Writes the weights in bfloat16, in shards, and the configs."""
    tensors = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in model.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)
        index |= dict.fromkeys(shard, file_name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TURN)],
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write(folder / "config.json", model.shape.config() | ids)
    _write(folder / "generation_config.json", ids)
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _tokenizer_texts() -> Iterator[str]:
    texts = Texts(HELD_OUT_SEEDS.stop, frozenset())
    for _ in range(3000):
        yield "".join(piece.text for piece in texts.text(500))
    yield from islice(sentences(HELD_OUT_SEEDS.stop), 20_000)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--begin-at", type=float, default=0.0, help="part of the schedule to leave out")
    parser.add_argument("--time-limit-s", type=float, default=480, help="of everything")
    parser.add_argument("--reserve-s", type=float, default=60, help="of it, for the scores")
    parser.add_argument("--steps", type=int, help="instead of the time")
    parser.add_argument("--report-s", type=float, default=20)
    parser.add_argument("--look-s", type=float, default=100, help="between saves and small scores")
    parser.add_argument("--score-cases", type=int, default=256, help="of each family and length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--n-workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=3072)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=704)
    parser.add_argument("--n-layers", type=int, default=8)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--n-kv-heads", type=int, default=2)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    return parser.parse_args()


if __name__ == "__main__":
    main()
