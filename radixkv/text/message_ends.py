"""The special tokens with which a checkpoint's chat template ends messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from radixkv.checkpoints.special_tokens import added_special_tokens
from radixkv.errors import CheckpointError, InvalidRequest
from radixkv.text.chat_template import ChatTemplate

_CONTENTS = ("first", "second", "third", "fourth")
_ROLES: Sequence[Sequence[str]] = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user", "assistant"),  # some templates refuse the role system, or write it elsewhere
)


def message_end_ids(folder: Path) -> frozenset[int]:
    """Returns the special tokens that follow the content of messages, as the template of a checkpoint writes them.

    Most templates end a message with a token that ends answers, too. Some have another one, such as ``<|end|>``
    of GPT-OSS, or begin the next message at once, with a token of its own.

    Args:
        folder: of the tokenizer.

    Returns:
        Ids; none if there is no template or tokenizer, or the template cannot be read or rendered.

    Cost: up to two renderings of four words, and some 50 ms for a tokenizer of 128,000 tokens.
    """
    try:
        template = ChatTemplate.load(folder)
        ids = added_special_tokens(folder) if template is not None else {}
    except CheckpointError:  # requests are told why, if they need it
        return frozenset()
    if template is None:
        return frozenset()
    for roles in _ROLES:
        messages = [{"role": role, "content": text} for role, text in zip(roles, _CONTENTS, strict=True)]
        try:
            rendered = template.render(messages, add_generation_prompt=False)
        except InvalidRequest:
            continue
        if found := frozenset(_ids_behind(rendered, ids)):
            return found
    return frozenset()


def _ids_behind(rendered: str, ids: dict[str, int]) -> Iterator[int]:
    """Yields the id of each token that is the next thing behind a message's content."""
    begins = [rendered.find(text) for text in _CONTENTS]
    if begins != sorted(begins) or begins[0] < 0:
        return  # the template changes contents or their order
    ends = [begin + len(text) for begin, text in zip(begins, _CONTENTS, strict=True)]
    for end, next_begin in pairwise([*ends, len(rendered)]):
        behind = rendered[end:next_begin].lstrip()
        found = max((token for token in ids if behind.startswith(token)), key=len, default=None)
        if found is not None:
            yield ids[found]
