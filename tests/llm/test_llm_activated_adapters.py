"""Activated LoRAs: the model computes a prompt up to the last invocation, and the adapter what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from radixkv import LLM, BeamSearchParams, LoRARequest, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.intake import Intake
from radixkv.runtime.step.plan import Row
from radixkv.tree import marks
from radixkv.tree.marks import Marks
from support.cases import nightly_but, rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.lora import linear_modules, save_adapter

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
INVOCATION = [7, 9, 11]
JUDGE, RANK, SQL = LoRARequest("judge"), LoRARequest("rank"), LoRARequest("sql")
HEAD = random_ids(70, seed=1)
PROMPT = [*HEAD, *INVOCATION, *random_ids(10, seed=2)]


def opened(folder: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 4096}
    return LLM(folder, device="cpu", **{**defaults, **settings})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a LoRA of it, and two activated ones with the same invocation."""
    folder = tmp_path_factory.mktemp("activated")
    save_checkpoint(folder / "base")
    oracle = load_oracle(resolve(str(folder / "base")))
    modules = linear_modules(oracle)
    save_adapter(folder / "sql", oracle, modules, seed=2)
    for seed, name in enumerate(("judge", "rank"), 3):
        save_adapter(folder / name, oracle, modules, seed=seed, alora_invocation_tokens=INVOCATION)
    return folder


def modules(folders: Path) -> dict[str, Path]:
    return {name: folders / name for name in ("sql", "judge", "rank")}


@pytest.fixture
def llm(folders: Path) -> Iterator[LLM]:
    with opened(folders / "base", lora_modules=modules(folders)) as llm:
        yield llm


def generate(llm: LLM, prompt: Sequence[int], request: LoRARequest | None, params: SamplingParams = PARAMS) -> Any:
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False, lora_request=request)
    return output


def cold(llm: LLM, prompt: Sequence[int], request: LoRARequest | None, params: SamplingParams = PARAMS) -> Any:
    llm.flush_cache()
    output = generate(llm, prompt, request, params)
    assert output.num_cached_tokens == 0
    return output.outputs


def test_pages_before_the_invocation_are_shared_in_both_directions(llm: LLM) -> None:
    """To the token, and to the last bit of the answers; those behind it are of one adapter."""
    expected = {one: cold(llm, PROMPT, one) for one in (None, SQL, JUDGE, RANK)}
    assert len({tuple(outputs[0].token_ids) for outputs in expected.values()}) == 4
    for first, second in ((None, JUDGE), (JUDGE, None), (JUDGE, RANK)):
        llm.flush_cache()
        generate(llm, PROMPT, first)
        warm = generate(llm, PROMPT, second)
        assert (warm.num_cached_tokens, warm.outputs) == (70, expected[second])
        again = generate(llm, PROMPT, second)
        assert (again.num_cached_tokens, again.outputs) == (80, expected[second])
    assert generate(llm, PROMPT, SQL).num_cached_tokens == 0


