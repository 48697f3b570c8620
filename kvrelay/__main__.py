"""`python -m kvrelay` is `kvrelay`."""

from kvrelay.cli.main import main

main()
