"""Resolution of a model's name (a folder, a hub name, or the embedded ``tiny``) to a folder of files."""

from radixkv.checkpoints.resolve import Checkpoint, resolve, resolve_tokenizer

__all__ = ["Checkpoint", "resolve", "resolve_tokenizer"]
