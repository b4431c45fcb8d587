"""``radixkv``'s command line for the server under chaos.

Its runtime is ``chaos.runtime``, its clock can be set, and it restarts the runtime as often as that dies.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from chaos.clock import make_clock_movable
from radixkv import cli
from radixkv.frontend import process
from radixkv.frontend.replicas import start
from radixkv.frontend.runtime_process import RuntimeProcess
from radixkv.frontend.supervisor import Supervisor

SETTLED_S = 0.5
"""Service after which the count of restarts begins anew; the delay between restarts is then never waited for."""


class ChaosRuntimeProcess(RuntimeProcess):
    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Any:
        return await super().start(*args, **kwargs, command=[sys.executable, "-m", "chaos.runtime"])


if __name__ == "__main__":
    make_clock_movable()
    start.RuntimeProcess = ChaosRuntimeProcess
    process.Supervisor = partial(Supervisor, settled_s=SETTLED_S)
    sys.exit(cli.main())
