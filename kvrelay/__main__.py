"""Makes `python -m kvrelay` the same command as `kvrelay`."""

from kvrelay.cli.main import main

main()
