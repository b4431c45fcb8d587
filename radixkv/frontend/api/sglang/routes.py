"""SGLang's ``/generate``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixkv.errors import UnsupportedFeature, shortened
from radixkv.frontend.answers import Answers, PartSink, PromptAnswers, respond
from radixkv.frontend.api.sglang.logprobs import (
    InputLogprobs,
    OutputLogprobs,
    RenderedToken,
    render_with_text,
    render_without_text,
)
from radixkv.frontend.api.sglang.schema import GenerateRequest, SamplingFields, parse_generate
from radixkv.frontend.api.sglang.translation import GeneratePrompt, generate_prompts
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.sse import event
from radixkv.frontend.in_flight import TokenDelta
from radixkv.frontend.miss_report import cached_fields
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.stored_prompts import stored_fields
from radixkv.generation.logprobs import TokenRenderer
from radixkv.generation.models import GenerationModel
from radixkv.generation.output import ChoiceStream, OutputDelta
from radixkv.wire.messages import Done, TokenLogprobs


def add_generate_route(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the route ``/generate``."""
    body_docs = app.json_body(GenerateRequest, sampling_params=SamplingFields | list[SamplingFields] | None)

    @app.api_route("/generate", methods=["POST", "PUT"], openapi_extra=body_docs)
    async def generate(request: Request) -> Response:
        """SGLang's generation; each event of a stream has all text so far."""
        arrived = Arrival.of(request)
        body, sampling = await app.read_body(request, parse_generate, served_model.max_prompt_and_answer)
        if body.model and body.model not in served_model.names:
            raise UnsupportedFeature(
                f"model {shortened(body.model)} chooses no adapter in /generate; give its name as lora_path",
                param="model",
            )
        encoding = generate_prompts(body, sampling, served_model, arrived.tenant)
        prompts = await cancel_on_disconnect(request.receive, encoding)
        writer = GenerateWriter(body, prompts, client, served_model, arrived=arrived)
        return await respond(request, writer, streams=bool(body.stream))


@dataclass
class _ChoiceState:
    """One choice so far."""

    index: int
    """The choice's index among all choices of the request."""
    id: str
    """The ``id`` in ``meta_info``."""
    prompt: GeneratePrompt
    stream: ChoiceStream[RenderedToken]
    logprobs: OutputLogprobs | None
    """None if the request asks for none."""
    output: OutputDelta[RenderedToken] = field(default_factory=OutputDelta)
    """The output so far. Its logprobs are in ``logprobs``."""
    finish: dict[str, Any] | None = None
    """SGLang's ``finish_reason`` object; None while the choice is running."""

    def add(self, output: OutputDelta[RenderedToken], delta: TokenDelta) -> None:
        """Adds new output."""
        if self.logprobs is not None:
            self.logprobs.absorb(output)
            output.logprobs = []
        self.output.add(output)
        if output.finish_reason is not None:
            self.finish = self._finish(output, delta)

    def _finish(self, output: OutputDelta[RenderedToken], delta: TokenDelta) -> dict[str, Any]:
        match output.finish_reason:
            case "length":
                limit = self.prompt.prompt.sampling.max_tokens if self.prompt.generates else 0
                return {"type": "length", "length": limit}
            case "stop":
                matched = delta.stop_token_id if output.stop_reason is None else output.stop_reason
                return {"type": "stop", "matched": matched}
        return {"type": output.finish_reason}


