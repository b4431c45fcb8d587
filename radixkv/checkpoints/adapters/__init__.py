"""Reading of LoRA adapters from folders that PEFT saved, without torch."""

from radixkv.checkpoints.adapters.folder import FILE_NAMES, AdapterFolder
from radixkv.checkpoints.adapters.pairs import LoraShape

__all__ = ["FILE_NAMES", "AdapterFolder", "LoraShape"]
