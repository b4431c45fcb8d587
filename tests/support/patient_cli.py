"""``radixkv``'s command line, with limits that no test waits for: what ends, ends for another reason."""

from __future__ import annotations

import sys

from radixkv import cli
from radixkv.frontend import process

if __name__ == "__main__":
    process.DRAIN_S = process.REPLIES_S = process.DEATH_NOTICE_S = 3600.0
    sys.exit(cli.main())
