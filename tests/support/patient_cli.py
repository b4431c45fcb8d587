"""``radixkv``'s command line with timeouts too long for any test, so that none of them ends anything."""

from __future__ import annotations

import sys

from radixkv import cli
from radixkv.frontend import process

if __name__ == "__main__":
    process.DRAIN_TIMEOUT_S = process.RESPONSE_TIMEOUT_S = process.DEATH_NOTICE_PERIOD_S = 3600.0
    sys.exit(cli.main())
