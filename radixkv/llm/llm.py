"""``LLM``: the runtime's loop over lists instead of sockets."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from radixkv import compat
from radixkv.checkpoints import Checkpoint, resolve, resolve_tokenizer
from radixkv.config import (
    CacheConfig,
    Device,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    SchedulePolicy,
    SchedulerConfig,
)
from radixkv.errors import ConfigError, request_error
from radixkv.llm.garbage_collection import paused_collector
from radixkv.llm.in_flight import Answer
from radixkv.llm.interrupts import held_interrupts
from radixkv.llm.outputs import RequestOutput
from radixkv.llm.prompts import Encoder, Message, Prompt, each, several_conversations, several_prompts
from radixkv.runtime.device.factory import check_device, resolve_config
from radixkv.runtime.loop import Loop, build_loop
from radixkv.sampling import SamplingParams
from radixkv.terminal_progress import Progress
from radixkv.wire import (
    Cancel,
    Done,
    Explain,
    Explained,
    Failed,
    Flush,
    Flushed,
    FromRuntime,
    GetStats,
    Stats,
    Submit,
    Tokens,
    unpack_tokens,
)

NameT = TypeVar("NameT", str, str | None)

_IN_SAMPLING = {name: f"SamplingParams({name}=...)" for name in SamplingParams.__struct_fields__}
"""Where settings of sampling are taken."""
_GENERATE, _CHAT = (replace(one, instead={**_IN_SAMPLING, **one.instead}) for one in (compat.GENERATE, compat.CHAT))

_SUBMITS_A_TURN = 128
"""Prompts that are encoded and sent between two steps: some 10 ms of long ones, and as many as steps start with."""


class LLM:
    """A model, its pool and its prefix cache, for offline use by one thread, one call at a time.

    Args:
        model: a folder, a hub name, or ``tiny`` for the embedded model.
        tokenizer: the folder or hub name of another tokenizer; None takes the model's.
        revision: branch, tag or commit of a hub name.
        device: ``cpu``, ``cuda`` or ``auto``: CUDA if there is a GPU that runs the model.
        dtype: ``float32``, ``bfloat16``, ``float16`` (CUDA only) or ``auto``: float32 on the CPU, 16 bits on CUDA;
            torch's own, such as ``torch.bfloat16``, too.
        load_format: ``auto``, or ``dummy`` for random weights of the shapes in ``config.json``.
        enforce_eager: whether to do without CUDA graphs: a quicker start, and slower steps.
        chat_template: a file with the chat template that is used instead of the tokenizer's own.
        max_model_len: longest prompt and answer together, in tokens; None takes the model's own limit.
        max_num_seqs: most rows a step; None: 256 on the CPU, 512 on CUDA.
        max_num_batched_tokens: most tokens that a step computes; None: 2048 on the CPU, 8192 on CUDA.
        page_size: tokens a page.
        kv_cache_memory_bytes: the pool's size; None: 1 GiB on the CPU, on CUDA what ``gpu_memory_utilization``
            leaves.
        max_total_tokens: the pool's size in tokens, instead of ``kv_cache_memory_bytes``.
        gpu_memory_utilization: of the GPU's memory, what weights, pool and workspace may take together; None: 0.9.
        mem_fraction_static: SGLang's name for it.
        enable_prefix_caching: whether prompts share pages.
        schedule_policy: ``lpm`` (longest cached prefix first) or ``fcfs``.
        seed: draws the seeds of requests that bring none.
        settings: those that only vLLM or SGLang have: accepted with the value that asks for nothing, refused by
            name with any other.

    Raises:
        CheckpointError: there is no such model, or its files are corrupt.
        ConfigError: a setting cannot work.
        UnsupportedFeature: a setting is for a feature that this release does not have.
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        device: Device | Literal["auto"] = "auto",
        dtype: object = "auto",
        load_format: LoadFormat = "auto",
        enforce_eager: bool = False,
        chat_template: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        page_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        max_total_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        mem_fraction_static: float | None = None,
        enable_prefix_caching: bool = True,
        schedule_policy: SchedulePolicy = "lpm",
        seed: int = 0,
        **settings: object,
    ) -> None:
        compat.LLM.refuse(settings, compat.names_of(LLM))
        if mem_fraction_static is not None:
            if gpu_memory_utilization is not None:
                raise ConfigError(
                    "gpu_memory_utilization and mem_fraction_static are one setting; give one of them"
                )
            gpu_memory_utilization = mem_fraction_static
        model, tokenizer = _name(model), _name(tokenizer)
        config = EngineConfig(
            ModelConfig(
                model,
                revision,
                compat.dtype_name(dtype),
                max_model_len,
                load_format,
                tokenizer,
                device,
                enforce_eager,
            ),
            CacheConfig(
                page_size, kv_cache_memory_bytes, max_total_tokens, enable_prefix_caching, gpu_memory_utilization
            ),
            SchedulerConfig(max_num_seqs, max_num_batched_tokens, schedule_policy),
            seed,
        )
        check_device(config.model.device)
        texts_folder = None if tokenizer is None else resolve_tokenizer(tokenizer)
        checkpoint = resolve(model, revision, load_format="dummy")
        config = resolve_config(config, checkpoint)
        template = None if chat_template is None else Path(chat_template)
        self._encoder = Encoder(texts_folder or checkpoint.folder, template, checkpoint.eos_token_ids)
        if load_format == "auto" and not checkpoint.has_weights:
            checkpoint = resolve(model, revision)  # last, as all of the above may end it
        self._default_sampling = default_sampling(checkpoint)
        self._max_queued = config.scheduler.max_queued_requests
        self._loop: Loop | None = build_loop(config, checkpoint)
        self._is_busy = False
        self._ids = (f"llm-{number}" for number in itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        **settings: object,
    ) -> list[RequestOutput]:
        """Answers prompts together, and returns when all are done, in the order given.

        Args:
            prompts: texts, lists of token ids, or dictionaries with ``prompt`` or ``prompt_token_ids`` and perhaps
                ``cache_salt``, also mixed; one alone is a list of one.
            sampling_params: for all, or one for each prompt; None takes ``get_default_sampling_params``.
            use_tqdm: whether a line on the terminal says how far it is.
            priority: one number for each prompt; of those that wait the lowest goes first.
            settings: those of vLLM alone, as in ``LLM``.

        Raises:
            RequestError: a prompt cannot be answered; all others of the call are dropped, also those that run.
        """
        # Also where there are no prompts, but what some engines take instead.
        _GENERATE.refuse(settings, compat.names_of(self.generate))
        listed = several_prompts(prompts)
        sampling = each(
            "sampling_params", SamplingParams, sampling_params, self.get_default_sampling_params(), listed
        )
        priorities = each("priority", int, priority, 0, listed)
        answers: dict[int, Answer] = {}

        def asked() -> Iterator[Answer]:
            # What is not sent yet does not wait in the loop's queue, where priorities count.
            for place in sorted(range(len(listed)), key=priorities.__getitem__):
                answers[place] = self._answer(listed[place], sampling[place], priorities[place])
                yield answers[place]

        progress = Progress("prompts", len(listed), is_wanted=use_tqdm)
        with paused_collector(), progress, closing(self._run(asked())) as run:
            for n_done, n_tokens in run:
                progress.show(n_done, n_tokens)
        return [answers[place].output() for place in range(len(listed))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: object,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several together, by the checkpoint's chat template.

        Args:
            messages: dictionaries with ``role`` and ``content``; or a list of such conversations.
            sampling_params: as in ``generate``.
            use_tqdm: as in ``generate``.
            add_generation_prompt: whether the prompt ends with the beginning of the assistant's answer.
            continue_final_message: whether the answer goes on with the last message instead.
            chat_template_kwargs: more that the template may read.
            settings: those of vLLM alone, as in ``LLM``.

        Raises:
            RequestError: the template refuses a conversation, or as in ``generate``.
        """
        _CHAT.refuse(settings, compat.names_of(self.chat))
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in several_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids that ``chat`` answers. Raises ``RequestError``."""
        tokens = self._encoder.chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs or {},
        )
        return unpack_tokens(tokens)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answers one prompt; after each step what there is by then, the last with ``finished``.

        Closing the iterator ends the answer. Only one call may be under way at a time.

        Raises:
            RequestError: the prompt cannot be answered.
        """
        (sampling,) = each(
            "sampling_params", SamplingParams, sampling_params, self.get_default_sampling_params(), [prompt]
        )
        answer = self._answer(prompt, sampling, 0, is_watched=True)
        with closing(self._run([answer])) as run:
            for _ in run:
                yield answer.output()

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where a call brings no settings: those of the checkpoint's ``generation_config.json``."""
        return self._default_sampling

    def explain(self, prompt: Prompt, *, cache_salt: str = "") -> Explained:
        """How much of a prompt is cached, and why no more; changes nothing. Raises ``RequestError``.

        The salt is that of a prompt that brings one, else ``cache_salt``.
        """
        encoded = self._encoder.prompt(prompt, cache_salt=cache_salt)
        reply = self._live.receive(Explain(next(self._ids), encoded.tokens, encoded.cache_salt))[0]
        if isinstance(reply, Failed):
            raise request_error(reply.code, reply.text, param=reply.param)
        assert isinstance(reply, Explained)
        return reply

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
        """Frees the model and the pool, for this process and others; the object is of no use after that."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together that the model may have, in tokens."""
        return self._live.ready.max_model_len

    @property
    def max_prompt_and_answer(self) -> int:
        """Longest that are taken together: ``max_model_len``, or less if the pool holds less."""
        return self._live.ready.max_prompt_and_answer

    @property
    def _live(self) -> Loop:
        if self._loop is None:
            raise ConfigError("this LLM was shut down; make a new one")
        return self._loop

    def _answer(
        self, prompt: Prompt, sampling: SamplingParams, priority: int, *, is_watched: bool = False
    ) -> Answer:
        encoded = self._encoder.prompt(prompt)
        self._encoder.check(sampling)
        submit = Submit(next(self._ids), encoded.tokens, sampling, encoded.cache_salt, priority=priority)
        return Answer(encoded.text, submit, self._encoder, is_watched=is_watched)

    def _run(self, answers: Iterable[Answer]) -> Generator[tuple[int, int], None, None]:
        """Runs them to their ends; after each turn how many have ended, and how many tokens there are.

        They are taken a few a turn, so that the device works while most prompts are still to be encoded. Closing it
        ends all that are left.
        """
        loop = self._live
        if self._is_busy:
            raise ConfigError("this LLM is answering another call; finish or close that one first")
        self._is_busy = True
        waiting = iter(answers)
        by_id: dict[str, Answer] = {}
        n_done, n_tokens, is_all_sent = 0, 0, False
        try:
            while n_done < len(by_id) or not is_all_sent:
                loop = self._live
                with held_interrupts():
                    n_most = min(self._max_queued + n_done, len(by_id) + _SUBMITS_A_TURN)
                    while len(by_id) < n_most and not is_all_sent:
                        answer = next(waiting, None)
                        if answer is None:
                            is_all_sent = True
                        else:
                            by_id[answer.submit.id] = answer
                            n_done += self._take(loop.receive(answer.submit), by_id)
                    if loop.has_work:
                        messages = loop.turn()
                        n_done += self._take(messages, by_id)
                        n_tokens += sum(len(one.items) for one in messages if isinstance(one, Tokens))
                yield n_done, n_tokens
        finally:  # after an error or Ctrl-C too: nothing of this call may run on into the next
            self._is_busy = False
            with held_interrupts():
                for answer in by_id.values():
                    if not answer.is_done:
                        loop.receive(Cancel(answer.submit.id))

    def _take(self, messages: Sequence[FromRuntime], answers: Mapping[str, Answer]) -> int:
        """Applies messages; how many requests ended. Raises the error of one that failed."""
        n_done = 0
        for message in messages:
            match message:
                case Tokens(items, prompts):
                    for prompt in prompts:
                        answers[prompt.id].add_prompt(prompt)
                    for item in items:
                        if answers[item.id].add(item):
                            n_done += self._take(self._live.receive(Cancel(item.id, item.choice)), answers)
                case Done():
                    answers[message.id].finish(message)
                    n_done += 1
                case Failed():
                    raise request_error(message.code, message.text, param=message.param)
                case _:
                    raise AssertionError(f"the loop does not send {message!r} unasked")
        return n_done


def default_sampling(checkpoint: Checkpoint) -> SamplingParams:
    """What ``generation_config.json`` sets, and for the rest the defaults of ``SamplingParams``."""
    settings: dict[str, Any] = dict(checkpoint.default_sampling)
    if "max_new_tokens" in settings:
        settings["max_tokens"] = settings.pop("max_new_tokens")
    return SamplingParams(**settings)


def _name(place: NameT | Path) -> NameT | str:
    """A folder as the configuration has it."""
    return str(place) if isinstance(place, Path) else place
