"""Generates a checkpoint of random weights whose outputs depend on the whole context, so that a wrong page shows.

Most tests serve it. Its outputs are noise, but varied, and the same on every machine. See
docs/decisions/0003-embedded-model.md for the measurements behind the scales.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

SEED = 20
N_LAYERS = 4
N_HEADS = 8
N_KV_HEADS = 4
HEAD_SIZE = 32
HIDDEN_SIZE = N_HEADS * HEAD_SIZE
INTERMEDIATE_SIZE = 768
CONTEXT_LENGTH = 8192

SCORE_SCALE = 4.0
"""Standard deviation of the attention scores before the softmax."""
ATTENTION_SCALE = 3.0
"""Gain of the attention output, which compensates for the averaging over the context."""
MLP_SCALE = 1.0
"""Gain of the MLP output."""
LOGIT_SCALE = 2.0
"""Standard deviation of the logits."""

BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_TURN = "<|eot_id|>"
SPECIAL_TOKENS = (BEGIN_OF_TEXT, END_OF_TEXT, START_HEADER, END_HEADER, END_OF_TURN)

_PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenizer pattern of Llama 3: merges never cross the boundaries of its matches."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{{{{ '{START_HEADER}' + message['role'] + '{END_HEADER}\\n\\n' }}}}"
    f"{{{{ message['content'] | trim + '{END_OF_TURN}' }}}}"
    "{% endfor %}{% if add_generation_prompt %}"
    f"{{{{ '{START_HEADER}assistant{END_HEADER}\\n\\n' }}}}"
    "{% endif %}"
)


def save_sensitive(folder: Path) -> None:
    """Writes the checkpoint to ``folder``: 21 MB, in a quarter of a second."""
    vocabulary, merges = _vocabulary()
    special = {token: len(vocabulary) + index for index, token in enumerate(SPECIAL_TOKENS)}
    token_ids = {
        "bos_token_id": special[BEGIN_OF_TEXT],
        "eos_token_id": [special[END_OF_TEXT], special[END_OF_TURN]],
    }
    vocab_size = len(vocabulary) + len(special)
    objects = {
        "config.json": _config(vocab_size) | token_ids,
        "generation_config.json": token_ids,
        "tokenizer.json": _tokenizer(vocabulary, merges, special),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN_OF_TEXT,
            "eos_token": END_OF_TURN,
            "model_max_length": CONTEXT_LENGTH,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in objects.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    save_file(_weights(vocab_size), folder / "model.safetensors", metadata={"format": "pt"})


def _config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _weights(vocab_size: int) -> dict[str, npt.NDArray[np.float32]]:
    bits = np.random.PCG64(SEED)
    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)

    def linear(n_outputs: int, n_inputs: int, scale: float) -> npt.NDArray[np.float32]:
        """Returns weights that map inputs of standard deviation 1 to outputs of standard deviation ``scale``."""
        return _normal(bits, (n_outputs, n_inputs), scale / math.sqrt(n_inputs))

    kv_size = N_KV_HEADS * HEAD_SIZE
    tensors = {"model.embed_tokens.weight": _normal(bits, (vocab_size, HIDDEN_SIZE), 1.0)}
    for layer in range(N_LAYERS):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": ones,
                "self_attn.q_proj": linear(HIDDEN_SIZE, HIDDEN_SIZE, math.sqrt(SCORE_SCALE)),
                "self_attn.k_proj": linear(kv_size, HIDDEN_SIZE, math.sqrt(SCORE_SCALE)),
                "self_attn.v_proj": linear(kv_size, HIDDEN_SIZE, 1.0),
                "self_attn.o_proj": linear(HIDDEN_SIZE, HIDDEN_SIZE, ATTENTION_SCALE),
                "post_attention_layernorm": ones,
                "mlp.gate_proj": linear(INTERMEDIATE_SIZE, HIDDEN_SIZE, 1.0),
                "mlp.up_proj": linear(INTERMEDIATE_SIZE, HIDDEN_SIZE, 1.0),
                "mlp.down_proj": linear(HIDDEN_SIZE, INTERMEDIATE_SIZE, MLP_SCALE),
            }.items()
        }
    tensors["model.norm.weight"] = ones
    tensors["lm_head.weight"] = linear(vocab_size, HIDDEN_SIZE, LOGIT_SCALE)
    return tensors


def _normal(bits: np.random.PCG64, shape: tuple[int, int], deviation: float) -> npt.NDArray[np.float32]:
    """Returns nearly normal values: each is the sum of four 16-bit integers.

    NumPy guarantees stable raw bits, but not stable normal variates. Integer sums and a single product round the
    same way on every processor.
    """
    uniform = bits.random_raw(shape).view(np.uint16).reshape(*shape, 4)
    total = uniform.sum(axis=-1, dtype=np.int32) - 2 * 0xFFFF
    # The variance of a 16-bit integer is (2**32 - 1) / 12.
    factor = np.float32(deviation / math.sqrt(4 * ((1 << 32) - 1) / 12))
    values: npt.NDArray[np.float32] = total.astype(np.float32) * factor
    return values


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Returns the vocabulary (one token for each byte, then one for each merge) and the merges."""
    lines = Path(__file__).with_name("sensitive_merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line.split(" ") for line in lines]
    tokens = [*_byte_characters(), *("".join(pair) for pair in merges)]
    return {token: index for index, token in enumerate(tokens)}, merges


def _byte_characters() -> list[str]:
    """Returns the character of each byte in byte-level BPE: itself if visible, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]], special: dict[str, int]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    begin = {"SpecialToken": {"id": BEGIN_OF_TEXT, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, token_id in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _PRE_TOKENIZER_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                BEGIN_OF_TEXT: {"id": BEGIN_OF_TEXT, "ids": [special[BEGIN_OF_TEXT]], "tokens": [BEGIN_OF_TEXT]}
            },
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
