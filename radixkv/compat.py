"""Tables of the settings that other engines have in their Python interfaces: accepted, renamed or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature

from radixkv.errors import UnsupportedFeature, shortened


@dataclass(frozen=True)
class CompatTable:
    """The settings that other engines accept in one class or method, and this engine does not have."""

    callee: str
    """The class or method that the settings are passed to, as error texts name it."""
    replacements: Mapping[str, str]
    """For settings that are here under another name: what to use."""
    no_op_values: Mapping[str, tuple[object, ...]]
    """The values of each setting that are accepted, because they ask for what this engine does anyway."""
    refusal_reasons: Mapping[str, str] = field(default_factory=dict)
    """For some settings: why other values are refused, and what to do."""
    typo_cutoff: float = 0.6
    """Similarity, 0 to 1, from which an unknown name counts as a misspelt known one, as in ``difflib``. Higher for
    callees for which other engines have more settings than this table lists."""

    def check(self, settings: Mapping[str, object], known: Iterable[str] = ()) -> None:
        """Raises ``UnsupportedFeature``, naming the settings, unless all have values without effect.

        Args:
            settings: names and values that ``callee`` does not know.
            known: names that ``callee`` knows; a misspelt one is suggested.
        """
        requested = sorted(name for name, value in settings.items() if not self._is_no_op(name, value))
        for name in requested:
            if name in self.replacements:
                raise self._error(name, f"; use {self.replacements[name]}")
            if name in self.refusal_reasons:
                text = f"{name} {shortened(settings[name])} is not supported: {self.refusal_reasons[name]}"
                raise UnsupportedFeature(text, param=name)
        for name in requested:
            if name not in self.no_op_values and (matches := get_close_matches(name, known, 1, self.typo_cutoff)):
                raise self._error(name, f"; did you mean {matches[0]}?")
        if requested:
            raise self._error(", ".join(requested), " in this release; leave it out")

    def _is_no_op(self, name: str, value: object) -> bool:
        return any(_equals(value, no_op_value) for no_op_value in self.no_op_values.get(name, ()))

    def _error(self, names: str, advice: str) -> UnsupportedFeature:
        return UnsupportedFeature(f"{self.callee} has no setting {names}{advice}", param=names)


def dtype_name(dtype: object) -> str:
    """Returns the canonical name of a dtype: ``float16`` for ``half`` and for ``torch.float16``."""
    name = str(dtype).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def parameter_names(call: Callable[..., object]) -> list[str]:
    """Returns the names of a callable's parameters, without ``**settings``."""
    return [name for name, one in signature(call).parameters.items() if one.kind is not one.VAR_KEYWORD]


def _equals(value: object, no_op_value: object) -> bool:
    """Whether the values are equal and of one type; an int may equal a float, but True does not equal 1."""
    is_same_type = type(value) is type(no_op_value) or (type(value) is int and type(no_op_value) is float)
    return is_same_type and value == no_op_value


_ONE_DEVICE = "this release computes on one device; use 1"
_TEXT_ONLY = "this release only generates text; leave it out"

LLM_SETTINGS = CompatTable(
    "LLM",
    replacements={
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
    no_op_values={
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
    refusal_reasons={
        "tensor_parallel_size": _ONE_DEVICE,
        "pipeline_parallel_size": _ONE_DEVICE,
        "data_parallel_size": _ONE_DEVICE,
        "quantization": "weights are used as they are, in dtype; leave it out",
        "kv_cache_dtype": "the KV cache is in dtype; leave it out",
        "trust_remote_code": "code from a checkpoint is never run; leave it out",
        "enable_lora": "this release has no adapters; leave it out",
        "enable_chunked_prefill": "prompts are always computed in chunks; leave it out",
        "tokenizer_mode": "tokenizer.json is used if there is one; leave it out",
        "task": _TEXT_ONLY,
        "runner": _TEXT_ONLY,
    },
    typo_cutoff=0.8,
)

GENERATE_SETTINGS = CompatTable(
    "LLM.generate",
    replacements={"prompt_token_ids": "prompts"},
    no_op_values={
        "prompt_token_ids": (None,),
        "lora_request": (None,),
        "prompt_adapter_request": (None,),
        "guided_options_request": (None,),
        "tokenization_kwargs": (None,),
    },
)

CHAT_SETTINGS = CompatTable(
    "LLM.chat",
    replacements={"chat_template": "that of LLM, which takes a file"},
    no_op_values={
        "chat_template": (None,),
        "chat_template_content_format": ("auto",),
        "tools": (None, []),
        "lora_request": (None,),
        "mm_processor_kwargs": (None,),
        "tokenization_kwargs": (None,),
    },
)

SAMPLING_SETTINGS = CompatTable(
    "SamplingParams",
    replacements={
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "top_logprobs": "logprobs",
        "best_of": "n, and choose among the outputs",
        "no_stop_trim": "include_stop_str_in_output",
    },
    no_op_values={
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
