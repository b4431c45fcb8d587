"""What other engines have: taken as an alias, accepted because it asks for nothing, or refused with what to do."""

from radixkv.compat.refusals import Refusal, refusals
from radixkv.compat.settings import SettingNames, dtype_name, naming, renamed, takes_other_names
from radixkv.compat.table import ALIASES, ALWAYS_ON_FLAGS, Place

__all__ = [
    "ALIASES",
    "ALWAYS_ON_FLAGS",
    "Place",
    "Refusal",
    "SettingNames",
    "dtype_name",
    "naming",
    "refusals",
    "renamed",
    "takes_other_names",
]
