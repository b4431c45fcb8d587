"""Readers of recorded requests: traces, conversations or token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec

from radixkv.bench.workloads.conversations import Conversation, read_conversations
from radixkv.bench.workloads.datasets import Format, Items, read_lines
from radixkv.bench.workloads.mooncake import BLOCK_LEN, read_trace
from radixkv.checkpoints import resolve_tokenizer
from radixkv.config import CacheConfig
from radixkv.errors import CheckpointError, ConfigError, RequestError
from radixkv.simulator.traffic import BlockTraffic, Rule, TokenTraffic, Traffic
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import normalize_messages
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import pack_tokens

_HEAD_BYTES = 1 << 20
"""Bytes at the start of a file that are searched for a known field."""
_KEY = re.compile(rb'"(hash_ids|prompt_token_ids|messages|conversations)"\s*:')

TOKEN_IDS = Format(
    name="a file of token ids",
    item_format='{"prompt_token_ids": [id, ...]}',
    fields=frozenset({"prompt_token_ids"}),
    workload="trace",
)

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _TokenRequest(msgspec.Struct, frozen=True):
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Recording:
    """The requests of a file."""

    name: str
    """File name."""
    traffic: Traffic
    """The prompts."""
    n_bad_lines: int
    """Malformed lines that were skipped."""
    tokenizer: str | None
    """Name of the tokenizer that encoded the texts, without its folder; None if the file has no texts."""


def read_recording(
    path: Path,
    *,
    page_size: int | None = None,
    rule: Rule | None = None,
    tokenizer: str | None = None,
    skip_bad_lines: bool = False,
    compact_pages: bool = True,
) -> Recording:
    """Reads a Mooncake trace, lines of token ids, or conversations with one request per assistant answer.

    Args:
        path: the file; the first known field in it determines the format.
        page_size: in tokens; None selects the trace's block size for the rule ``blocks`` and 16 for ``engine``.
        rule: None selects ``blocks`` for traces and ``engine`` for other files.
        tokenizer: a folder, a hub name or ``tiny``; required for conversations and refused for other files.
        skip_bad_lines: skip and count malformed lines instead of refusing them.
        compact_pages: see ``BlockTraffic``.

    Raises:
        ConfigError: the file cannot be read or has an unknown format, a line is malformed, or a setting does not
            apply to this kind of file.
        CheckpointError: the tokenizer does not exist.
    """
    key = _find_first_key(path)
    is_trace, is_text = key == "hash_ids", key in ("messages", "conversations")
    if tokenizer is not None and not is_text:
        raise ConfigError(f"{path} has no texts for tokenizer {tokenizer!r} to encode; leave it out")
    if rule == "blocks" and not is_trace:
        raise ConfigError(f"rule blocks is only for traces of blocks, not for {path}; use engine, or leave it out")
    if page_size is not None and page_size < 1:
        raise ConfigError(f"page_size {page_size} must be at least 1")
    if is_trace:
        trace = read_trace(path, skip_bad_lines=skip_bad_lines)
        rule = "blocks" if rule is None else rule
        page_size = page_size or (BLOCK_LEN if rule == "blocks" else CacheConfig.page_size)
        block_traffic = BlockTraffic(trace.items, page_size, rule, compact_pages=compact_pages)
        return Recording(path.name, block_traffic, trace.n_bad_lines, None)
    if is_text:
        if tokenizer is None:
            raise ConfigError(f"{path} holds conversations; say which tokenizer encodes them (--tokenizer)")
        conversations = read_conversations(path, skip_bad_lines=skip_bad_lines)
        prompts = Items(list(_encode_prompts(path, conversations.items, tokenizer)), conversations.n_bad_lines)
        if not prompts.items:
            raise ConfigError(f"no conversation of {path} has an answer to a message; give another file")
    else:
        prompts = read_lines(path, _decode_token_ids, expected=TOKEN_IDS, skip_bad_lines=skip_bad_lines)
    traffic = TokenTraffic(prompts.items, page_size or CacheConfig.page_size)
    return Recording(path.name, traffic, prompts.n_bad_lines, None if tokenizer is None else Path(tokenizer).name)


def _find_first_key(path: Path) -> str:
    """Returns the first field in the file that determines its format."""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"cannot read the trace {path}: it is read twice and must be a regular file; save it as one first"
        )
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    match = _KEY.search(head)
    if match is None:
        raise ConfigError(
            f"{path} is no trace: its first {len(head)} bytes have none of the fields hash_ids (Mooncake), "
            "prompt_token_ids, messages (OpenAI) and conversations (ShareGPT); give JSON lines with one of them"
        )
    return match[1].decode()


def _decode_token_ids(line: bytes) -> bytes:
    return pack_tokens(msgspec.json.decode(line, type=_TokenRequest).prompt_token_ids)


def _encode_prompts(path: Path, conversations: list[Conversation], tokenizer: str) -> Iterator[bytes]:
    """Yields the rendered, encoded messages before each answer; consecutive answers count as one."""
    folder = resolve_tokenizer(tokenizer)
    encoder, template = Tokenizer.load(folder), ChatTemplate.load(folder, None)
    if template is None:
        raise CheckpointError(f"tokenizer {tokenizer!r} has no chat template; give one that has a chat template")
    for number, conversation in enumerate(conversations, 1):
        messages = normalize_messages(conversation.messages)
        n_before = 0
        for is_answer, group in groupby(messages, lambda message: message["role"] == "assistant"):
            if is_answer and n_before:
                try:
                    text = template.render(messages[:n_before])
                except RequestError as error:
                    raise ConfigError(f"conversation {number} of {path}: {error}") from None
                yield encoder.encode(text, adds_special_tokens=False)
            n_before += len(list(group))
