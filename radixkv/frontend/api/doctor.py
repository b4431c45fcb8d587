"""The route ``/cache/doctor``: where the matches of prompts with the cache end, and what that costs."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.errors import RequestError
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.kept_answers import KeptAnswers
from radixkv.frontend.miss_counts import MissCounts, MissesAtPlace
from radixkv.frontend.miss_report import miss_fields, place_text
from radixkv.frontend.pause_report import pause_fields
from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer

MAX_REPORTED_PLACES = 16
"""Most places of a report."""
PAUSES_LIMIT_S = 2.0
"""A runtime that takes longer is not waited for."""


def add_doctor_route(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the route ``/cache/doctor``."""

    @app.get("/cache/doctor")
    async def doctor(request: Request) -> Response:
        """Where the matches of prompts with the cache end, why, and how many tokens that costs."""
        report = doctor_fields(client.misses, served_model.tokenizer)
        if served_model.nonce_filter is not None:
            report["nonces_removed"] = served_model.nonce_filter.n_removed
        if served_model.kept_answers is not None:
            report["history_answers"] = _history_fields(served_model.kept_answers)
        return JSONResponse(report | await _pauses_or_why_none(client))


async def _pauses_or_why_none(client: EngineClient) -> dict[str, Any]:
    """Returns what the runtime has learnt of pauses; the rest of the report needs no runtime."""
    try:
        async with asyncio.timeout(PAUSES_LIMIT_S):
            pauses = (await client.stats()).pauses
    except TimeoutError:
        return {"pauses_missing": f"no pauses are shown: the runtime did not answer within {PAUSES_LIMIT_S:g} s"}
    except RequestError as error:
        return {"pauses_missing": f"no pauses are shown: {error}"}
    return {} if pauses is None else {"pauses": pause_fields(pauses)}


def doctor_fields(counts: MissCounts, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the JSON object of all misses that were counted. Detokenizes a few tokens for each place."""
    places = counts.places()[:MAX_REPORTED_PLACES]
    return {
        "requests": counts.n_requests,
        "prompt_tokens": counts.n_prompt,
        "lost_tokens": counts.n_lost,
        "text": _summary(counts),
        "misses": [_place_fields(place, counts, tokenizer) for place in places],
    }


def _history_fields(kept_answers: KeptAnswers) -> dict[str, Any]:
    """Returns how many earlier answers of this server prompts contained, by what their text was."""
    n_same, n_otherwise = kept_answers.n_same, kept_answers.n_otherwise
    return {
        "same": n_same,
        "otherwise": n_otherwise,
        "text": f"{n_otherwise:,} of {n_same + n_otherwise:,} answers in the history of chats are not as the "
        "model wrote them",
    }


def _place_fields(place: MissesAtPlace, counts: MissCounts, tokenizer: Tokenizer | None) -> dict[str, Any]:
    example = miss_fields(place.example, tokenizer)
    if not place.has_place:
        example = {}  # the places of the others differ
    return example | {
        "reason": place.reason,
        "requests": place.n_requests,
        "lost_tokens": place.n_lost,
        "share": round(place.n_lost / counts.n_lost, 4) if counts.n_lost else 0.0,
        "lost_tokens_per_request": place.n_lost // place.n_requests,
        "text": place_text(place, counts, tokenizer),
    }


def _summary(counts: MissCounts) -> str:
    if not counts.n_requests:
        return "no request has ended yet"
    cached = 1 - counts.n_lost / counts.n_prompt
    requests = f"{counts.n_requests:,} request{'s' if counts.n_requests > 1 else ''}"
    what = f"{cached:.0%} of {counts.n_prompt:,} prompt tokens of {requests} were cached"
    return f"{what}; {counts.n_lost:,} were computed"
