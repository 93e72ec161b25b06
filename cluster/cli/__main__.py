"""``python -m kvferry.cluster.cli``."""

import sys

from kvferry.cluster.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
