"""Grammars are compiled beside their user, within limits, whatever is asked for."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from radixkv.errors import CheckpointError, InvalidRequest, RequestError
from radixkv.runtime.structured import grammars as grammars_module
from radixkv.runtime.structured.grammars import Grammars, refusal_of_all
from radixkv.runtime.structured.matcher import Grammar
from radixkv.runtime.structured.messages import MAX_LINE_BYTES
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs
from support.grammar_walks import tiny_vocabulary
from support.json_schemas import closed
from support.processes import children, has_ended

TRIALS = "radixkv.runtime.structured.trial_process"
DEADLINE_S = 3.0
CACHE_BYTES = 400_000
WAIT_S = 120.0
"""Limit of waits that end by themselves."""

SLOW = StructuredOutputs(json='{"type": "string", "pattern": "^[a-z]{0,8000}$"}')
"""Takes much longer than the deadline."""


def wait_for(grammars: Grammars, *tickets: int) -> list[tuple[int, Grammar | RequestError]]:
    """Returns what is taken until these tickets have ended, in the order of their ends."""
    taken: list[tuple[int, Grammar | RequestError]] = []
    while not set(tickets) <= {ticket for ticket, _ in taken}:
        assert select.select([grammars], [], [], WAIT_S)[0], "the tickets do not end"
        taken += grammars.take_compiled()
    return taken


def compiled(grammars: Grammars, spec: StructuredOutputs) -> Grammar | RequestError:
    ticket = grammars.request(spec)
    return dict(wait_for(grammars, ticket))[ticket]


def trials() -> int:
    """Returns the id of the process of trials."""
    (pid,) = children(os.getpid(), TRIALS)
    return pid


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(
        tiny_vocabulary, n_threads=1, deadline_s=DEADLINE_S, memory_bytes=512 << 20, cache_bytes=CACHE_BYTES
    )
    made.wait_until_ready()
    yield made
    made.close()


VALID: list[Mapping[str, Any]] = [
    {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
    {"json_object": True},
    {"regex": "[a-z]+(-[0-9]{2})?"},
    {"choice": ("",)},
    {"choice": ("yes", 'a "quote"')},
    {"grammar": 'root ::= "a" root | "b"'},
    {
        "structural_tag": json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f="],
                    "tags": [
                        {
                            "begin": "<f=a>",
                            "content": {"type": "json_schema", "json_schema": closed(x={"type": "integer"})},
                            "end": "</f>",
                        }
                    ],
                },
            }
        )
    },
]

AMBIGUOUS = "root ::= (root root root | [a-z])* root?"
ANY_BEFORE = {"type": "any_text", "excludes": ["|"]}
VALID.append(
    {
        "structural_tag": {
            "type": "structural_tag",
            "before": ANY_BEFORE,
            "format": {"type": "json_schema", "json_schema": closed(x={"maxLength": 3}), "is_one_line": True},
        }
    }
)

HOSTILE: list[Mapping[str, Any]] = [
    {"json": "{"},
    {"json": '{"type": "object", "not": {}}'},
    {"json": '{"$ref": "#"}'},
    {"json": '{"type": "integer", "minimum": 3, "maximum": 2}'},
    {"json": '{"type": "integer", "multipleOf": 7, "minimum": 0}'},
    {"json": '{"type": "string", "pattern": "^\\"$"}'},
    {"json": '{"type": "string", "pattern": "(a"}'},
    {"json": '{"type": "string", "pattern": "^(.{0,200}x){0,200}$"}'},
    {"json": json.dumps({"enum": [f"{i * 7919:x}" for i in range(15_000)]})},
    {"json": json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}})},
    {"json": json.dumps({"anyOf": [{"$ref": f"#/anyOf/{i}"} for i in range(3000)]})},
    {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    {"regex": "(ab"},
    {"regex": "a^b"},
    {"regex": "(?=a)b"},
    {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    {"regex": "([a-z]{1,300}[0-9]{1,300}){1,300}"},
    {"choice": tuple(f"{i * 7919:x}" for i in range(20_000))},
    {"grammar": "root ::= other"},
    {"grammar": "root ::= root"},
    {
        "grammar": 'root ::= "a" root'  # may only be cut
        ' | "b" dead\ndead ::= "c" dead2\ndead2 ::= dead2'
    },
    {"grammar": AMBIGUOUS},
    {
        "structural_tag": {
            "type": "structural_tag",
            "before": ANY_BEFORE,
            "format": {"type": "grammar", "grammar": AMBIGUOUS},
        }
    },
    {
        "structural_tag": {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": {"pattern": '^"$'}, "is_one_line": True},
        }
    },
    {"structural_tag": "{}"},
    {"structural_tag": "[" * 20_000},
    {"structural_tag": '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}'},
]


def test_forced_texts_are_looked_for_where_they_are_short(grammars: Grammars) -> None:
    """The rules of the second one, each of which has the next one twice, force 2 GiB of text."""
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(30))
    for spec, is_found in [
        (StructuredOutputs(json=json.dumps(closed(a={"type": "integer"}))), True),
        (StructuredOutputs(grammar=f'root ::= r0\n{rules}r30 ::= "ab"'), False),
    ]:
        grammar = compiled(grammars, spec)
        assert isinstance(grammar, Grammar)
        assert bool(grammar.new_matcher().forced(4)) == is_found


@pytest.mark.parametrize("fields", VALID)
def test_each_kind_is_compiled_once_and_kept(grammars: Grammars, fields: Mapping[str, Any]) -> None:
    spec = StructuredOutputs(**fields)
    assert grammars.get(spec) is None
    grammar = compiled(grammars, spec)

    assert isinstance(grammar, Grammar)
    assert grammars.get(StructuredOutputs(**fields)) is grammar
    assert not grammars.is_compiling
    assert not grammar.new_matcher().has_ended


# Those of CI fail for every reason that there is but the deadline, for which the tests below wait once.
SLOW_TOO = (8, 9, 17, 21, 22)


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, marks=[pytest.mark.nightly] if i in SLOW_TOO else []) for i in range(len(HOSTILE))],
)
def test_a_hostile_specification_is_refused_and_the_next_one_is_compiled(grammars: Grammars, index: int) -> None:
    error = compiled(grammars, StructuredOutputs(**HOSTILE[index]))

    assert isinstance(error, InvalidRequest)
    assert error.param == "structured_outputs"
    assert len(str(error)) < 500
    assert isinstance(compiled(grammars, StructuredOutputs(choice=("canary", str(index)))), Grammar)


def test_a_refusal_is_kept_for_a_minute(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StructuredOutputs(regex="(refused")
    error = compiled(grammars, spec)
    assert isinstance(error, InvalidRequest)
    with pytest.raises(InvalidRequest) as raised:
        grammars.get(spec)
    assert (str(raised.value), raised.value.param) == (str(error), "structured_outputs")
    now = time.monotonic()
    monkeypatch.setattr(grammars_module, "monotonic", lambda: now + 61.0)
    assert grammars.get(spec) is None


def test_the_oldest_refusals_are_forgotten(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_REFUSALS", 2)
    specs = [StructuredOutputs(regex="(" * n) for n in (2, 3, 4)]
    for spec in specs:
        compiled(grammars, spec)
    assert grammars.get(specs[0]) is None
    for spec in specs[1:]:
        with pytest.raises(InvalidRequest):
            grammars.get(spec)


def test_a_specification_that_takes_too_long_delays_no_other_one(grammars: Grammars) -> None:
    slow = grammars.request(SLOW)
    quick = [grammars.request(StructuredOutputs(regex=f"quick{i}")) for i in range(5)]
    taken = wait_for(grammars, slow, *quick)

    assert [ticket for ticket, _ in taken][-1] == slow
    outcomes = dict(taken)
    assert all(isinstance(outcomes[ticket], Grammar) for ticket in quick)
    assert isinstance(outcomes[slow], InvalidRequest)
    assert f"{DEADLINE_S:g} s" in str(outcomes[slow])


def slow_ones(n: int) -> list[StructuredOutputs]:
    return [StructuredOutputs(json=f'{{"type": "string", "pattern": "^[a-z]{{0,{8000 + i}}}$"}}') for i in range(n)]


def test_a_quick_grammar_waits_for_few_of_the_slow_ones_before_it(grammars: Grammars) -> None:
    slow = [grammars.request(spec) for spec in slow_ones(12)]
    quick = grammars.request(StructuredOutputs(regex="behind a crowd"))
    taken = wait_for(grammars, quick)
    for ticket in slow:
        grammars.cancel(ticket)

    assert taken[-1][0] == quick
    assert isinstance(taken[-1][1], Grammar)
    assert len(taken) == 1, "no slow one has ended"
    assert not grammars.is_compiling


@pytest.mark.nightly
def test_the_slow_grammars_of_a_tenant_delay_no_other_tenants_slow_one(grammars: Grammars) -> None:
    crowd = [grammars.request(spec, "a") for spec in slow_ones(8)]
    (other,) = [grammars.request(spec, "b") for spec in slow_ones(1)]
    taken = wait_for(grammars, other)
    for ticket in crowd:
        grammars.cancel(ticket)

    assert isinstance(dict(taken)[other], InvalidRequest)
    assert len(taken) <= 2 * 2 + 1, "two slow ones are tried at once"


def test_a_tenants_grammars_are_its_own(grammars: Grammars) -> None:
    spec, refused = StructuredOutputs(regex="apart"), StructuredOutputs(regex="(apart")
    ticket, other = grammars.request(spec, "a"), grammars.request(refused, "a")
    outcomes = dict(wait_for(grammars, ticket, other))
    assert grammars.get(spec, "a") is outcomes[ticket]
    assert grammars.get(spec, "b") is grammars.get(spec) is None
    assert grammars.get(refused, "b") is None


def test_requests_of_one_specification_share_its_compilation(grammars: Grammars) -> None:
    spec = StructuredOutputs(regex="shared+")
    first, second = grammars.request(spec), grammars.request(spec)
    taken = dict(wait_for(grammars, first, second))

    assert taken[first] is taken[second]
    assert isinstance(taken[first], Grammar)


def test_a_cancelled_ticket_never_ends_and_the_others_do(grammars: Grammars) -> None:
    spec = StructuredOutputs(regex="cancelled+")
    first, second = grammars.request(spec), grammars.request(spec)
    grammars.cancel(first)
    grammars.cancel(first)
    taken = wait_for(grammars, second)
    assert [ticket for ticket, _ in taken] == [second]

    alone = grammars.request(StructuredOutputs(regex="alone"))
    grammars.cancel(alone)
    assert not grammars.is_compiling
    again = grammars.request(StructuredOutputs(regex="alone"))
    assert alone not in dict(wait_for(grammars, again))


def test_the_grammars_that_were_used_last_are_kept_up_to_a_size(grammars: Grammars) -> None:
    specs = [
        StructuredOutputs(json=json.dumps(closed(**{f"name_{i}_{j}": {"type": "number"} for j in range(8)})))
        for i in range(20)
    ]
    first = specs[0]
    n_bytes = 0
    for spec in specs:
        grammar = compiled(grammars, spec)
        assert isinstance(grammar, Grammar)
        n_bytes += grammar.n_bytes
        assert grammars.get(first) is not None  # a use
    kept = [spec for spec in specs if grammars.get(spec) is not None]

    assert n_bytes > CACHE_BYTES, "the test needs more grammars"
    assert kept == [first, *specs[len(specs) - len(kept) + 1 :]]
    assert 2 < len(kept) < len(specs)


def test_a_tenant_does_not_push_out_the_grammars_of_another(grammars: Grammars) -> None:
    own, crowd = StructuredOutputs(regex="own"), []
    wait_for(grammars, grammars.request(own, "quiet"))
    for i in range(20):
        schema = closed(**{f"x{i}_{j}": {"type": "number"} for j in range(8)})
        crowd.append(StructuredOutputs(json=json.dumps(schema)))
        wait_for(grammars, grammars.request(crowd[-1], "busy"))

    assert grammars.get(own, "quiet") is not None
    n_kept = sum(grammars.get(spec, "busy") is not None for spec in crowd)
    assert 2 < n_kept < len(crowd)


@pytest.mark.nightly
def test_a_killed_process_of_trials_is_replaced_and_nobody_fails(grammars: Grammars) -> None:
    killed = trials()
    tickets = [grammars.request(StructuredOutputs(regex=f"killed{i}+")) for i in range(6)]
    os.kill(killed, signal.SIGKILL)
    taken = dict(wait_for(grammars, *tickets))

    assert all(isinstance(outcome, Grammar) for outcome in taken.values())
    assert isinstance(compiled(grammars, StructuredOutputs(regex="after")), Grammar)
    assert trials() != killed


@pytest.mark.nightly
@pytest.mark.parametrize("line", [b"no result\n", b"x" * MAX_LINE_BYTES + b"x\n"], ids=["unreadable", "too long"])
def test_a_process_of_trials_that_sends_no_result_is_replaced_and_nobody_fails(
    grammars: Grammars, line: bytes
) -> None:
    before = trials()
    tickets = [grammars.request(StructuredOutputs(regex=f"line{len(line)}{i}+")) for i in range(6)]
    with suppress(BrokenPipeError), open(f"/proc/{before}/fd/1", "wb") as output:
        output.write(line)
    taken = dict(wait_for(grammars, *tickets))

    assert all(isinstance(outcome, Grammar) for outcome in taken.values())
    assert has_ended(before)
    assert trials() != before


@pytest.mark.nightly
def test_closing_in_the_middle_of_a_trial_ends_the_process(grammars: Grammars) -> None:
    before = set(children(os.getpid(), TRIALS))
    closing = Grammars(tiny_vocabulary, n_threads=1, deadline_s=WAIT_S)
    closing.wait_until_ready()
    (process,) = set(children(os.getpid(), TRIALS)) - before
    closing.request(SLOW)
    closing.request(StructuredOutputs(regex="a"))
    closing.close()

    assert has_ended(process)


def test_closing_before_the_process_has_started_ends_it() -> None:
    before = set(children(os.getpid(), TRIALS))
    Grammars(tiny_vocabulary, n_threads=1).close()

    assert all(has_ended(process) for process in set(children(os.getpid(), TRIALS)) - before)


def test_a_vocabulary_that_cannot_be_read_is_reported() -> None:
    def read_vocabulary() -> Vocabulary:
        raise CheckpointError("no tokenizer here")

    broken = Grammars(read_vocabulary, n_threads=1)
    with pytest.raises(CheckpointError, match="no tokenizer here"):
        broken.wait_until_ready()
    broken.close()


def test_where_nothing_can_be_compiled_each_request_is_told_why() -> None:
    is_asked = threading.Event()

    def read_vocabulary() -> Vocabulary:
        is_asked.wait(WAIT_S)
        raise CheckpointError("no tokenizer here")

    broken = Grammars(read_vocabulary, n_threads=1)
    early = [broken.request(StructuredOutputs(regex=regex)) for regex in "aab"]
    is_asked.set()
    errors = dict(wait_for(broken, *early))
    late = broken.request(StructuredOutputs(regex="c"))
    errors |= dict(broken.take_compiled())
    broken.close()
    assert errors.keys() == {*early, late}
    assert all(isinstance(error, RequestError) and "no tokenizer here" in str(error) for error in errors.values())


PARENT = """
import os, signal, sys
from support.grammar_walks import tiny_vocabulary
from support.processes import children
from radixkv.runtime.structured import grammars as grammars_module
from radixkv.runtime.structured.grammars import Grammars
from radixkv.wire.structured_outputs import StructuredOutputs

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the runtime does
grammars = Grammars(tiny_vocabulary, n_threads=1)
grammars.wait_until_ready()
grammars.request(StructuredOutputs(json='{"type": "string", "pattern": "^[a-z]{0,8000}$"}'))
print(*children(os.getpid(), "radixkv.runtime.structured.trial_process"), flush=True)
sys.stdin.read()
"""


@pytest.mark.nightly
def test_the_process_ends_when_its_parent_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        process = int(parent.stdout.readline())
        parent.kill()
        parent.wait()

        assert has_ended(process)


@pytest.mark.nightly
def test_an_engine_that_cannot_compile_says_why() -> None:
    assert refusal_of_all(has_tokenizer=True, has_eos=True) is None
    for has_tokenizer in (False, True):
        error = refusal_of_all(has_tokenizer=has_tokenizer, has_eos=False)
        assert error.param == "structured_outputs"