def test_a_batch_of_everything_equals_each_alone(folders: Path) -> None:
    """To the last bit, in chunks that end before, within and behind the invocation."""
    prompts = [[*random_ids(n, seed=n), *INVOCATION, *random_ids(20, seed=n + 1)] for n in (40, 61, 33, 90, 5, 47)]
    requests = [None, JUDGE, SQL, JUDGE, RANK, RANK]
    settings = {"lora_modules": modules(folders), "max_num_seqs": 8}
    with opened(folders / "base", **settings) as llm:
        alone = [cold(llm, prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
    for max_num_batched_tokens in (23, 43, 64):
        with opened(folders / "base", **settings, max_num_batched_tokens=max_num_batched_tokens) as llm:
            together = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
        assert [output.outputs for output in together] == alone


@pytest.mark.parametrize(
    "name",
    nightly_but([*CHECKPOINTS, *(one for one in HYBRIDS if one.startswith("qwen"))], "qwen3.5"),
)
def test_an_invocation_at_the_start_activates_what_a_lora_does(tmp_path: Path, name: str) -> None:
    """To the last bit; without an invocation the model alone answers, and only the last one counts."""
    save_checkpoint(tmp_path / "base", **(CHECKPOINTS | HYBRIDS)[name])
    oracle = load_oracle(resolve(str(tmp_path / "base")))
    for folder, changes in (("lora", {}), ("judge", {"alora_invocation_tokens": INVOCATION})):
        save_adapter(tmp_path / folder, oracle, linear_modules(oracle), seed=2, **changes)
    lora = {one: tmp_path / one for one in ("lora", "judge")}
    with opened(tmp_path / "base", lora_modules=lora) as llm:
        whole = [*INVOCATION, *HEAD]
        assert cold(llm, whole, JUDGE) == cold(llm, whole, LoRARequest("lora")) != cold(llm, whole, None)
        for without in (HEAD, [*HEAD, *INVOCATION[:2]], [*INVOCATION[1:], *HEAD]):
            assert cold(llm, without, JUDGE) == cold(llm, without, None)
        twice = [*HEAD[:20], *INVOCATION, *HEAD[20:], *INVOCATION, 5]
        expected = cold(llm, twice, JUDGE)
        llm.flush_cache()
        generate(llm, twice, None)
        warm = generate(llm, twice, JUDGE)
        assert warm.outputs == expected
        assert warm.num_cached_tokens in (64, 73), "all before the last invocation; a state is at a multiple of 64"


def test_prompt_logprobs_and_penalties_are_of_the_tokens(llm: LLM) -> None:
    """The invocation's first token among them, where the cache has a mark."""
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    output, plain = (generate(llm, PROMPT, one, scored) for one in (JUDGE, None))
    assert [list(one)[0] for one in output.prompt_logprobs[1:]] == PROMPT[1:]
    assert output.prompt_logprobs[1:71] == plain.prompt_logprobs[1:71], "the model's, up to the invocation"
    assert output.prompt_logprobs[71] != plain.prompt_logprobs[71]
    never = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={INVOCATION[0]: 6.0})
    assert INVOCATION[0] in generate(llm, PROMPT, JUDGE, never).outputs[0].token_ids
    penalised = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={INVOCATION[0]: 6.0}, repetition_penalty=100.0
    )
    tokens = generate(llm, PROMPT, JUDGE, penalised).outputs[0].token_ids
    assert not set(tokens) & set(PROMPT), "the mark's token counts as one of the prompt"


def test_choices_and_beams(llm: LLM) -> None:
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    expected = cold(llm, PROMPT, JUDGE, sampled)
    both = llm.generate([PROMPT, PROMPT], sampled, use_tqdm=False, lora_request=[RANK, JUDGE])
    assert both[1].outputs == expected
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    llm.flush_cache()
    (alone,) = llm.beam_search([PROMPT], beams, lora_request=JUDGE)
    llm.flush_cache()
    mixed = llm.beam_search([PROMPT, PROMPT, PROMPT], beams, lora_request=[None, JUDGE, RANK])
    assert mixed[1].sequences == alone.sequences
    assert all(one.sequences != alone.sequences for one in (mixed[0], mixed[2]))


def test_an_answer_goes_on_in_later_turns_of_its_own(llm: LLM) -> None:
    """A turn without another invocation finds the answer; one that repeats it computes the answer as the model."""
    first = generate(llm, PROMPT, JUDGE)
    answer = list(first.outputs[0].token_ids)
    more = [*PROMPT, *answer, *random_ids(20, seed=4)]
    warm = generate(llm, more, JUDGE)
    assert (warm.num_cached_tokens, warm.outputs) == (80, cold(llm, more, JUDGE))
    again = [*more, *INVOCATION, 3]
    generate(llm, more, JUDGE)
    warm = generate(llm, again, JUDGE)
    assert (warm.num_cached_tokens, warm.outputs) == (70, cold(llm, again, JUDGE)), (
        "the first invocation is text now"
    )


@pytest.mark.nightly
def test_preempted_answers_go_on(folders: Path) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
    prompts = [[*random_ids(30, seed=n), *INVOCATION, *random_ids(7, seed=n + 9)] for n in range(4)]
    requests = [JUDGE, None, RANK, JUDGE]
    settings = {"max_total_tokens": 256, "max_model_len": 128, "num_reserved_decode_tokens": 0}
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:
        alone = [cold(llm, prompt, request, long) for prompt, request in zip(prompts, requests, strict=True)]
        llm.flush_cache()
        together = llm.generate(prompts, long, use_tqdm=False, lora_request=requests)
        assert llm.get_metrics().preemptions_total > 0
    assert [output.outputs for output in together] == alone


