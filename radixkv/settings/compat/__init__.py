"""What other engines have: taken as an alias, accepted because it asks for nothing, or refused with what to do."""

from radixkv.settings.compat.refusals import Refusal, refusals
from radixkv.settings.compat.setting_names import (
    SettingNames,
    naming,
    renamed,
    takes_other_names,
)
from radixkv.settings.compat.table import ALIASES, ALWAYS_ON_FLAGS, UNITS, Place

__all__ = [
    "ALIASES",
    "ALWAYS_ON_FLAGS",
    "UNITS",
    "Place",
    "Refusal",
    "SettingNames",
    "naming",
    "refusals",
    "renamed",
    "takes_other_names",
]
