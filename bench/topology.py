"""How many prefill and decode nodes a cluster has, written like 1P+1D."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    prefill_nodes: int
    decode_nodes: int

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Raises ValueError when `text` is no topology."""
        match = re.fullmatch(r"(\d+)P\+([1-9]\d*)D", text, re.IGNORECASE)
        if match is None:
            raise ValueError(
                f"{text!r} is no topology: write the prefill and the decode nodes like 1P+1D, or 0P+2D without "
                "prefill nodes; at least one decode node is needed"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.prefill_nodes}P+{self.decode_nodes}D"

    @property
    def arguments(self) -> list[str]:
        """Returns the arguments of `kvrelay serve` that start these nodes."""
        return ["--prefill-nodes", str(self.prefill_nodes), "--decode-nodes", str(self.decode_nodes)]
