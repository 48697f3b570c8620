"""`python -m router MODEL`: one router."""

import sys

from router.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
