"""Which tokenizers take time and memory linear in a text, whatever the text is.

A ``tokenizer.json`` may have normalizers that multiply a text, and patterns that take exponential time. So only
steps that are known to be harmless count as bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models

CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen split texts into words, but for the digits."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KNOWN_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        CL100K_WORDS % r"\p{N}{1,3}",  # Llama 3
        CL100K_WORDS % r"\p{N}",  # Qwen 2 and 3
        CL100K_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
        % r"\p{N}",  # Qwen 3.5
        _CASED_WORDS % (_CONTRACTION, _CONTRACTION, r"\p{N}{1,3}"),  # GPT-OSS
        _CASED_WORDS % ("", "", r"\p{N}"),  # Mistral's Tekken
        r"\p{N}{1,3}",
        r"\p{N}",
    }
)
_MAX_STEPS = 16
_MAX_LITERAL_CHARACTERS = 64
_MAX_GROWTH = 32
"""How many times as long a text may become in all normalizers together."""
_MAX_ADDED_IDS = 64
_PLAIN_NORMALIZERS = frozenset("BertNormalizer Lowercase NFC NFD NFKC NFKD Nmt Strip StripAccents".split())
_PLAIN_PRE_TOKENIZERS = frozenset(
    "BertPreTokenizer CharDelimiterSplit Digits Metaspace Punctuation UnicodeScripts Whitespace "
    "WhitespaceSplit".split()
)
_PLAIN_DECODERS = frozenset("BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Strip WordPiece".split())


def is_bounded(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether encoding takes time and memory linear in the text, but for a logarithm."""
    normalizers = steps_of(backend.normalizer, "normalizers")
    return (
        _looks_up_short_words(backend.model)
        and len(normalizers) <= _MAX_STEPS
        and math.prod(map(_growth, normalizers)) <= _MAX_GROWTH
        and _splits_in_linear_time(steps_of(backend.pre_tokenizer, "pretokenizers"))
        and _adds_few_ids(steps_of(backend.post_processor, "processors"))
    )


def odd_decoder(backend: tokenizers.Tokenizer) -> str | None:
    """Returns the type of a decoding step that may take long or make long texts; None if there is none."""
    for step in steps_of(backend.decoder, "decoders"):
        is_short_replacement = step["type"] == "Replace" and _growth(step) <= _MAX_GROWTH
        if step["type"] not in _PLAIN_DECODERS and not is_short_replacement:
            return str(step["type"])
    return None


def _looks_up_short_words(model: models.Model) -> bool:
    """Returns whether a model adds only short texts to the characters of a word that it looks up."""
    if not isinstance(model, models.BPE):
        return isinstance(model, models.WordLevel)
    beside = (model.continuing_subword_prefix, model.end_of_word_suffix)
    return all(len(text or "") <= _MAX_LITERAL_CHARACTERS for text in beside)


def steps_of(component: Any, nested: str) -> list[Mapping[str, Any]]:
    """Returns the steps of a component of a tokenizer, as ``tokenizer.json`` has them.

    Args:
        component: a normalizer, pre-tokenizer, post-processor or decoder; None: it has no step.
        nested: the field in which a sequence has its steps.
    """
    if component is None:
        return []
    steps: list[Mapping[str, Any]] = []
    rest: list[Mapping[str, Any]] = [json.loads(component.__getstate__())]
    while rest:
        step = rest.pop()
        if step["type"] == "Sequence":
            rest += reversed(step[nested])
        else:
            steps.append(step)
    return steps


def _growth(step: Mapping[str, Any]) -> float:
    """Returns by how much a normalizer may multiply the length of a text; infinite if that is not known."""
    if step["type"] in _PLAIN_NORMALIZERS:
        return 1.0  # or a small number, for few characters
    if step["type"] == "Prepend":
        return 1.0 if len(step["prepend"]) <= _MAX_LITERAL_CHARACTERS else math.inf
    literal = _literal(step.get("pattern")) if step["type"] == "Replace" else None
    return math.inf if literal is None else max(1.0, len(step["content"]) / len(literal))


def _splits_in_linear_time(steps: list[Mapping[str, Any]]) -> bool:
    # A second ByteLevel would write each letter of the first one as two.
    n_byte_level = sum(step["type"] == "ByteLevel" for step in steps)
    return len(steps) <= _MAX_STEPS and n_byte_level <= 1 and all(map(_is_known_split, steps))


def _is_known_split(step: Mapping[str, Any]) -> bool:
    if step["type"] != "Split":
        return step["type"] == "ByteLevel" or step["type"] in _PLAIN_PRE_TOKENIZERS
    return step["pattern"].get("Regex") in _KNOWN_PATTERNS or _literal(step["pattern"]) is not None


def _literal(pattern: object) -> str | None:
    """Returns the text that a pattern stands for; None if it is a regular expression, empty or long."""
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text if isinstance(text, str) and 0 < len(text) <= _MAX_LITERAL_CHARACTERS else None


def _adds_few_ids(steps: list[Mapping[str, Any]]) -> bool:
    return len(steps) <= _MAX_STEPS and all(map(_is_short_template, steps))


def _is_short_template(step: Mapping[str, Any]) -> bool:
    if step["type"] != "TemplateProcessing":
        return step["type"] in ("BertProcessing", "ByteLevel", "RobertaProcessing")
    n_texts = sum("Sequence" in piece for piece in step["single"])
    n_ids = sum(len(token["ids"]) for token in step["special_tokens"].values())
    return n_texts <= 1 and len(step["single"]) <= _MAX_STEPS and n_ids <= _MAX_ADDED_IDS
