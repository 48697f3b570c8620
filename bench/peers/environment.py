"""A virtual environment of one peer."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.base import PeerError
from bench.peers.processes import run


class Environment:
    """A virtual environment in `directory`, with a log of its installation. It remembers what was installed, so that a
    second run need not install anything."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "install.log"
        self._done = directory / "installed.json"

    @property
    def bin(self) -> Path:
        return self.directory / "venv" / "bin"

    @property
    def site_packages(self) -> Path:
        [found] = (self.directory / "venv" / "lib").glob("python*/site-packages")
        return found

    def is_installed(self, requirements: Sequence[str]) -> bool:
        return self._done.is_file() and json.loads(self._done.read_text()) == list(requirements)

    def install(self, requirements: Sequence[str], *, constraints: Sequence[str] = ()) -> None:
        """Installs packages, into a new environment if there is none. `finish` has to be called when whatever else
        belongs to the installation is done. Raises PeerError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.bin / "activate").exists():  # which venv writes last, after pip
            run([sys.executable, "-m", "venv", str(self.directory / "venv")], self.log)
        limits = self.directory / "constraints.txt"
        limits.write_text("\n".join(constraints) + "\n")
        try:
            self.pip("install", "--constraint", str(limits), *requirements)
        except PeerError as error:
            if any("+cpu" in requirement for requirement in requirements):
                raise PeerError(
                    f"{error}\nIf torch is what was not found: set PIP_EXTRA_INDEX_URL to the package index of builds "
                    "without CUDA, which pytorch.org names"
                ) from error
            raise

    def pip(self, *arguments: str) -> None:
        run([str(self.bin / "python"), "-m", "pip", *arguments], self.log)

    def finish(self, requirements: Sequence[str]) -> None:
        self._done.write_text(json.dumps(list(requirements)))

    def library(self, pattern: str) -> Path:
        """Returns the path of a shared library inside the environment. Raises PeerError when there is none."""
        found = sorted((self.directory / "venv").glob(f"lib/**/{pattern}"))
        if not found:
            raise PeerError(f"no {pattern} in {self.directory}/venv; remove the directory and install again")
        return found[0]
