"""`python -m calstack` is `calstack`."""

from __future__ import annotations

import sys

from calstack.cli import main

if __name__ == "__main__":
    sys.exit(main())