@pytest.mark.nightly
@pytest.mark.parametrize("n_new", rest_nightly([12, 50], kept=(0,)))
def test_drafts_change_no_answer(folders: Path, n_new: int) -> None:
    """Those from the cache and from the prompt would go across marks."""
    long = SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True)
    prompt = [*HEAD[:12], *INVOCATION, *HEAD[:12], *INVOCATION, *HEAD[:12]]
    answers, n_drafts = [], []
    for speculative in ("off", {"method": "tree", "num_speculative_tokens": 4}):
        with opened(folders / "base", lora_modules=modules(folders), speculative_config=speculative) as llm:
            found = []
            for request in (None, JUDGE, JUDGE, RANK, None, SQL):
                first = generate(llm, prompt, request, long).outputs[0].token_ids
                last = generate(llm, prompt[:-13], request, long).outputs[0].token_ids
                found.append((list(first), list(last)))
            answers.append(found)
            n_drafts.append(llm.get_metrics().drafts)
    assert answers[0] == answers[1]
    assert n_drafts[1] is not None


@pytest.mark.nightly
def test_tiers_keep_what_each_has_computed(folders: Path, tmp_path: Path) -> None:
    """After a restart, too, where another adapter has the name of the first one; and another server's store."""
    with opened(folders / "base", lora_modules=modules(folders)) as llm:
        expected = {one: cold(llm, PROMPT, one) for one in (None, JUDGE, RANK)}
    memory = f"shm://kv?size=16MiB&folder={tmp_path}"
    for tiers in (
        {"cache_dir": tmp_path / "disk"},
        {"cache_url": f"file://{tmp_path}/shared"},
        {"cache_url": memory},
    ):
        settings = {"host_memory_bytes": 1 << 24, "load_policy": "always", **tiers}
        with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:
            assert generate(llm, PROMPT, JUDGE).outputs == expected[JUDGE]
        renamed = {"judge": folders / "rank", "rank": folders / "judge"}
        with opened(folders / "base", lora_modules=renamed, **settings) as llm:
            other, base = generate(llm, PROMPT, JUDGE), generate(llm, PROMPT, None)
            same = generate(llm, PROMPT, RANK)
        assert (other.num_fetched_tokens, other.outputs) == (64, expected[RANK]), "the model's pages"
        assert base.outputs == expected[None]
        assert (same.num_fetched_tokens, same.num_cached_tokens, same.outputs) == (16, 80, expected[JUDGE])


@pytest.mark.nightly
def test_host_memory_keeps_them(folders: Path) -> None:
    settings = {
        "host_memory_bytes": 1 << 24,
        "load_policy": "always",
        "max_total_tokens": 128,
        "max_model_len": 128,
    }
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:
        expected = {one: cold(llm, PROMPT, one) for one in (None, JUDGE, RANK)}
        llm.flush_cache()
        for request in (JUDGE, RANK, None):
            generate(llm, PROMPT, request)
            generate(llm, random_ids(100, seed=8), None)  # displaces it
            again = generate(llm, PROMPT, request)
            assert again.num_loaded_tokens > 0
            assert (again.num_cached_tokens, again.outputs) == (80, expected[request])


def test_salts_keep_them_apart(llm: LLM) -> None:
    llm.flush_cache()
    for salt in ("a", "b", "a"):
        (output,) = llm.generate(
            [{"prompt_token_ids": PROMPT, "cache_salt": salt}], PARAMS, use_tqdm=False, lora_request=JUDGE
        )
    assert output.num_cached_tokens == 80
    assert generate(llm, PROMPT, JUDGE).num_cached_tokens == 0


def test_explanations_say_which_adapter(llm: LLM) -> None:
    llm.flush_cache()
    generate(llm, PROMPT, JUDGE)
    explained = llm.explain(PROMPT)
    assert (explained.reason, explained.n_cached, explained.n_cached_elsewhere) == ("other_namespace", 70, 80)
    assert explained.adapter_elsewhere
    assert (explained.first_difference, explained.token, explained.cached_token) == (None, None, None)
    assert llm.explain(PROMPT, lora_request=JUDGE).reason == "whole"
    assert llm.explain(PROMPT, lora_request=RANK).adapter_elsewhere == explained.adapter_elsewhere
    assert llm.explain(PROMPT, lora_request=SQL).adapter_elsewhere == explained.adapter_elsewhere
    llm.flush_cache()
    generate(llm, PROMPT, None)
    explained = llm.explain(PROMPT, lora_request=JUDGE)
    assert (explained.reason, explained.n_cached_elsewhere) == ("other_namespace", 80)
    assert explained.adapter_elsewhere == "", "without an adapter"


