"""The training loop with its optimisers, loss and learning rate schedule."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

import torch
from torch import Tensor
from torch.nn import functional

from training.llama import Llama

LEARNING_RATE = 3e-3
REPORT_S = 20
"""Seconds between reports of the loss."""


@dataclass(frozen=True)
class Clock:
    """Measures the completed fraction of the training, by steps if their number is given, else by time."""

    started_s: float
    """Start of the training on the clock of ``time.monotonic``."""
    ends_s: float
    """End of the training on the same clock."""
    n_steps: int | None = None

    def fraction(self, n_steps: int) -> float:
        """Returns the fraction completed after ``n_steps``, from 0; the training ends at 1."""
        if self.n_steps is not None:
            return n_steps / self.n_steps
        return (time.monotonic() - self.started_s) / (self.ends_s - self.started_s)


class Trainer:
    """Trains a model, with Muon for the matrices of the layers and AdamW for embedding and norms."""

    def __init__(self, model: Llama) -> None:
        """Creates the optimisers; on CUDA the layers and the loss are compiled and computed in bfloat16."""
        self._model = model
        self._device = next(model.parameters()).device
        is_cuda = self._device.type == "cuda"
        self._dtype = torch.bfloat16 if is_cuda else torch.float32
        matrices = [weight for name, weight in model.named_parameters() if "_proj" in name]
        others = [weight for name, weight in model.named_parameters() if "_proj" not in name]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                others, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=is_cuda
            ),
        )
        self._loss_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = weighted_loss
        if is_cuda:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self._loss_of = torch.compile(weighted_loss, dynamic=False)

    def run(
        self, batches: Iterator[tuple[Tensor, Tensor]], clock: Clock, progress: Synchronized[float]
    ) -> list[dict[str, float]]:
        """Trains until the clock's fraction reaches 1.

        Args:
            batches: token ids and loss weights, ``[rows, length]`` each.
            clock: decides when the training ends.
            progress: receives the completed fraction, for the worker processes.

        Returns:
            The reports, which are also printed: one every ``REPORT_S`` seconds and one at the end.
        """
        history: list[dict[str, float]] = []
        losses: list[Tensor] = []
        n_tokens = n_steps = 0
        reported_s = time.monotonic()
        while (fraction := clock.fraction(n_steps)) < 1:
            progress.value = fraction
            self._set_rate(n_steps, fraction)
            ids, weights = next(batches)
            losses.append(self._step(ids.to(self._device).long(), weights.to(self._device)))
            n_tokens += ids.numel()
            n_steps += 1
            if time.monotonic() - reported_s > REPORT_S or clock.fraction(n_steps) >= 1:
                line = {
                    "seconds": round(time.monotonic() - clock.started_s),
                    "steps": n_steps,
                    "million_tokens": round(n_tokens / 1e6, 1),
                    "loss": round(torch.stack(losses).mean().item(), 4),
                }
                print(json.dumps(line), flush=True)
                history.append(line)
                losses.clear()
                reported_s = time.monotonic()
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

    def _set_rate(self, n_steps: int, fraction: float) -> None:
        """Sets the learning rate: warm-up over 100 steps, constant, then linear decay to 1% over the last 40%."""
        rate = LEARNING_RATE * min(1.0, (n_steps + 1) / 100, max(0.0, (1 - fraction) / 0.4) + 0.01)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate


def weighted_loss(hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each next token, weighted by that token's loss weight."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none")
    counts = weights.roll(-1, 1).float()
    counts = torch.cat((counts[:, :-1], torch.zeros_like(counts[:, :1])), 1).flatten()
    return (losses * counts).sum() / counts.sum()
