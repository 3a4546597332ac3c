"""Every bench of this folder, one after the other: ``python -m tests.bench [NAME...]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    """Run the named benches (default: all) in a process of their own; 1 if one failed."""
    found = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}
    unknown = [name for name in sys.argv[1:] if name not in found]
    if unknown:
        print(f"There is no bench {', '.join(unknown)}; there are {', '.join(found)}.")
        return 2
    status = 0
    for name in sys.argv[1:] or found:
        print(f"== {name}", flush=True)
        status |= subprocess.run([sys.executable, str(found[name])], check=False).returncode != 0
    return status


if __name__ == "__main__":
    sys.exit(main())
