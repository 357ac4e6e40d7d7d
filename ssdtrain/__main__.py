"""`python -m ssdtrain`, the same as the `ssdtrain` command."""

import sys

from ssdtrain.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
