"""Kept answers against a naive model: a table of tokens by salt and whole text."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.frontend.in_flight import TokenDelta
from radixkv.frontend.kept_answers import KeptAnswers
from radixkv.frontend.prompt_encoding import PromptEncoder
from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens, unpack_tokens
from radixkv.wire.namespace import CacheNamespace
from support.cases import examples
from support.scripted_runtime import ScriptedLoop
from support.small_tokenizers import byte_letters

ENDS = ("<eos>", "<eot>")
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("<", "e"), ("o", "s"), ("Ġ", "he"), (">", "<"), ("Ã", "©")]
READY = msgspec.structs.replace(ScriptedLoop().ready, max_model_len=2000, n_pages=500)
TOKENIZER = Tokenizer(byte_letters(MERGES, [*ENDS, "<think>"]))
"""Texts have many tokenizations."""


def ids(text: str) -> list[int]:
    return unpack_tokens(TOKENIZER.encode(text, adds_special_tokens=False))


END_IDS = [ids(end)[0] for end in ENDS]


def letters(text: str) -> list[int]:
    """Returns the ids of a text, a token for each byte."""
    return [token for byte in text.encode() for token in _BYTE_IDS[byte]]


_BYTE_IDS = {byte: [token] for token in range(256) for byte in TOKENIZER.token_bytes(token)}


def model(max_bytes: int | None = None) -> ServedModel:
    served_model = ServedModel(
        name="m", root="m", ready=READY, tokenizer=TOKENIZER, eos_token_ids=frozenset(END_IDS), created=0
    )
    if max_bytes is not None:
        kept = KeptAnswers(TOKENIZER, dict(zip(ENDS, END_IDS, strict=True)), max_bytes)
        served_model.__dict__["kept_answers"] = kept
    return served_model


class Server:
    """Encodes conversations and takes answers, as the server does."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.model = model(max_bytes)
        assert self.model.kept_answers is not None
        self.kept = self.model.kept_answers

    def encoder(self, salt: str, tenant: str) -> PromptEncoder:
        return PromptEncoder(
            served_model=self.model, tenant=tenant, cache_salt=salt, field="messages", adds_special_tokens=False
        )

    def tokens(self, text: str, salt: str = "", tenant: str = "") -> list[int]:
        encoded = asyncio.run(self.encoder(salt, tenant).conversation(text))
        return unpack_tokens(encoded.tokens)

    def answer(
        self, text: str, answer: Sequence[int], salt: str = "", groups: Sequence[int] = (), tenant: str = ""
    ) -> list[int]:
        """Answers a prompt with tokens that arrive in groups; returns the prompt's tokens."""
        encoded = asyncio.run(self.encoder(salt, tenant).conversation(text))
        keeper = encoded.open_keeper("turn")
        assert keeper is not None
        cuts = [0, *sorted({cut for cut in groups if cut < len(answer)} - {0}), len(answer)]
        for start, end in itertools.pairwise(cuts):
            is_last = end == len(answer)
            stop = answer[-1] if is_last and answer[-1] in END_IDS else None
            reason = None if not is_last else "length" if stop is None else "stop"
            keeper.add(TokenDelta(0, 0, bytearray(pack_tokens(answer[start:end])), [], reason, stop))
        return unpack_tokens(encoded.tokens)


def segments(text: str) -> list[str]:
    """Splits a text after each end-of-sequence token."""
    found = [""]
    while text:
        end = next((end for end in ENDS if text.startswith(end)), None)
        found[-1] += end or text[0]
        text = text[len(end or text[0]) :]
        if end is not None:
            found.append("")
    return found


