"""Objects in a bucket of S3, or of a store that speaks its protocol."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from radixkv.errors import ConfigError, shortened
from radixkv.runtime.tiers.stores.object_store import ObjectStoreError

_N_PARALLEL = 32
_TRIAL_NAME = "radixkv-trial"
"""An object that is written when a store is opened, to see whether that works."""
_MAX_REASON = 300


class S3Objects:
    """An ``ObjectStore`` in an S3 bucket. Endpoint, region and credentials come from the usual ``AWS_*`` variables.

    Args:
        url: ``s3://BUCKET/PREFIX``; the prefix may be empty.

    Raises:
        ConfigError: there are no credentials, or an object cannot be written and read.

    Cost: an object is written and read.
    """

    n_parallel = _N_PARALLEL

    def __init__(self, url: str) -> None:
        try:
            self._store = S3Store.from_url(
                url,
                # An endpoint is plain HTTP only if AWS_ENDPOINT_URL says so.
                client_options={"allow_http": True, "connect_timeout": "1s", "timeout": "5s"},
                retry_config={
                    "max_retries": 2,
                    "retry_timeout": timedelta(seconds=1),
                    "backoff": {"init_backoff": timedelta(milliseconds=20), "max_backoff": timedelta(seconds=1)},
                },
            )
            obstore.put(self._store, _TRIAL_NAME, b"radixkv", use_multipart=False)
            obstore.get(self._store, _TRIAL_NAME).bytes()
        except (BaseError, OSError) as error:
            raise ConfigError(
                f"the shared cache {shortened(url)} cannot be used: {_reason(error)}; check the bucket, "
                "AWS_ENDPOINT_URL, AWS_REGION and the credentials"
            ) from error

    async def have(self, names: Sequence[str]) -> list[bool]:
        """See ``ObjectStore``."""
        return await asyncio.gather(*map(self._has, names))

    async def get(self, name: str) -> memoryview | None:
        """See ``ObjectStore``."""
        with _translated_errors():
            try:
                return memoryview(await (await obstore.get_async(self._store, name)).bytes_async())
            except FileNotFoundError:
                return None

    async def put(self, name: str, value: memoryview) -> bool:
        """See ``ObjectStore``."""
        with _translated_errors():
            await obstore.put_async(self._store, name, value, use_multipart=False)
        return True

    async def delete(self, name: str) -> bool:
        """See ``ObjectStore``."""
        with _translated_errors():
            await obstore.delete_async(self._store, name)
        return True

    def close(self) -> None:
        """See ``ObjectStore``."""

    async def _has(self, name: str) -> bool:
        with _translated_errors():
            try:
                await obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
        return True


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raises ``ObjectStoreError`` for errors of obstore."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise ObjectStoreError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Returns one line of an error of obstore: what S3 has answered, or that it has not."""
    text = str(error).split("\n\nDebug source:")[0]
    code = re.search(r"<Code>([^<]*)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    if code is not None:
        text = f"{code[1]}: {message[1]}" if message else code[1]
    return " ".join(text.split())[:_MAX_REASON]
