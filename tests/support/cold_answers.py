"""Models, and what they answer to prompts of which nothing is cached: the oracle of caches and tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from radixkv.checkpoints import Checkpoint
from support.checkpoints import VOCAB
from support.cpu_server import CpuServer, Logits, Output, recorded_logits

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windowed experts": {
        "model_type": "mixtral",
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "heads of two shapes": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,
    },
}
"""Settings of ``save_checkpoint``."""


class ColdAnswers:
    """The output, logits and stored KV of every prompt alone, each on a fresh server.

    Args:
        checkpoint: the model.
        prompts: by seed.
        n_tokens: tokens of each answer.
        settings: of the servers.
    """

    def __init__(
        self, checkpoint: Checkpoint, prompts: Mapping[int, list[int]], n_tokens: int, **settings: Any
    ) -> None:
        self.prompts = prompts
        self.outputs: dict[int, Output] = {}
        self.stored: dict[int, torch.Tensor] = {}
        with recorded_logits() as self.logits:
            for seed, prompt in prompts.items():
                server = CpuServer(checkpoint, **settings)
                server.add(seed, prompt, n_tokens)
                server.run()
                self.outputs[seed] = server.outputs[seed]
                self.stored[seed] = server.stored(prompt + server.outputs[seed].tokens)
        assert len({tuple(output.tokens) for output in self.outputs.values()}) == len(prompts)

    def check(self, server: CpuServer, logits: Logits, seeds: Iterable[int] | None = None, salt: str = "") -> None:
        """Checks that a server has given the same bits. Its KV is compared as far as the device has it cached."""
        for seed in self.prompts if seeds is None else seeds:
            tokens = server.outputs[seed].tokens
            assert tokens == self.outputs[seed].tokens
            for index in range(len(tokens)):
                assert torch.equal(logits[seed, index], self.logits[seed, index]), (seed, index)
            stored = server.stored(self.prompts[seed] + tokens, salt)
            assert torch.equal(stored, self.stored[seed][:, :, : stored.shape[2]]), seed
