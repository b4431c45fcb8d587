"""What other engines let one set in Python, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature

from radixkv.errors import UnsupportedFeature, shortened


@dataclass(frozen=True)
class Foreign:
    """The settings that other engines have for something that is here too."""

    taker: str
    """What they are given to."""
    instead: Mapping[str, str]
    """What to use for some of them."""
    neutral: Mapping[str, tuple[object, ...]]
    """Their values that ask for what this engine does anyway."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why other values of some of them are refused, and what to do."""
    likeness: float = 0.6
    """How like a known name an unknown one must be to count as a slip, 1 being the same. Higher where others have
    more settings than are named here."""

    def refuse(self, settings: Mapping[str, object], known: Iterable[str] = ()) -> None:
        """Raises ``UnsupportedFeature`` that names the settings unless all have neutral values.

        Args:
            known: names that a wrong one may have been meant for.
        """
        asked = sorted(name for name, value in settings.items() if not self._is_neutral(name, value))
        for name in asked:
            if name in self.instead:
                raise self._refusal(name, f"; use {self.instead[name]}")
            if name in self.reasons:
                text = f"{name} {shortened(settings[name])} is not supported: {self.reasons[name]}"
                raise UnsupportedFeature(text, param=name)
        for name in asked:
            if name not in self.neutral and (close := get_close_matches(name, known, 1, self.likeness)):
                raise self._refusal(name, f"; did you mean {close[0]}?")
        if asked:
            raise self._refusal(", ".join(asked), " in this release; leave it out")

    def _is_neutral(self, name: str, value: object) -> bool:
        return any(_is_same(value, neutral) for neutral in self.neutral.get(name, ()))

    def _refusal(self, names: str, advice: str) -> UnsupportedFeature:
        return UnsupportedFeature(f"{self.taker} has no setting {names}{advice}", param=names)


def dtype_name(dtype: object) -> str:
    """The name of a number type in all its spellings: ``half``, ``float`` and torch's own ``torch.float16`` too."""
    name = str(dtype).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def names_of(call: Callable[..., object]) -> list[str]:
    """The arguments that a caller can name; ``**settings`` has none."""
    return [name for name, one in signature(call).parameters.items() if one.kind is not one.VAR_KEYWORD]


def _is_same(value: object, neutral: object) -> bool:
    """1 is the same as 1.0, and True is not."""
    is_alike = type(value) is type(neutral) or (type(value) is int and type(neutral) is float)
    return is_alike and value == neutral


_ONE_DEVICE = "this release computes on one device; use 1"
_TEXT_ONLY = "this release generates text, and nothing else; leave it out"

LLM = Foreign(
    "LLM",
    instead={
        "model_path": "model",
        "tokenizer_path": "tokenizer",
        "block_size": "page_size",
        "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs",
        "chunked_prefill_size": "max_num_batched_tokens",
        "disable_radix_cache": "enable_prefix_caching",
        "scheduling_policy": "schedule_policy",
        "random_seed": "seed",
    },
    neutral={
        "tensor_parallel_size": (1,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "quantization": (None,),
        "kv_cache_dtype": ("auto",),
        "trust_remote_code": (False,),
        "enable_lora": (False,),
        "enable_chunked_prefill": (True,),
        "disable_log_stats": (True, False),
        "tokenizer_mode": ("auto",),
        "task": ("auto", "generate"),
        "runner": ("auto", "generate"),
    },
    reasons={
        "tensor_parallel_size": _ONE_DEVICE,
        "pipeline_parallel_size": _ONE_DEVICE,
        "data_parallel_size": _ONE_DEVICE,
        "quantization": "weights are used as they are, in dtype; leave it out",
        "kv_cache_dtype": "KV has the type of dtype; leave it out",
        "trust_remote_code": "code from a checkpoint is never run; leave it out",
        "enable_lora": "this release has no adapters; leave it out",
        "enable_chunked_prefill": "prompts are always computed in chunks; leave it out",
        "tokenizer_mode": "tokenizer.json is used where there is one; leave it out",
        "task": _TEXT_ONLY,
        "runner": _TEXT_ONLY,
    },
    likeness=0.8,
)

GENERATE = Foreign(
    "LLM.generate",
    instead={"prompt_token_ids": "prompts"},
    neutral={
        "prompt_token_ids": (None,),
        "lora_request": (None,),
        "prompt_adapter_request": (None,),
        "guided_options_request": (None,),
        "tokenization_kwargs": (None,),
    },
)

CHAT = Foreign(
    "LLM.chat",
    instead={"chat_template": "that of LLM, which takes a file"},
    neutral={
        "chat_template": (None,),
        "chat_template_content_format": ("auto",),
        "tools": (None, []),
        "lora_request": (None,),
        "mm_processor_kwargs": (None,),
        "tokenization_kwargs": (None,),
    },
)

SAMPLING = Foreign(
    "SamplingParams",
    instead={
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "top_logprobs": "logprobs",
        "best_of": "n, and choose among the answers",
        "no_stop_trim": "include_stop_str_in_output",
    },
    neutral={
        "best_of": (None, 1),
        "no_stop_trim": (False,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "detokenize": (True,),
        "spaces_between_special_tokens": (True,),
        "flat_logprobs": (False,),
        "structured_outputs": (None,),
        "guided_decoding": (None,),
        "structural_tag": (None,),
        "json_schema": (None,),
        "regex": (None,),
        "ebnf": (None,),
        "stop_regex": (None, []),
        "bad_words": (None, []),
        "allowed_token_ids": (None,),
        "logits_processors": (None, []),
        "truncate_prompt_tokens": (None,),
        "thinking_token_budget": (None,),
        "skip_reading_prefix_cache": (None, False),
        "extra_args": (None,),
        "custom_params": (None,),
    },
)
