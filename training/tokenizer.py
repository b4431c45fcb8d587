"""The tokenizer: byte-level BPE with one token per digit, trained on the training texts and plain English."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_TURN = "<|eot_id|>"
SPECIAL_TOKENS = (BEGIN, END, START_HEADER, END_HEADER, END_OF_TURN)

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokens that merges never cross: words with the space before them, single digits, punctuation, white space."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{{{{ '{START_HEADER}' + message['role'] + '{END_HEADER}\\n\\n' }}}}"
    "{% if message['content'] %}{{ message['content'] | trim }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}{{ '}' }}"
    "{% endfor %}"
    f"{{{{ '{END_OF_TURN}' }}}}"
    "{% endfor %}{% if add_generation_prompt %}"
    f"{{{{ '{START_HEADER}assistant{END_HEADER}\\n\\n' }}}}"
    "{% endif %}"
)
"""Jinja chat template, which renders tool calls as JSON with ``name`` and ``arguments``, one per line."""


def header(role: str) -> str:
    """Returns the header that begins a message in the chat template."""
    return f"{START_HEADER}{role}{END_HEADER}\n\n"


def chat_message(message: Mapping[str, str]) -> str:
    """Renders a message without tool calls as the chat template does."""
    return header(message["role"]) + message["content"].strip() + END_OF_TURN


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains the tokenizer; the vocabulary is smaller than ``vocab_size`` if no pair occurs twice any more."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END_OF_TURN,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")