def test_explanations_know_invocations_of_earlier_turns(llm: LLM) -> None:
    """Never does a token differ from itself."""
    llm.flush_cache()
    first = [*HEAD[:20], *INVOCATION, *random_ids(40, seed=8)]
    history = [*first, *generate(llm, first, JUDGE).outputs[0].token_ids]
    second = [*history, *random_ids(9, seed=9), *INVOCATION]
    moved = llm.explain(second, lora_request=JUDGE)
    assert (moved.reason, moved.n_cached, moved.n_cached_elsewhere) == ("invocation", 20, 64)
    assert (moved.adapter_elsewhere, moved.first_difference, moved.cached_token) == (None, None, None)
    for request in (None, RANK):
        other = llm.explain(second, lora_request=request)
        assert (other.reason, other.n_cached, other.n_cached_elsewhere) == ("other_namespace", 20, 64)
        assert other.adapter_elsewhere
        assert (other.first_difference, other.cached_token) == (None, None)
    behind = [*first[:25], *random_ids(40, seed=10)]
    other = llm.explain(behind)
    assert (other.reason, other.n_cached, other.first_difference) == ("invocation", 20, None)
    assert other.adapter_elsewhere, "no whole page more is the same"
    own = llm.explain(behind, lora_request=JUDGE)
    assert (own.reason, own.first_difference) == ("differs", 25)
    generate(llm, [*HEAD[:20], 5, *random_ids(40, seed=11)], None)
    differs = llm.explain([*HEAD[:20], 6, *random_ids(40, seed=12)], lora_request=JUDGE)
    assert (differs.reason, differs.first_difference, differs.token) == ("differs", 20, 6)


def test_explanations_find_adapters_under_other_salts(llm: LLM) -> None:
    for request in (SQL, JUDGE, RANK):
        llm.flush_cache()
        llm.generate(
            [{"prompt_token_ids": [*INVOCATION, *HEAD], "cache_salt": "a"}],
            PARAMS,
            use_tqdm=False,
            lora_request=request,
        )
        explained = llm.explain([*INVOCATION, *HEAD], cache_salt="b", lora_request=request)
        assert (explained.reason, explained.n_cached_elsewhere) == ("other_namespace", 64)
        assert explained.adapter_elsewhere is None, "it is another salt"


def test_pins_and_invalidations(llm: LLM) -> None:
    llm.flush_cache()
    for request in (None, JUDGE):
        generate(llm, PROMPT, request)
    assert llm.pin_cache(PROMPT, lora_request=JUDGE).n_pinned == 80
    assert (llm.explain(PROMPT).n_pinned, llm.explain(PROMPT, lora_request=JUDGE).n_pinned) == (64, 80)
    llm.pin_cache(PROMPT, 0.0, lora_request=JUDGE)
    generate(llm, [*HEAD[:64], *random_ids(30, seed=6)], None)
    for request in (None, RANK):
        generate(llm, PROMPT, request)
    llm.invalidate_cache(PROMPT[:80], lora_request=JUDGE)
    found = [llm.explain(PROMPT, lora_request=request).n_cached for request in (None, JUDGE, RANK)]
    assert found == [70, 70, 80], "the model's own page has the same tokens: an invocation may follow it"
    generate(llm, PROMPT, JUDGE)
    llm.invalidate_cache(PROMPT[:80])
    assert {llm.explain(PROMPT, lora_request=request).n_cached for request in (None, JUDGE, RANK)} == {64}, (
        "the other prompt's"
    )
    llm.invalidate_cache(PROMPT[:64], lora_request=JUDGE)
    assert {llm.explain(PROMPT, lora_request=request).n_cached for request in (None, JUDGE, RANK)} == {0}


@pytest.mark.nightly
@pytest.mark.parametrize("given", rest_nightly([JUDGE, None], kept=(0,)))
def test_an_invalidated_conversation_loses_its_earlier_turns_in_all_tiers(
    folders: Path, tmp_path: Path, given: LoRARequest | None
) -> None:
    """Whose keys have their marks earlier. What begins as it does, and goes another way, stays."""
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    settings = {"host_memory": "4MiB", "cache_dir": tmp_path}
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:

        def cached(prompt: Sequence[int]) -> int:
            explained = llm.explain(prompt, lora_request=JUDGE)
            return explained.n_cached + explained.n_in_host + explained.n_on_disk

        history, turns = HEAD, list[list[int]]()
        other = [*HEAD, *random_ids(30, seed=20)]
        generate(llm, other, None, long)
        for turn in range(3):
            history = [*history, *random_ids(20, seed=21 + turn), *INVOCATION]
            history = [*history, *generate(llm, history, JUDGE, long).outputs[0].token_ids]
            turns.append(history)
        assert [cached(turn) for turn in turns] == [len(turn) - 1 - (len(turn) - 1) % 16 for turn in turns]
        llm.invalidate_cache(history, **({} if given is None else {"lora_request": given}))
        assert [cached(turn) for turn in turns] == [70, 70, 70]
        assert cached(other) == 96, "the other conversation's"
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:
        assert [cached(turn) for turn in turns] == [64, 64, 64]


