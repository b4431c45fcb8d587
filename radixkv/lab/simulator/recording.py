"""Reader of recorded requests: traces, request logs, conversations or token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from radixkv.checkpoints import resolve_tokenizer
from radixkv.errors import CheckpointError, ConfigError, RequestError
from radixkv.frontend.api.openai.schema import Prediction
from radixkv.generation.chat_rendering import check_template_variables, effort_variables
from radixkv.lab.bench.workloads.conversations import Line, answer_indices
from radixkv.lab.bench.workloads.datasets import MESSAGES, Format, read_lines
from radixkv.lab.bench.workloads.mooncake import BLOCK_LEN, MAX_TIME_MS, read_trace
from radixkv.lab.simulator.traffic import BlockTraffic, Rule, TokenTraffic, Traffic
from radixkv.settings.config import CacheConfig
from radixkv.text.chat_messages import normalize_messages
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import pack_tokens, unpack_tokens

_HEAD_BYTES = 1 << 20
"""Bytes at the start of a file that are searched for a known field."""
_KEY = re.compile(rb'"(hash_ids|prompt_token_ids|messages|conversations)"\s*:')
_PROMPT_KEY = re.compile(rb'"(prompt)"\s*:')
"""Searched for last, because lines of token ids may have the text, too."""

TOKEN_IDS = Format(
    name="a file of token ids",
    item_format='{"prompt_token_ids": [id, ...]}',
    fields=frozenset({"prompt_token_ids"}),
    workload="trace",
)
REQUESTS = MESSAGES._replace(
    name="a log of requests", item_format=f'{{"prompt": text or token ids}} or {MESSAGES.item_format}'
)

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
TimeMs = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_MS)]


class _TokenRequest(msgspec.Struct, frozen=True):
    prompt_token_ids: TokenIds
    token_ids: list[TokenId] | None = None
    """Those of the answer, as in the server's replies."""
    timestamp: TimeMs | None = None
    """When it arrived, in milliseconds since any start."""


class _LoggedRequest(Line, frozen=True):
    """A line of a log: the fields of a request that determine its prompts; or a conversation."""

    prompt: str | list[str | TokenId | TokenIds] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    timestamp: Any = None
    """When it arrived, in milliseconds since any start; data sets of conversations may have something else."""
    prediction: Any = None
    """OpenAI's; data sets of conversations may have something else under this name."""

    def is_one_request(self) -> bool:
        """Returns whether the line's messages were sent as they are, not recorded with their answers."""
        if not self.messages:
            return False
        return self.messages[-1]["role"] != "assistant" or bool(self.continue_final_message)


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
    answer_tokens: Sequence[int] | None = None
    """Tokens of each request's answer, at least the one that ends it; None if the file does not say, or its answers
    were not read."""
    answers: Sequence[bytes] = ()
    """Token ids of each request's answer, little-endian int32, empty where the file has none; there are none unless
    they are asked for."""
    predictions: Sequence[bytes] = ()
    """What each client expected the answer to be like, as ``answers``."""
    times_s: Sequence[float] | None = None
    """When each request arrived, ascending; None if the file does not say."""
    calls: Sequence[tuple[str, ...]] = ()
    """Names of the tools that each request's answer calls, as ``answers``; none in a trace of blocks."""
    n_unknown_answers: int = 0
    """Requests whose answer is not known, though answers were read: one token stands for it."""


@dataclass(slots=True)
class _Exchange:
    """A prompt, its answer and its prediction, little-endian int32; the tools that the answer calls, and when it
    arrived."""

    prompt: bytes
    answer: bytes = b""
    prediction: bytes = b""
    calls: tuple[str, ...] = ()
    time_ms: float | None = None