class _Prompt(PromptAnswers[RenderedToken]):
    """One prompt of a request with its choices, as far as they have come."""

    def __init__(self, prompt: GeneratePrompt, model: GenerationModel, first_index: int) -> None:
        is_for_cache = not prompt.generates and prompt.prompt.sampling.logprobs is None
        self.input_logprobs = InputLogprobs(prompt, model.tokenizer)
        super().__init__(
            prompt.prompt, model, _token_renderer(prompt), generates=prompt.generates, is_for_cache=is_for_cache
        )
        self.states = [
            _ChoiceState(
                first_index + index,
                _id(prompt, index),
                prompt,
                stream,
                None if prompt.prompt.sampling.logprobs is None else OutputLogprobs(prompt),
            )
            for index, stream in enumerate(self.choices)
        ]

    def absorb_prompt_logprobs(self, token_logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes the logprobs of the prompt's next tokens, from its second on."""
        self.input_logprobs.absorb(token_logprobs)

    def absorb(self, delta: TokenDelta) -> OutputDelta[RenderedToken]:
        """Adds new output to its choice, and returns it."""
        output = super().absorb(delta)
        self.states[delta.choice].add(output, delta)
        return output


class GenerateWriter:
    """Runs one ``/generate`` request and writes its response. Use either ``whole`` or ``events``, once.

    Args:
        request: the parsed body.
        prompts: the encoded prompts of the request.
        client: runs them.
        model: ends answers and turns them into text.
        arrived: when and where the request arrived.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompts: Sequence[GeneratePrompt],
        client: EngineClient,
        model: GenerationModel,
        *,
        arrived: Arrival,
    ) -> None:
        self._arrived = arrived
        self._explains_cache = bool(request.explain_cache)
        self._model = model
        firsts = accumulate((prompt.prompt.sampling.n for prompt in prompts), initial=0)
        self._prompts = [_Prompt(prompt, model, first) for prompt, first in zip(prompts, firsts, strict=False)]
        self._unconfirmed = dict.fromkeys(self._prompts)
        """The prompts that have not ended."""
        self._answers = Answers(self._prompts, client, arrived, _format_field(prompts))
        is_list = isinstance(request.text, list) or not isinstance((request.input_ids or [0])[0], int)
        self._is_single = not is_list and len(self._prompts[0].states) == 1

    async def whole(self) -> bytes:
        """Returns the JSON of the whole response. Raises ``RequestError``; cancelling it cancels the request."""
        objects: dict[int, dict[str, Any]] = {}
        last: list[TokenDelta] = []
        async with aclosing(self._answers.deltas_and_outputs(streams=False)) as outputs:
            async for delta, _ in outputs:
                if delta.done is not None:
                    last.append(delta)
        for delta in last:  # what the tiers have is known only now
            objects |= {choice.index: content for choice, content in self._last_objects(delta)}
        objects |= {choice.index: content for choice, content in self._unconfirmed_objects()}
        return msgspec.json.encode(objects[0] if self._is_single else [objects[index] for index in sorted(objects)])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields events, each with all the text so far. Raises ``RequestError``; closing it cancels the request."""
        async with aclosing(self._answers.deltas_and_outputs(streams=True)) as outputs:
            async for delta, output in outputs:
                if part := self._part(delta, output):
                    yield part
        for choice, content in self._unconfirmed_objects():
            yield self._event(choice, content)

    def write_directly(self, sink: PartSink) -> None:
        """See ``AnswerWriter.write_directly``."""
        self._answers.write_directly(sink, self._part)

    def _part(self, delta: TokenDelta, output: OutputDelta[RenderedToken]) -> bytes:
        """Returns the events of one choice's new output; nothing for none."""
        prompt = self._prompts[delta.prompt]
        choice = prompt.states[delta.choice]
        objects = self._last_objects(delta)
        if not output.is_empty and choice.finish is None:
            objects.insert(0, (choice, self._object(prompt, choice, None)))
        return b"".join([self._event(choice, content) for choice, content in objects])

    def _event(self, choice: _ChoiceState, content: dict[str, Any]) -> bytes:
        return event(content if self._is_single else {**content, "index": choice.index})

    def _last_objects(self, delta: TokenDelta) -> list[tuple[_ChoiceState, dict[str, Any]]]:
        """Returns the choices of a prompt with their last JSON objects, if the prompt has ended with this delta."""
        if delta.done is None:
            return []
        prompt = self._prompts[delta.prompt]
        del self._unconfirmed[prompt]
        return [(choice, self._object(prompt, choice, delta.done)) for choice in prompt.states]

    def _unconfirmed_objects(self) -> list[tuple[_ChoiceState, dict[str, Any]]]:
        """Returns the choices whose prompts have no end: the runtime died after the last token of all choices."""
        return [
            (choice, self._object(prompt, choice, None)) for prompt in self._unconfirmed for choice in prompt.states
        ]

    def _object(self, prompt: _Prompt, choice: _ChoiceState, done: Done | None) -> dict[str, Any]:
        """Returns the JSON object of a choice; only the runtime's ``done`` says how many tokens were cached."""
        meta: dict[str, Any] = {
            "id": choice.id,
            "finish_reason": choice.finish,
            "prompt_tokens": prompt.n_prompt,
            "completion_tokens": choice.stream.n_tokens,
        }
        if choice.finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._arrived.at
        if done is not None:
            miss = done.miss if self._explains_cache else None
            meta |= cached_fields(done.cache_use, miss, self._model.ready, self._model.tokenizer)
            if done.kv_eviction is not None:
                meta["kv_eviction"] = done.kv_eviction.fields
        meta |= stored_fields([prompt.stored], self._model.ready)
        if choice.logprobs is not None:
            meta |= prompt.input_logprobs.fields() | choice.logprobs.fields()
        return {"text": choice.output.text, "output_ids": choice.output.token_ids, "meta_info": meta}


def _format_field(prompts: Sequence[GeneratePrompt]) -> str:
    """Returns the field that says what answers must match; the field of all of them if prompts differ in it."""
    names = {prompt.format_field for prompt in prompts} - {None}
    return str(*names) if len(names) == 1 else "sampling_params"


def _token_renderer(prompt: GeneratePrompt) -> TokenRenderer[RenderedToken] | None:
    if prompt.prompt.sampling.logprobs is None:
        return None
    return render_with_text if prompt.returns_text else render_without_text


def _id(prompt: GeneratePrompt, index: int) -> str:
    name = prompt.rid or prompt.prompt.id
    return f"{name}_{index}" if prompt.prompt.sampling.n > 1 else name
