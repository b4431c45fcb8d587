"""Changes of block tables of any number, sent to the GPU in one copy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.ops.cuda.token_inputs import update_tables
from radixkv.runtime.device.pack import Ints
from radixkv.runtime.device.window_changes import TableChanges


def send_updates(tables: Tensor, changes: TableChanges[Ints], pages: Ints) -> None:
    """Enqueues a copy of the changes, and their application. O(changes).

    Args:
        tables: [batch slots, width] int32, on the GPU.
        changes: of different batch slots, at least one.
        pages: [n] int32: the new entries, to which ``update_firsts`` refers.
    """
    n_changes = len(changes.batch_slots)
    sent = to_device(np.concatenate([*changes, pages]), tables.device)
    columns: TableChanges[Tensor] = TableChanges(*sent[: len(changes) * n_changes].view(len(changes), n_changes))
    update_tables(tables, columns, sent[len(changes) * n_changes :])
