"""Files of requests that can be replayed: traces, conversations, token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec

from radixkv.bench.workloads.datasets.conversations import Conversation, read_conversations
from radixkv.bench.workloads.datasets.formats import Format
from radixkv.bench.workloads.datasets.lines import Items, read_lines
from radixkv.bench.workloads.datasets.mooncake import BLOCK_LEN, read_trace
from radixkv.checkpoints import resolve_tokenizer
from radixkv.config import CacheConfig
from radixkv.errors import CheckpointError, ConfigError, RequestError
from radixkv.simulator.traffic import BlockTraffic, Rule, TokenTraffic, Traffic
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import plain_messages
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import pack_tokens

_HEAD_BYTES = 1 << 20
_KEY = re.compile(rb'"(hash_ids|prompt_token_ids|messages|conversations)"\s*:')

TOKEN_IDS = Format(
    name="a file of token ids",
    shape='{"prompt_token_ids": [id, ...]}',
    fields=frozenset({"prompt_token_ids"}),
    workload="trace",
)

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _TokenRequest(msgspec.Struct, frozen=True):
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Recording:
    """What a file holds."""

    name: str
    """The file's."""
    traffic: Traffic
    n_bad_lines: int
    """Left out."""
    tokenizer: str | None
    """The name of the one that encoded it, without its folder; None if it held no texts."""


def read_recording(
    path: Path,
    *,
    page_size: int | None = None,
    rule: Rule | None = None,
    tokenizer: str | None = None,
    skip_bad_lines: bool = False,
    abbreviates: bool = True,
) -> Recording:
    """A Mooncake trace, token ids a line, or conversations, each of whose answers was asked for by a request.

    Args:
        path: the file; its first known field says what it is.
        page_size: in tokens; None: the trace's block for the rule ``blocks``, 16 for ``engine``.
        rule: None: ``blocks`` for traces, else ``engine``.
        tokenizer: a folder, a hub name or ``tiny``; for conversations, and only for them.
        skip_bad_lines: count malformed lines instead of refusing them.
        abbreviates: as ``BlockTraffic`` has it.

    Raises:
        ConfigError: a file that cannot be read or that is something else, a malformed line, a setting that the file
            cannot have.
        CheckpointError: there is no such tokenizer.
    """
    key = _first_key(path)
    is_trace, is_text = key == "hash_ids", key in ("messages", "conversations")
    if tokenizer is not None and not is_text:
        raise ConfigError(f"{path} has no texts for tokenizer {tokenizer!r} to encode; leave it out")
    if rule == "blocks" and not is_trace:
        raise ConfigError(f"rule blocks is for traces of blocks, and {path} is none; use engine, or leave it out")
    if page_size is not None and page_size < 1:
        raise ConfigError(f"page_size {page_size} must be at least 1")
    if is_trace:
        trace = read_trace(path, skip_bad_lines=skip_bad_lines)
        rule = "blocks" if rule is None else rule
        page_size = page_size or (BLOCK_LEN if rule == "blocks" else CacheConfig.page_size)
        blocks = BlockTraffic(trace.items, page_size, rule, abbreviates=abbreviates)
        return Recording(path.name, blocks, trace.n_bad_lines, None)
    if is_text:
        if tokenizer is None:
            raise ConfigError(f"{path} holds conversations; say which tokenizer encodes them (--tokenizer)")
        said = read_conversations(path, skip_bad_lines=skip_bad_lines)
        prompts = Items(list(_prompts(path, said.items, tokenizer)), said.n_bad_lines)
        if not prompts.items:
            raise ConfigError(f"no conversation of {path} has an answer to a message; give another file")
    else:
        prompts = read_lines(path, _token_prompt, wanted=TOKEN_IDS, skip_bad_lines=skip_bad_lines)
    traffic = TokenTraffic(prompts.items, page_size or CacheConfig.page_size)
    return Recording(path.name, traffic, prompts.n_bad_lines, None if tokenizer is None else Path(tokenizer).name)


def _first_key(path: Path) -> str:
    """The first field that tells what a file is."""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"cannot read the trace {path}: it is no regular file, and is read twice; save it as one first"
        )
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    found = _KEY.search(head)
    if found is None:
        raise ConfigError(
            f"{path} is no trace: in its first {len(head)} bytes there is none of the fields hash_ids (Mooncake), "
            "prompt_token_ids, messages (OpenAI) and conversations (ShareGPT); give JSON lines with one of them"
        )
    return found[1].decode()


def _token_prompt(line: bytes) -> bytes:
    return pack_tokens(msgspec.json.decode(line, type=_TokenRequest).prompt_token_ids)


def _prompts(path: Path, conversations: list[Conversation], tokenizer: str) -> Iterator[bytes]:
    """For each answer all that was said before it, as the chat template has it; of answers in a row, the first."""
    folder = resolve_tokenizer(tokenizer)
    encoder, template = Tokenizer.load(folder), ChatTemplate.load(folder, None)
    if template is None:
        raise CheckpointError(f"tokenizer {tokenizer!r} has no chat template; give one that has")
    for number, conversation in enumerate(conversations, 1):
        messages = plain_messages(conversation.messages)
        n_before = 0
        for is_answer, said in groupby(messages, lambda message: message["role"] == "assistant"):
            if is_answer and n_before:
                try:
                    text = template.render(messages[:n_before])
                except RequestError as error:
                    raise ConfigError(f"conversation {number} of {path}: {error}") from None
                yield encoder.encode(text, adds_special_tokens=False)
            n_before += len(list(said))
