"""What a module imports, seen from a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection


def imported_by(module: str, names: Collection[str]) -> set[str]:
    """Returns which of the modules ``names`` are there after an import of ``module``."""
    code = f"import sys, {module}; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return set(names) & set(output.stdout.split())
