"""``LLM``: the engine in this process, the runtime's loop over lists instead of sockets."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from radixkv.checkpoints import resolve
from radixkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulePolicy, SchedulerConfig
from radixkv.errors import ConfigError, InvalidRequest, UnsupportedFeature, request_error
from radixkv.runtime.loop import Loop, build_loop
from radixkv.sampling import SamplingParams
from radixkv.text.answer import AnswerText
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Cancel, Done, Failed, Flush, Flushed, FromRuntime, GetStats, Stats, Submit, Tokens

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """``stop`` or ``length``."""


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens that were not computed."""
    outputs: list[CompletionOutput]


@dataclass
class _Answer:
    """A request while it runs."""

    prompt: str | None
    submit: Submit
    text: AnswerText | None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_stopped: bool = False
    """Whether a stop string ended it; what still comes is dropped."""
    output: RequestOutput | None = None


class LLM:
    """A model, its pool and its prefix cache, for offline use.

    Args:
        model: a folder, a hub name, or ``tiny`` for the embedded model.
        revision: branch, tag or commit of a hub name.
        dtype: ``auto`` or ``float32``.
        load_format: ``auto``.
        max_model_len: longest prompt and answer together, in tokens; None takes the model's own limit.
        max_num_seqs: most requests a step.
        max_num_batched_tokens: most tokens that a step computes.
        page_size: tokens a page.
        kv_cache_memory_bytes: the pool's size.
        max_total_tokens: the pool's size in tokens, instead.
        enable_prefix_caching: whether prompts share pages.
        schedule_policy: ``lpm`` (longest cached prefix first) or ``fcfs``.
        seed: draws the seeds of requests that bring none.
        unbuilt: settings that vLLM or SGLang have and this release has not; refused by name.

    Raises:
        CheckpointError: there is no such model, or its files are corrupt.
        ConfigError: a setting cannot work.
        UnsupportedFeature: a setting is for a feature that this release does not have.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        page_size: int = 16,
        kv_cache_memory_bytes: int = 1 << 30,
        max_total_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        schedule_policy: SchedulePolicy = "lpm",
        seed: int = 0,
        **unbuilt: object,
    ) -> None:
        if load_format != "auto":
            raise UnsupportedFeature(f"load_format {load_format!r} is not in this release; use 'auto'")
        if unbuilt:
            raise UnsupportedFeature(
                f"LLM has no setting {', '.join(sorted(unbuilt))} in this release, which runs on the CPU; leave it "
                "out (kv_cache_memory_bytes or max_total_tokens size the pool)"
            )
        config = EngineConfig(
            ModelConfig(model, revision, dtype, max_model_len),
            CacheConfig(page_size, kv_cache_memory_bytes, max_total_tokens, enable_prefix_caching),
            SchedulerConfig(max_num_seqs, max_num_batched_tokens, schedule_policy),
            seed,
        )
        checkpoint = resolve(model, revision)
        has_tokenizer = (checkpoint.folder / "tokenizer.json").exists()
        self._tokenizer = Tokenizer.load(checkpoint.folder) if has_tokenizer else None
        self._max_queued = config.scheduler.max_queued_requests
        self._loop: Loop | None = build_loop(config, checkpoint)
        self._n_requests = 0

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts together, and returns when all are done, in the order given.

        Args:
            prompts: texts, or lists of token ids, also mixed; one text alone is one prompt.
            sampling_params: for all, or one for each prompt; None takes the defaults.

        Raises:
            RequestError: a prompt cannot be answered; all others of the call are dropped.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        elif not isinstance(prompts, Sequence):
            raise InvalidRequest(f"prompts is a {type(prompts).__name__}; give a text, or a list of prompts")
        answers = {a.submit.id: a for a in self._answers(prompts, _each(sampling_params, len(prompts)))}
        try:
            self._run(answers)
        except BaseException:  # Ctrl-C included: nothing of this call may run on into the next
            for request_id in answers:
                self._live.receive(Cancel(request_id))
            raise
        return [answer.output for answer in answers.values() if answer.output is not None]

    def chat(self, *messages: object, **settings: object) -> NoReturn:
        """Refused: chat templates are not in this release."""
        raise UnsupportedFeature("LLM.chat is not in this release; apply the chat template and use generate")

    def flush_cache(self) -> Flushed:
        """Makes everything cached unreachable; says how many pages that freed."""
        reply = self._live.receive(Flush("flush"))[0]
        assert isinstance(reply, Flushed)
        return reply

    def get_metrics(self) -> Stats:
        """Counters since the start and gauges of this moment."""
        reply = self._live.receive(GetStats("stats"))[0]
        assert isinstance(reply, Stats)
        return reply

    def shutdown(self) -> None:
        """Frees the model and the pool; the object is of no use after that."""
        self._loop = None

    @property
    def _live(self) -> Loop:
        if self._loop is None:
            raise ConfigError("this LLM was shut down; make a new one")
        return self._loop

    def _answers(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[_Answer]:
        for prompt, sampling in zip(prompts, params, strict=True):
            text = prompt if isinstance(prompt, str) else None
            submit = Submit(f"llm-{self._n_requests}", self._encode(prompt), sampling)
            self._n_requests += 1
            if self._tokenizer is None and sampling.stop:
                raise InvalidRequest("stop strings need a tokenizer, and this checkpoint has none", param="stop")
            yield _Answer(text, submit, AnswerText(self._tokenizer, sampling.stop) if self._tokenizer else None)

    def _encode(self, prompt: Prompt) -> bytes:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest("this checkpoint has no tokenizer; give prompts as token ids", param="prompt")
            return self._tokenizer.encode(prompt)
        try:
            return array("i", prompt).tobytes()
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(
                f"a prompt is neither text nor int32 token ids: {error}", param="prompt"
            ) from error

    def _run(self, answers: dict[str, _Answer]) -> None:
        loop = self._live
        waiting = iter(answers.values())
        n_live, is_all_sent = 0, False
        while n_live or not is_all_sent:
            while n_live < self._max_queued and not is_all_sent:
                answer = next(waiting, None)
                if answer is None:
                    is_all_sent = True
                else:
                    n_live += 1
                    self._take(loop.receive(answer.submit), answers)
            if loop.has_work:
                n_live -= self._take(loop.turn(), answers)

    def _take(self, messages: list[FromRuntime], answers: dict[str, _Answer]) -> int:
        """Applies messages; returns how many requests ended. Raises the error of one that failed."""
        n_ended = 0
        ends_by_token = {m.id for m in messages if isinstance(m, Done) and m.stop_token_id is not None}
        for message in messages:
            match message:
                case Tokens(items):
                    for item in items:
                        if _extend(answers[item.id], item.tokens, ends_by_token=item.id in ends_by_token):
                            n_ended += self._take(self._live.receive(Cancel(item.id)), answers)
                case Done():
                    n_ended += _finish(answers[message.id], message)
                case Failed():
                    raise request_error(message.code, message.text, param=message.param)
                case _:
                    raise AssertionError(f"the loop does not send {message!r} unasked")
        return n_ended


def _each(params: SamplingParams | Sequence[SamplingParams] | None, n_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n_prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidRequest("sampling_params is neither a SamplingParams nor a list of them")
    if len(params) != n_prompts:
        raise InvalidRequest(f"{len(params)} sampling_params for {n_prompts} prompts; give one, or one for each")
    return params


def _ids(tokens: bytes) -> list[int]:
    return array("i", tokens).tolist()


def _extend(answer: _Answer, tokens: bytes, *, ends_by_token: bool) -> bool:
    """Adds tokens; whether they complete a stop string. The token that ends an answer is not part of its text."""
    if answer.is_stopped:
        return False
    ids = _ids(tokens)
    answer.token_ids += ids
    if answer.text is not None:
        piece, answer.is_stopped = answer.text.push(ids[:-1] if ends_by_token else ids)
        answer.pieces.append(piece)
    return answer.is_stopped


def _finish(answer: _Answer, done: Done) -> int:
    if answer.text is not None and not answer.is_stopped:
        piece, answer.is_stopped = answer.text.finish()
        answer.pieces.append(piece)
    answer.output = RequestOutput(
        request_id=done.id,
        prompt=answer.prompt,
        prompt_token_ids=_ids(answer.submit.tokens),
        num_cached_tokens=done.n_cached_tokens,
        outputs=[
            CompletionOutput(
                index=0,
                text="".join(answer.pieces),
                token_ids=answer.token_ids,
                finish_reason="stop" if answer.is_stopped else done.finish_reason,
            )
        ],
    )
    return 1