@pytest.mark.nightly
def test_other_bytes_under_a_name_never_hit_and_the_same_ones_do(folders: Path) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with opened(folders / "base", lora_modules=modules(folders)) as llm:
        expected = {one: cold(llm, PROMPT, one, long) for one in (JUDGE, RANK)}
        llm.flush_cache()
        generate(llm, PROMPT, JUDGE, long)
        llm.load_lora_adapter("judge", folders / "rank", load_inplace=True)
        other = generate(llm, PROMPT, JUDGE, long)
        assert (other.num_cached_tokens, other.outputs) == (70, expected[RANK])
        llm.unload_lora_adapter("judge")
        llm.load_lora_adapter("again", folders / "judge")
        same = generate(llm, PROMPT, LoRARequest("again"), long)
        assert (same.num_cached_tokens, same.outputs) == (80, expected[JUDGE])


def act_a_token_late(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda row: replace(row, adapter_start=row.adapter_start + 1))


def act_a_token_early(patch: pytest.MonkeyPatch) -> None:
    """It writes into a page that the model's requests copy from."""
    _change_rows(patch, lambda row: replace(row, adapter_start=row.adapter_start - 1))


def act_on_whole_rows(patch: pytest.MonkeyPatch) -> None:
    _change_rows(patch, lambda row: replace(row, adapter_start=0))


def _change_rows(patch: pytest.MonkeyPatch, change: Callable[[Row], Row]) -> None:
    plan = StepRows.plan
    patch.setattr(
        StepRows, "plan", lambda self, rows: plan(self, [change(row) if row.adapter else row for row in rows])
    )


def ignore_the_mark(patch: pytest.MonkeyPatch) -> None:
    """The tree takes pages of the adapter for the model's."""
    key = Intake.prompt_key
    patch.setattr(
        Intake, "prompt_key", lambda self, message, tokens: key(self, message, tokens)._replace(key=tokens)
    )


def give_all_adapters_one_mark(patch: pytest.MonkeyPatch) -> None:
    """As if it were used again too early."""
    patch.setattr(marks, "_number", lambda adapter: -7)
    patch.setattr(
        Marks, "add", lambda self, adapter, tokens: ADD(self, ONE_ADAPTER, tokens) or _know(self, adapter)
    )


def activate_at_the_first_invocation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(marks, "_last_place", lambda tokens, invocation: tokens.find(invocation) // 4)


ADD, ONE_ADAPTER = Marks.add, "1" * 64


def _know(known: Marks, adapter: str) -> None:
    known._invocations[adapter] = known._invocations[ONE_ADAPTER]


def check_everything(folders: Path, expected: dict[Any, Any], twice: list[int]) -> None:
    """Answers of the model and of both adapters in turn are those expected, whatever is cached."""
    with opened(folders / "base", lora_modules=modules(folders), max_num_batched_tokens=64, max_num_seqs=8) as llm:
        for _ in range(2):
            for prompt in (PROMPT, twice):
                for request in (JUDGE, None, RANK, SQL):
                    found = generate(llm, prompt, request).outputs
                    assert found == expected[len(prompt), request], "another answer"


@pytest.mark.parametrize(
    "mutant",
    rest_nightly(
        [
            None,
            act_a_token_late,
            act_a_token_early,
            act_on_whole_rows,
            ignore_the_mark,
            give_all_adapters_one_mark,
            activate_at_the_first_invocation,
        ],
        kept=(0,),
    ),
)
def test_mutants_give_other_answers(
    folders: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    twice = [*HEAD[:20], *INVOCATION, *HEAD[20:], *INVOCATION, 5]
    with opened(folders / "base", lora_modules=modules(folders)) as llm:
        expected = {
            (len(prompt), request): cold(llm, prompt, request)
            for prompt in (PROMPT, twice)
            for request in (None, JUDGE, RANK, SQL)
        }
    if mutant is None:
        check_everything(folders, expected, twice)
        return
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="another answer"):
        check_everything(folders, expected, twice)
