"""The tokenizer: byte-level BPE with one token per digit, trained on the training texts and plain English."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.chat_format import BEGIN, CHAT_TEMPLATE, END_OF_TURN, SPECIAL_TOKENS, TAGS

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokens that merges never cross: words with the space before them, single digits, punctuation, white space."""

_TRAINING_PATTERN = _SPLIT_PATTERN.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?\p{L}+")
"""The pattern while merges are learned, so that no token joins punctuation and letters.

Otherwise there would be tokens such as ``.user``, which end a sentence and begin a role at once.
"""

_TOKENS = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *TAGS))))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains the tokenizer; the vocabulary is smaller than ``vocab_size`` if no pair occurs twice any more."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(_TRAINING_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(TAGS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_between_tokens(texts), trainer)
    tokenizer.pre_tokenizer = _pre_tokenizer(_SPLIT_PATTERN)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
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


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _between_tokens(texts: Iterable[str]) -> Iterator[str]:
    """Yields what stands between the special tokens and tags, which have tokens of their own."""
    for text in texts:
        yield from filter(None, _TOKENS.split(text))