class NaiveServer:
    """What ``Server`` must do, from the definition."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], list[int]] = {}
        """The tokens of the last segment of a text, by salt and text."""

    def tokens(self, text: str, salt: str) -> list[int]:
        found: list[int] = []
        before = ""
        *whole, rest = segments(text)
        for segment in whole:
            before += segment
            found += self.kept.get((salt, before), ids(segment))
        cut = [self.kept[salt, text + end][:-1] for end in ENDS if rest and (salt, text + end) in self.kept]
        return found + (cut[0] if cut else ids(rest))

    def answer(self, text: str, answer: Sequence[int], salt: str) -> None:
        try:
            written = b"".join(map(TOKENIZER.token_bytes, answer)).decode()
        except UnicodeDecodeError:
            return
        *whole, rest = segments(text)
        if answer[-1] in END_IDS and len(segments(rest + written)) == 2:
            prompt = self.tokens(text, salt)
            n_before = len(self.tokens("".join(whole), salt))
            self.kept[salt, text + written] = prompt[n_before:] + list(answer)


TEXTS = st.lists(
    st.sampled_from(["hell", "he", "o", " he", "é", "e", "<e", "os>", "<eos", "><", "<user>", "<think>", *ENDS])
    | st.text("hel o<é>", max_size=3),
    max_size=5,
).map("".join)
ANSWERS = st.tuples(
    st.lists(
        st.one_of(
            TEXTS.map(ids), TEXTS.map(letters), st.integers(0, TOKENIZER.vocab_size + 3).map(lambda token: [token])
        ),
        max_size=4,
    ),
    st.sampled_from([ids("<eos>"), ids("<eos>"), ids("<eot>"), [], letters("<eos>")]),
).map(lambda drawn: [*itertools.chain(*drawn[0]), *drawn[1]] or [0])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 30),  # which earlier text is continued
        TEXTS,
        ANSWERS,
        st.sampled_from(["", "a", "b"]),
        st.lists(st.integers(0, 20), max_size=3),
    ),
    min_size=1,
    max_size=12,
)


@examples(300)
@given(steps=STEPS)
def test_prompts_have_the_tokens_of_the_model(steps: list[tuple[int, str, list[int], str, list[int]]]) -> None:
    server, naive = Server(), NaiveServer()
    texts = [""]
    for which, more, answer, salt, groups in steps:
        text = texts[which % len(texts)] + more
        expected = naive.tokens(text, salt)
        if text:
            assert server.tokens(text, salt) == expected
            assert b"".join(map(TOKENIZER.token_bytes, expected)).decode() == text
            assert server.tokens(text, "never answered") == ids(text)
        server.answer(text, answer, salt, groups)
        naive.answer(text, answer, salt)
        written = b"".join(map(TOKENIZER.token_bytes, answer)).decode(errors="replace")
        texts += [text + written, text + written + "<user>"]
    for text in texts[1:]:
        for salt in ("", "a", "b"):
            assert server.tokens(text, salt) == naive.tokens(text, salt)


QUESTION = "<user>he<eos><bot>"


def test_answers_are_counted_by_how_they_are_rendered() -> None:
    server = Server()

    def counts() -> tuple[int, int]:
        return server.kept.n_same, server.kept.n_otherwise

    server.answer(QUESTION + "<think>", letters("hello<think>") + ids("<eos>"))
    assert counts() == (0, 0)
    server.answer(QUESTION + "<think>hello<think><eos><user>", letters("hello") + ids("<eos>"))
    assert counts() == (1, 0)
    server.answer(QUESTION + "hello<eos><user>", letters("o") + ids("<eos>"))
    assert counts() == (1, 1), "the template left out the reasoning, with its beginning in the prompt"
    server.answer("<user>he<eos><user>ho<eos><bot>", letters("o") + ids("<eos>"))
    assert counts() == (1, 1), "there is no answer at that place"
    server.tokens(QUESTION + "hello<eos><user>")
    assert counts() == (1, 1), "only prompts that are answered are counted"


def test_old_answers_are_dropped() -> None:
    answer = letters("hello") * 100 + ids("<eos>")
    written = "hello" * 100 + "<eos>"
    server = Server(max_bytes=10_000)
    for number in range(20):
        server.answer(f"{number}{QUESTION}", answer)
        assert server.kept.n_bytes <= 10_000
        assert server.tokens(f"0{QUESTION}{written}") == ids(f"0{QUESTION}") + answer, "it was used in each round"
    kept = [
        number for number in range(20) if server.tokens(f"{number}{QUESTION}{written}")[-len(answer) :] == answer
    ]
    assert kept[0] == 0
    assert kept[1:] == list(range(20 - len(kept) + 1, 20)), "the latest"
    assert 1 < len(kept) < 8


def n_bytes_held(kept: KeptAnswers) -> int:
    """Returns the memory of all texts and tokens, each object once."""
    held: list[object] = [*itertools.chain(*kept._entries), *kept._entries.values(), *kept._latest.values()]
    return sum(map(sys.getsizeof, {id(one): one for one in held}.values()))


@examples(100)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["answer", "whole", "without reasoning", "otherwise"]),
            st.integers(0, 5),  # which conversation
            st.sampled_from([0, 1000, 2000]),  # characters of the reasoning
        ),
        min_size=10,
        max_size=40,
    )
)
def test_all_that_is_held_is_within_the_bound(steps: list[tuple[str, int, int]]) -> None:
    """Whatever is asked for, the latest answer of a place is kept as any other, or not at all."""
    kept, (eos,) = KeptAnswers(TOKENIZER, {"<eos>": END_IDS[0]}, 4000), ids("<eos>")
    written = ["ok<eos>"] * 6
    for action, salt, n_characters in steps:
        if action == "answer":
            history = kept.look_up("<u>he<eos><a>", CacheNamespace(cache_salt=str(salt)))
            written[salt] = f"<think>{'h' * n_characters}</think>ok<eos>"
            kept.keep(history.place, history.rest, b"", written[salt], pack_tokens([eos]), "turn")
        else:
            rendered = {"whole": written[salt], "without reasoning": "ok<eos>", "otherwise": "no<eos>"}[action]
            kept.look_up(f"<u>he<eos><a>{rendered}<u>", CacheNamespace(cache_salt=str(salt)))
        assert n_bytes_held(kept) <= kept.n_bytes <= 4000
        assert all((place, latest) in kept._entries for place, latest in kept._latest.items())


def test_an_answer_whose_chat_goes_on_without_its_reasoning_is_used() -> None:
    kept, (eos,) = KeptAnswers(TOKENIZER, {"<eos>": END_IDS[0]}, 4000), ids("<eos>")
    answer = f"<think>{'h' * 200}</think>ok<eos>"
    for number in range(20):
        history = kept.look_up("<a>", CacheNamespace(cache_salt=str(number)))
        kept.keep(history.place, history.rest, b"", answer, pack_tokens([eos]), f"turn {number}")
        kept.look_up("<a>ok<eos><u>", CacheNamespace(cache_salt="0"))
    assert kept.look_up(f"<a>{answer}<u>", CacheNamespace(cache_salt="0")).n_same == 1
    assert kept.look_up(f"<a>{answer}<u>", CacheNamespace(cache_salt="1")).n_same == 0


def test_a_long_answer_that_comes_token_by_token_is_kept() -> None:
    server, answer = Server(), letters("hello") * 150 + ids("<eos>")
    server.answer(QUESTION, answer, groups=range(len(answer)))
    assert server.tokens(QUESTION + "hello" * 150 + "<eos>") == ids(QUESTION) + answer


def test_the_bytes_of_two_tokens_are_not_the_end_of_a_segment() -> None:
    (eos,) = ids("<eos>")
    rest = [eos << 16, 0]
    assert pack_tokens([eos]) in pack_tokens(rest)
    server = Server()
    history = server.kept.look_up(QUESTION, CacheNamespace())
    keeper = server.kept.open_keeper(history, pack_tokens([*ids("<user>he"), eos, *rest]), "turn")
    keeper.add(TokenDelta(0, 0, bytearray(pack_tokens([eos])), [], "stop", eos))
    assert server.tokens(QUESTION + "<eos>") == [*ids("<user>he"), eos, *rest, eos]


def test_too_many_tokens_are_encoded_by_the_tokenizer() -> None:
    server = Server()
    answer = letters("hell" * 300) + ids("<eos>")
    question = QUESTION + "hell" * 700 + "<eos>"
    server.answer(question, answer)
    whole = question + "hell" * 300 + "<eos>"
    assert len(ids(question)) + len(answer) < READY.max_model_len
    assert server.tokens(whole) == ids(question) + answer
    longer = whole + "hell" * 200
    assert len(ids(longer)) < READY.max_model_len < len(ids(question) + answer) + 200
    assert server.tokens(longer) == ids(longer)


def test_long_conversations_are_encoded_around_answers() -> None:
    server = Server()
    server.model = replace(
        server.model, ready=msgspec.structs.replace(READY, max_model_len=200_000, n_pages=20_000)
    )
    assert server.model.kept_answers is not None
    server.kept = server.model.kept_answers
    text, expected = "", []
    for turn in range(6):
        question = f"<user>{turn}" + "hello " * 4000 + "<eos><bot>"
        answer = letters("hello") + ids("<eos>")
        assert server.answer(text + question, answer) == expected + ids(question)
        text, expected = text + question + "hello<eos>", expected + ids(question) + answer
    assert server.tokens(text + "\nhe") == expected + ids("\nhe")


@pytest.mark.parametrize(
    "changes",
    [{"caches_prompts": False}, {"eos_token_ids": frozenset()}, {"tokenizer": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_models_without_use_for_answers_keep_none(changes: dict[str, object]) -> None:
    assert replace(model(), **changes).kept_answers is None


def test_answers_to_a_tenant_are_kept_for_it_alone() -> None:
    server = Server()
    answer = letters("hell") + ids("<eos>")
    server.answer(QUESTION, answer, "s", tenant="a")
    whole = QUESTION + "hell<eos>"
    assert server.tokens(whole, "s", tenant="a") == ids(QUESTION) + answer != ids(whole)
    for tenant, salt in (("b", "s"), ("", "s"), ("a", ""), ("", "a"), ("", "as"), ("s", "a")):
        assert server.tokens(whole, salt, tenant=tenant) == ids(whole)


def test_a_history_names_the_request_whose_answer_it_has() -> None:
    """Several conversations begin alike: each goes on from its own answer, and a rewritten one from the latest."""
    (eos,) = ids("<eos>")
    server = Server()
    for name, text in (("first", "one"), ("second", "two")):
        keeper = asyncio.run(server.encoder("", "").conversation(QUESTION)).open_keeper(name)
        assert keeper is not None
        keeper.add(TokenDelta(0, 0, bytearray(pack_tokens([*ids(text), eos])), [], "stop", eos))
    turns = [
        server.kept.look_up(f"{QUESTION}{text}<eos><user>", CacheNamespace()).turn
        for text in ("one", "two", "three")
    ]
    assert turns == ["first", "second", "second"]


class Run:
    """A run of tool calls with reasoning: user, then answers and results in turn."""

    def __init__(self) -> None:
        self.server = Server()
        self.prompt = "<u>do it<eos>"
        self.shown = self.prompt
        """The history as a template renders it once the user speaks again: without reasoning."""

    def step(self, turn: str, reasoning: str, answer: str, result: str) -> str:
        """Answers, and appends answer and result; returns the request that the prompt goes on from."""
        resumed = self.resumed(self.prompt + "<a><think>")
        text = f"{reasoning}</think>{answer}<eos>"
        keeper = asyncio.run(self.server.encoder("", "").conversation(self.prompt + "<a><think>")).open_keeper(turn)
        assert keeper is not None
        tokens = ids(text)
        keeper.add(TokenDelta(0, 0, bytearray(pack_tokens(tokens)), [], "stop", tokens[-1]))
        self.prompt += f"<a><think>{text}<t>{result}<eos>"
        self.shown += f"<a>{answer}<eos><t>{result}<eos>"
        return resumed

    def resumed(self, text: str) -> str:
        return self.server.kept.look_up(text, CacheNamespace()).turn


def test_a_history_without_reasoning_names_the_last_answer_of_a_run() -> None:
    run = Run()
    assert [run.step(turn, "hm" * 9, f"call {turn}", "42") for turn in "abc"] == ["", "a", "b"]
    assert run.resumed(run.shown + "<u>thanks<eos><a><think>") == "c"
    run.prompt = run.shown = run.shown + "<u>more<eos>"
    assert [run.step(turn, "ah" * 9, f"call {turn}", "43") for turn in "def"] == ["c", "d", "e"]
    assert run.resumed(run.shown + "<u>thanks<eos><a><think>") == "f"


def test_a_history_without_reasoning_is_followed_only_as_far_as_all_else_is_the_same() -> None:
    run = Run()
    for turn in "abc":
        run.step(turn, "hm" * 9, f"call {turn}", f"result {turn}")
    end = "<u>thanks<eos><a><think>"
    assert run.resumed(run.shown.replace("result a", "another") + end) == "a"
    assert run.resumed(run.shown.replace("call b", "another") + end) == "b"
    assert run.resumed(run.shown.replace("do it", "another") + end) == ""
