"""`python -m prefill_node MODEL`: one prefill node."""

import sys

from kvrelay.node.process import main
from prefill_node.service import PrefillService

if __name__ == "__main__":
    sys.exit(main("prefill", PrefillService, sys.argv[1:]))
