"""``python -m radixkv``: the same as the command ``radixkv``."""

import sys

from radixkv.cli import main

sys.exit(main())