def read_recording(
    path: Path,
    *,
    page_size: int | None = None,
    rule: Rule | None = None,
    tokenizer: str | None = None,
    conversations: bool = False,
    skip_bad_lines: bool = False,
    compact_pages: bool = True,
    reads_answers: bool = False,
    reads_turns: bool = False,
) -> Recording:
    """Reads a Mooncake trace, lines of token ids, or a log of requests or conversations.

    A line with ``prompt``, or with ``messages`` of which the last is not an assistant's, is one request. Other
    conversations have a request for each of the assistant's answers.

    Args:
        path: the file; the first known field in it determines the format.
        page_size: in tokens; None selects the trace's block size for the rule ``blocks`` and 16 for ``engine``.
        rule: None selects ``blocks`` for traces and ``engine`` for other files.
        tokenizer: a folder, a hub name or ``tiny``; required for texts and refused for files without.
        conversations: take every line as a conversation, also if its last message has no answer.
        skip_bad_lines: skip and count malformed lines instead of refusing them.
        compact_pages: see ``BlockTraffic``.
        reads_answers: whether ``Recording.answers`` and ``predictions`` are wanted. The answer to a request that is
            a line is that in the messages of a later line.
        reads_turns: whether ``Recording.times_s`` and ``calls`` are wanted, and ``answers`` if there are any.

    Raises:
        ConfigError: the file cannot be read or has an unknown format, a line is malformed, a setting does not
            apply to this kind of file, answers are wanted and there are none, or times are and only some requests
            have one, or they are not in order.
        CheckpointError: the tokenizer does not exist.
    """
    key = _find_first_key(path)
    is_trace, is_text = key == "hash_ids", key in ("messages", "conversations", "prompt")
    if tokenizer is not None and not is_text:
        raise ConfigError(f"{path} has no texts for tokenizer {tokenizer!r} to encode; leave it out")
    if conversations and not is_text:
        raise ConfigError(f"{path} has no conversations; leave --conversations out")
    if rule == "blocks" and not is_trace:
        raise ConfigError(f"rule blocks is only for traces of blocks, not for {path}; use engine, or leave it out")
    if page_size is not None and page_size < 1:
        raise ConfigError(f"page_size {page_size} must be at least 1")
    if is_trace and reads_answers:
        raise ConfigError(f"{path} is a trace of blocks, which has no tokens of answers; give recorded texts")
    if is_trace:
        trace = read_trace(path, skip_bad_lines=skip_bad_lines)
        rule = "blocks" if rule is None else rule
        page_size = page_size or (BLOCK_LEN if rule == "blocks" else CacheConfig.page_size)
        block_traffic = BlockTraffic(trace.items, page_size, rule, compact_pages=compact_pages)
        answer_tokens = [request.output_length for request in trace.items]
        times_s = [request.timestamp / 1000 for request in trace.items]
        return Recording(path.name, block_traffic, trace.n_bad_lines, None, answer_tokens, times_s=times_s)
    if is_text:
        decode = _LogDecoder(
            path, tokenizer, conversations=conversations, reads_answers=reads_answers or reads_turns
        ).decode
        lines = read_lines(path, decode, expected=REQUESTS, skip_bad_lines=skip_bad_lines)
    else:
        lines = read_lines(path, _decode_token_ids, expected=TOKEN_IDS, skip_bad_lines=skip_bad_lines)
    exchanges = [exchange for line in lines.items for exchange in line]
    if not exchanges:
        raise ConfigError(f"no conversation of {path} has an answer to a message; give another file")
    traffic = TokenTraffic([one.prompt for one in exchanges], page_size or CacheConfig.page_size)
    name = None if tokenizer is None else Path(tokenizer).name
    answers = [one.answer for one in exchanges] if reads_answers or reads_turns else ()
    if reads_answers and not any(answers):
        raise ConfigError(
            f"{path} has no answers with which to compare drafts; give conversations that have the assistant's "
            "messages (--conversations takes every line as one), several turns of a chat, or prompt_token_ids with "
            "token_ids"
        )
    lengths = [max(len(answer) // TOKEN_BYTES, 1) for answer in answers] if any(answers) else None
    return Recording(
        path.name,
        traffic,
        lines.n_bad_lines,
        name,
        lengths,
        answers,
        [one.prediction for one in exchanges] if reads_answers else (),
        _times_s(path, exchanges) if reads_turns else None,
        [one.calls for one in exchanges] if reads_turns else (),
        sum(not answer for answer in answers) if lengths else 0,
    )


def _times_s(path: Path, exchanges: Sequence[_Exchange]) -> list[float] | None:
    """Returns when the requests arrived; None if none says it."""
    times = [one.time_ms for one in exchanges if one.time_ms is not None]
    if not times:
        return None
    if len(times) < len(exchanges):
        raise ConfigError(
            f"only {len(times)} of the {len(exchanges)} requests of {path} have a timestamp; give all of them one, "
            "or none"
        )
    for number, (before, time_ms) in enumerate(pairwise(times), 2):
        if time_ms < before:
            raise ConfigError(
                f"timestamp {time_ms:g} of request {number} of {path} is before {before:g}, that of the request "
                "before it; sort the lines by their times"
            )
    return [time_ms / 1000 for time_ms in times]


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
    match = _KEY.search(head) or _PROMPT_KEY.search(head)
    if match is None:
        raise ConfigError(
            f"{path} is no trace: its first {len(head)} bytes have none of the fields hash_ids (Mooncake), "
            "prompt_token_ids, prompt or messages (OpenAI) and conversations (ShareGPT); give JSON lines with one "
            "of them"
        )
    return match[1].decode()


def _decode_token_ids(line: bytes) -> list[_Exchange]:
    request = msgspec.json.decode(line, type=_TokenRequest)
    answer = pack_tokens(request.token_ids or ())
    return [_Exchange(pack_tokens(request.prompt_token_ids), answer, time_ms=request.timestamp)]


def _time_ms(request: _LoggedRequest) -> float | None:
    """Returns when a request arrived. Raises ``ValueError`` if its time is no number of milliseconds."""
    if request.timestamp is None:
        return None
    try:
        return msgspec.convert(request.timestamp, TimeMs)
    except msgspec.ValidationError as error:
        raise ValueError(f"timestamp, in milliseconds: {error}") from None


def _check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ValueError`` if a message calls a tool without a name."""
    for index, message in enumerate(messages):
        for place, call in enumerate(message.get("tool_calls") or ()):
            if not isinstance(call["function"].get("name"), str):
                raise ValueError(f"messages[{index}].tool_calls[{place}].function.name must be a text")


def _called(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the tools that an assistant's message calls."""
    return tuple(call["function"]["name"] for call in answer.get("tool_calls") or ())


class _Unanswered(NamedTuple):
    """A chat whose answer is not known yet."""

    exchange: _Exchange
    text: str
    """The prompt."""
    messages: list[dict[str, Any]]
    variables: Mapping[str, Any]
    """Of the chat template."""


class _LogDecoder:
    """Decodes the lines of a log to the token ids of their prompts, and of the answers to chats.

    Args:
        path: the file, for error texts.
        tokenizer: a folder, a hub name or ``tiny``; None: only token ids can be decoded.
        conversations: take every line as a conversation.
        reads_answers: whether answers and predictions are wanted.

    Raises:
        CheckpointError: the tokenizer does not exist.
    """

    def __init__(self, path: Path, tokenizer: str | None, *, conversations: bool, reads_answers: bool) -> None:
        self._path = path
        self._name = tokenizer
        self._conversations = conversations
        self._reads_answers = reads_answers
        self._unanswered: dict[bytes, list[_Unanswered]] = {}
        """Requests whose answers a later line may have, by a digest of their messages."""
        self._decoder = msgspec.json.Decoder(_LoggedRequest)
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        if tokenizer is not None:
            folder = resolve_tokenizer(tokenizer)
            self._tokenizer, self._template = Tokenizer.load(folder), ChatTemplate.load(folder, None)

    def decode(self, line: bytes) -> list[_Exchange]:
        """Returns the prompts of a line; none for a conversation without an answer.

        Adds the answers that the line has to those of earlier requests.

        Raises:
            ValueError: the line is no request, or the chat template refuses it.
            ConfigError: the line has a text, and there is no tokenizer.
            CheckpointError: the line has messages, and the tokenizer no chat template.
        """
        request = self._decoder.decode(line)
        if request.prompt is not None:
            if request.messages is not None or request.conversations is not None:
                raise ValueError("it must have one of prompt and messages")
            if self._conversations:
                raise ValueError("it is a prompt, not a conversation")
            prompts = self._encode_prompt(
                request.prompt, adds_special_tokens=request.add_special_tokens is not False
            )
            return [_Exchange(prompt, time_ms=_time_ms(request)) for prompt in prompts]
        if request.messages == []:
            raise ValueError("messages is empty")
        messages = normalize_messages(request.conversation().messages)
        if self._reads_answers:
            _check_calls(messages)
        try:
            if not self._conversations and request.is_one_request():
                return [self._encode_request(request, messages)]
            return [self._encode_turn(messages[:end], messages[end]) for end in answer_indices(messages)]
        except RequestError as error:
            raise ValueError(str(error)) from None

    def _encode_prompt(self, prompt: str | list[Any], *, adds_special_tokens: bool) -> list[bytes]:
        parts: list[Any] = [prompt] if isinstance(prompt, str) else prompt
        if {type(part) for part in parts} == {int}:
            return [pack_tokens(parts)]
        if {type(part) for part in parts} == {list}:
            return [pack_tokens(part) for part in parts]
        if {type(part) for part in parts} != {str}:
            raise ValueError("prompt must be a text, token ids, or a list of texts or of token ids")
        tokenizer = self._loaded_tokenizer()
        prompts = [tokenizer.encode(part, adds_special_tokens=adds_special_tokens) for part in parts]
        if not all(parts) or not all(prompts):
            raise ValueError("prompt is empty")
        return prompts

    def _encode_request(self, request: _LoggedRequest, messages: list[dict[str, Any]]) -> _Exchange:
        check_template_variables(request.chat_template_kwargs)
        continues = bool(request.continue_final_message)
        begins = request.add_generation_prompt
        effort = effort_variables(request.reasoning_effort)
        variables = {"tools": request.tools, **effort, **(request.chat_template_kwargs or {})}
        text = self._loaded_template().render(
            messages,
            **variables,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
        )
        exchange = _Exchange(
            self._loaded_tokenizer().encode(text, adds_special_tokens=bool(request.add_special_tokens)),
            time_ms=_time_ms(request),
        )
        if self._reads_answers:
            if request.prediction is not None:
                exchange.prediction = self._encode_prediction(request.prediction)
            self._match_answers(_Unanswered(exchange, text, messages, variables))
        return exchange

    def _encode_prediction(self, prediction: Any) -> bytes:
        try:
            text = msgspec.convert(prediction, Prediction).text
        except msgspec.ValidationError as error:
            raise ValueError(f"prediction: {error}") from None
        return self._loaded_tokenizer().encode(text, adds_special_tokens=False)

    def _encode_turn(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> _Exchange:
        text = self._loaded_template().render(messages)
        exchange = _Exchange(self._loaded_tokenizer().encode(text, adds_special_tokens=False))
        if self._reads_answers:
            exchange.answer = self._encode_answer(_Unanswered(exchange, text, messages, {}), answer)
            exchange.calls = _called(answer)
        return exchange

    def _match_answers(self, asked: _Unanswered) -> None:
        """Answers the earlier requests that a request's messages continue, and notes the request itself."""
        digest, answers = b"", answer_indices(asked.messages)
        for index, message in enumerate(asked.messages):
            if index in answers:
                for earlier in self._unanswered.pop(digest, ()):
                    earlier.exchange.answer = self._encode_answer(earlier, message)
                    earlier.exchange.calls = _called(message)
            digest = sha256(digest + msgspec.json.encode(message, order="sorted")).digest()
        self._unanswered.setdefault(digest, []).append(asked)

    def _encode_answer(self, asked: _Unanswered, answer: dict[str, Any]) -> bytes:
        """Returns the tokens of an answer; none if the template renders it otherwise than it begins it."""
        try:
            text = self._loaded_template().render(
                [*asked.messages, answer], **asked.variables, add_generation_prompt=False
            )
        except RequestError:
            return b""
        if not text.startswith(asked.text):
            return b""
        tokenizer = self._loaded_tokenizer()
        tokens = tokenizer.encode(text[len(asked.text) :], adds_special_tokens=False)
        ids = unpack_tokens(tokens)
        # A special token ends an answer, and a template may write a line break after it.
        end = max((place for place, token_id in enumerate(ids, 1) if tokenizer.token(token_id) is None), default=0)
        return tokens[: end * TOKEN_BYTES] if end and not tokenizer.decode(ids[end:]).strip() else tokens

    def _loaded_template(self) -> ChatTemplate:
        self._loaded_tokenizer()
        if self._template is None:
            raise CheckpointError(
                f"tokenizer {self._name!r} has no chat template; give one that has a chat template"
            )
        return self._template

    def _loaded_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError(f"{self._path} holds texts; say which tokenizer encodes them (--tokenizer)")
        return self._tokenizer
