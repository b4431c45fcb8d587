"""The Llama model in plain torch, with the parameter names of Hugging Face checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 768
    n_layers: int = 5
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    context_length: int = 8192
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-5

    def config(self) -> dict[str, object]:
        """Returns the entries of ``config.json`` that describe the model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context_length,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        }


class Cache:
    """KV cache of a batch for generation, ``[n_layers, 2, batch, n_kv_heads, length, head_dim]``."""

    def __init__(self, shape: ModelShape, batch: int, length: int, like: Tensor) -> None:
        sizes = (shape.n_layers, 2, batch, shape.n_kv_heads, length, shape.head_dim)
        self.keys_values = torch.zeros(sizes, dtype=like.dtype, device=like.device)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.n_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.n_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.n_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.n_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns causal attention over ``x``, ``[batch, length, hidden]``."""
        q, k, v = self.project_heads(x, cos, sin)
        k, v = self.repeat_for_query_heads(k), self.repeat_for_query_heads(v)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.merge_heads(out)

    def merge_heads(self, out: Tensor) -> Tensor:
        """Projects the heads' outputs, ``[batch, n_heads, length, head_dim]``, to ``[batch, length, hidden]``."""
        merge_heads: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merge_heads

    def project_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries, rotated keys, and values, each ``[batch, heads, length, head_dim]``."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def repeat_for_query_heads(self, heads: Tensor) -> Tensor:
        """Repeats keys or values for each query head, because not all of torch's kernels support grouped heads."""
        return heads.repeat_interleave(self.shape.n_heads // self.shape.n_kv_heads, dim=1)


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., hidden]`` to ``[..., hidden]``."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 for any input dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension; returns the input's dtype."""
        full = x.float()
        full = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)
        return (full * self.weight).to(x.dtype)


class Layer(nn.Module):
    """Decoder layer: attention and MLP, each with a norm before it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps ``[batch, length, hidden]`` to ``[batch, length, hidden]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return self.apply_mlp(x)

    def apply_mlp(self, x: Tensor) -> Tensor:
        """Adds the MLP branch, the second half of ``forward``."""
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, layers and final norm: the model without its head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """The model with a head tied to the embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.n_layers) if ends_branch else 1))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the final hidden states, ``[batch, length, hidden]`` in ``dtype``, of ids ``[batch, length]``."""
        x = self.model.embed_tokens(ids).to(dtype)
        cos, sin = (
            part.to(dtype) for part in rotary_angles(self.shape, torch.arange(ids.shape[1], device=ids.device))
        )
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.model.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states ``[..., hidden]`` to logits ``[..., vocab_size]``."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def forward_cached(self, ids: Tensor, starts: Tensor, cache: Cache) -> Tensor:
        """Computes the final hidden states of new tokens and stores their keys and values in the cache.

        Args:
            ids: ``[batch, length]``, the new tokens.
            starts: ``[batch]``, position of each sequence's first new token; all 0 if ``length`` is above 1.
            cache: cache of all positions before ``starts``.
        """
        batch, length = ids.shape
        positions = starts[:, None] + torch.arange(length, device=ids.device)
        cos, sin = (part[:, None] for part in rotary_angles(self.shape, positions))
        rows = torch.arange(batch, device=ids.device)[:, None]
        n_used = int(positions.max()) + 1
        visible = torch.arange(n_used, device=ids.device) <= starts[:, None, None, None]
        x = self.model.embed_tokens(ids)
        for layer, (keys, values) in zip(self.model.layers, cache.keys_values, strict=True):
            assert isinstance(layer, Layer)
            q, k, v = layer.self_attn.project_heads(layer.input_layernorm(x), cos.to(x.dtype), sin.to(x.dtype))
            keys.transpose(1, 2)[rows, positions] = k.transpose(1, 2)
            values.transpose(1, 2)[rows, positions] = v.transpose(1, 2)
            if length == 1:
                k, v = keys[:, :, :n_used], values[:, :, :n_used]
            k, v = layer.self_attn.repeat_for_query_heads(k), layer.self_attn.repeat_for_query_heads(v)
            mask = visible if length == 1 else None
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=length > 1)
            x = layer.apply_mlp(x + layer.self_attn.merge_heads(out))
        hidden: Tensor = self.model.norm(x)
        return hidden


def rotary_angles(shape: ModelShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine for positions of any shape ``[...]``, each ``[..., head_dim]`` float32."""
    powers = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angles = positions[..., None].float() * shape.rope_theta**-powers
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding in the half-split form of Transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
