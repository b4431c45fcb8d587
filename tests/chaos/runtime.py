"""The runtime of the server under chaos: its decoder breaks on some pairs of tokens, and its clock can be set."""

from __future__ import annotations

import sys

from chaos.clock import make_clock_movable
from radixkv.runtime.process import main
from support.breaking_runtime import BreakingDecoder

if __name__ == "__main__":
    make_clock_movable()
    BreakingDecoder().install()
    sys.exit(main())
