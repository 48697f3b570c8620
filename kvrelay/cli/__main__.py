"""`python -m kvrelay.cli` is `kvrelay`."""

from kvrelay.cli.main import main

main()
