"""A model's name becomes a folder of files: a folder as it is, a hub name downloaded, ``tiny`` in the package."""

from radixkv.checkpoints.resolve import Checkpoint, resolve, resolve_tokenizer

__all__ = ["Checkpoint", "resolve", "resolve_tokenizer"]
