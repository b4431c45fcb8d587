"""Failures of the tokenizers package."""

from __future__ import annotations

from typing import NoReturn

from radixkv.errors import InvalidRequest

_MAX_REASON_CHARACTERS = 200


class TokenizerFailed(InvalidRequest):
    """The checkpoint's tokenizer cannot encode a text or decode tokens."""

    @classmethod
    def of(cls, what: str, reason: object) -> TokenizerFailed:
        """Returns the error of a text or of tokens, with the reason as far as it is short."""
        shown = " ".join(str(reason).split())[:_MAX_REASON_CHARACTERS]
        return cls(f"the tokenizer of this checkpoint cannot {what}: {shown}", param="prompt")


def raise_failure(what: str, error: BaseException) -> NoReturn:
    """Raises ``TokenizerFailed`` for a failure of the package, and any other exception as it is."""
    if is_failure(error):
        raise TokenizerFailed.of(what, error) from error
    raise error


def is_failure(error: BaseException) -> bool:
    """Returns whether an exception is a failure of the package: a panic of its Rust code is no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
