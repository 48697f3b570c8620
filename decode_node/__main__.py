"""`python -m decode_node MODEL`: one decode node."""

import sys

from decode_node.service import DecodeService
from kvrelay.node.process import main

if __name__ == "__main__":
    sys.exit(main("decode", DecodeService, sys.argv[1:]))
