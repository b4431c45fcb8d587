"""The bodies of ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``."""

from __future__ import annotations

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.http.body_decoder import BodyDecoder, Int64, SizeCheck, any_size
from radixkv.frontend.pooled_prompts import MAX_POOLED
from radixkv.generation.reranking import DEFAULT_INSTRUCTION
from radixkv.settings.compat import Place, refusals


class TextDocument(msgspec.Struct):
    """A document as an object."""

    text: str
    image: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    image_url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_image(self) -> bool:
        """Whether there is an image, other than null."""
        return any(isinstance(one, msgspec.Raw) and bytes(one) != b"null" for one in (self.image, self.image_url))


class PairFields(msgspec.Struct, kw_only=True):
    """Fields that all bodies share; unknown fields are ignored, and null means the default."""

    model: str | None = None
    instruction: str | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None

    @property
    def instruction_text(self) -> str:
        """Says what a match is."""
        return DEFAULT_INSTRUCTION if self.instruction is None else self.instruction


class RerankRequest(PairFields, kw_only=True):
    """The body of ``POST /v1/rerank`` and ``POST /v2/rerank``, of Cohere, Jina and vLLM."""

    query: str
    documents: list[str | TextDocument]
    top_n: Int64 | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def check_documents(self) -> None:
        """Raises ``InvalidRequest`` for a document that is not a text only."""
        for index, one in enumerate(self.documents):
            if isinstance(one, TextDocument) and one.has_image:
                raise InvalidRequest(
                    f"documents[{index}] has an image; this model reads text only, leave it out", param="documents"
                )


class ScoreRequest(PairFields, kw_only=True):
    """The body of vLLM's ``POST /v1/score``."""

    text_1: str | list[str]
    text_2: str | list[str]


def _check_texts(field: str) -> SizeCheck:
    """Returns a check of a field with texts, of which it counts the quotes: two each, and two of a name."""

    def check(raw: bytes, max_prompt_tokens: int) -> None:
        n_most = (raw.count(b'"') - raw.count(b'\\"')) // 4  # less than there are, where texts have backslashes
        if n_most > MAX_POOLED:
            raise InvalidRequest(f"{field} has more than {MAX_POOLED} texts; at most that a request", param=field)

    return check


_rerank = BodyDecoder(RerankRequest, {"query": any_size, "documents": any_size}, refusals(Place.RERANK))
_score = BodyDecoder(
    ScoreRequest, {"text_1": _check_texts("text_1"), "text_2": _check_texts("text_2")}, refusals(Place.RERANK)
)

parse_score = _score.decode
"""Decodes a body. Raises ``InvalidRequest``."""


def parse_rerank(body: bytes, max_prompt_tokens: int, misspelt: dict[str, str] | None = None) -> RerankRequest:
    """Decodes a body. Raises ``InvalidRequest``."""
    request = _rerank.decode(body, max_prompt_tokens, misspelt)
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequest(f"top_n is {request.top_n}; it must be at least 1, or 0 for all", param="top_n")
    request.check_documents()
    return request
