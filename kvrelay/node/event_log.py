"""The log of the blocks that this node has gained, lost and refused, by sequence number, which watchers can replay.

Invariant: a watcher that applies the log to the blocks it knew at any sequence number gets the blocks that the node
holds now.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.node_report import RefusedBlock
from kvrelay.engine.step_result import EngineLoad


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    refused: tuple[RefusedBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class LogUpdate:
    """The changes since an earlier sequence number, up to `sequence`. `reset`: the watcher first has to forget what it
    knew, and is not told what was refused before."""

    sequence: int
    reset: bool
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    refused: tuple[RefusedBlock, ...]
    load: EngineLoad


class EventLog:
    """The last `capacity` changes; a watcher further behind gets every block held. Used on the node's loop."""

    def __init__(self, load: EngineLoad, *, capacity: int = 1024) -> None:
        self._entries: deque[_Entry] = deque(maxlen=capacity)
        self._held: set[BlockHash] = set()
        self._sequence = 0
        self._load = load
        self._news = asyncio.Event()  # never left set: it wakes those that wait at the moment
        self._version = 0
        self._touched = 0  # the version since which nothing has changed but blocks and load
        self.closed = False

    @property
    def load(self) -> EngineLoad:
        return self._load

    def append(self, stored: Sequence[BlockHash], removed: Sequence[BlockHash], load: EngineLoad) -> None:
        self._load = load
        if stored or removed:
            self._held.difference_update(removed)
            self._held.update(stored)
            self._add(_Entry(tuple(stored), tuple(removed)))
        self._version += 1
        self._wake_watchers()

    def append_refused(self, refused: RefusedBlock) -> None:
        self._add(_Entry(refused=(refused,)))
        self._version += 1
        self._wake_watchers()

    def touch(self) -> None:
        """Wakes the watchers because something else about the node has changed."""
        self._version += 1
        self._touched = self._version
        self._wake_watchers()

    def close(self) -> None:
        """Ends the waits of all watchers, for good."""
        self.closed = True
        self._wake_watchers()

    def _add(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._sequence += 1

    def _wake_watchers(self) -> None:
        self._news.set()
        self._news.clear()

    def since(self, sequence: int | None) -> LogUpdate:
        """Returns the changes after `sequence`, or every block held if that is None or not in the log any more."""
        behind = None if sequence is None else self._sequence - sequence
        if behind is None or not 0 <= behind <= len(self._entries):
            return LogUpdate(self._sequence, True, tuple(self._held), (), (), self._load)
        entries = list(self._entries)[len(self._entries) - behind :]
        stored: dict[BlockHash, None] = {}
        removed: dict[BlockHash, None] = {}
        for entry in entries:
            for name in entry.removed:
                stored.pop(name, None)
                removed[name] = None
            for name in entry.stored:
                removed.pop(name, None)
                stored[name] = None
        refused = tuple(chain.from_iterable(entry.refused for entry in entries))
        return LogUpdate(self._sequence, False, tuple(stored), tuple(removed), refused, self._load)

    async def changed(self, version: int) -> int:
        """Waits until anything, the load included, is newer than `version`, or the log is closed; returns the present
        version."""
        while self._version <= version and not self.closed:
            await self._news.wait()
        return self._version

    async def touched(self, version: int) -> None:
        """Waits until anything other than blocks and load is newer than `version`, or the log is closed."""
        while self._touched <= version and not self.closed:
            await self._news.wait()
