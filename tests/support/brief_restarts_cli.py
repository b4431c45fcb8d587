"""``radixkv``'s command line with one restart of the runtime, and a short notice of its death."""

from __future__ import annotations

import sys
from functools import partial

from radixkv import cli
from radixkv.frontend import process
from radixkv.frontend.supervisor import Supervisor

if __name__ == "__main__":
    process.Supervisor = partial(Supervisor, max_restarts=1)
    process.DEATH_NOTICE_PERIOD_S = 0.1
    sys.exit(cli.main())
