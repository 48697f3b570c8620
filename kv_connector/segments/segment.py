"""Shared-memory segments: one file per pool, mapped writable by its owner and read-only by everybody else.

    page 0          magic, version, slot size, epoch, layout digest, number and size of blocks, offset of the pool
    then            one slot per block, padded to a page
    pool offset     the pool: block i at `pool offset + i * block_bytes`
                    for a pool in device memory: the handle by which peers map it, after its length (uint32), one page

How slots are written and read: slots.py.

Invariant: the owner holds an exclusive `flock` on the file for its whole life, and the kernel drops it with the
process. So a segment whose lock can be had is dead, and whoever notices may unlink it. Segments are never truncated: a
mapping never faults. Peers therefore map those of their own user only, who has to be trusted in this.
"""

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kv_connector.geometry import Geometry
from kv_connector.header import Mismatch
from kv_connector.pool import Rows
from kv_connector.segments.slots import SLOT_BYTES, OwnedSlots, PeerSlots
from kv_connector.settings import SharedMemorySettings
from kvrelay.core.errors import ConfigurationError, KVError, KVRelayError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.source import KVSource

SEGMENT_VERSION = 1
MAX_HANDLE_BYTES = 4092  # a page with its length

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not a predictable file: created exclusively, below
_MAGIC = b"KVRELAY\0"
_DEVICE_MAGIC = b"KVRELAYD"
_HANDLE_LENGTH = struct.Struct("<I")
_PREAMBLE = struct.Struct("<8sIIQ16sQQQ")
_NAME = re.compile(r"kvrelay-[A-Za-z0-9._-]+-[0-9a-f]{16}\.kv")


def segment_directory(settings: SharedMemorySettings) -> Path:
    """Returns where segments are created: unless the settings say, in the system's shared memory, or in the temporary
    directory where there is none. Where there is neither, that is a directory that does not exist."""
    if settings.directory is not None:
        return Path(settings.directory)
    if _SHARED_MEMORY.is_dir():
        return _SHARED_MEMORY
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return _SHARED_MEMORY


def sweep(directory: Path) -> int:
    """Unlinks the segments of dead owners; returns how many there were."""
    swept = 0
    for path in directory.glob("kvrelay-*.kv"):
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):  # we may not open it, or it is gone already
            fd = _open(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file_at(fd, path):
                    path.unlink()
                    swept += 1
            finally:
                os.close(fd)
    return swept


@dataclass(frozen=True, slots=True)
class Preamble:
    """The content of page 0. `on_device`: the pool is not in the file but in device memory."""

    epoch: int
    geometry: Geometry
    num_blocks: int
    on_device: bool

    @property
    def pool_offset(self) -> int:
        return mmap.PAGESIZE + _page_aligned(self.num_blocks * SLOT_BYTES)

    @property
    def file_bytes(self) -> int:
        pool_bytes = self.num_blocks * self.geometry.block_bytes
        handle_bytes = _HANDLE_LENGTH.size + MAX_HANDLE_BYTES
        return self.pool_offset + _page_aligned(handle_bytes if self.on_device else pool_bytes)

    def encode(self) -> bytes:
        return _PREAMBLE.pack(
            _DEVICE_MAGIC if self.on_device else _MAGIC,
            SEGMENT_VERSION,
            SLOT_BYTES,
            self.epoch,
            self.geometry.layout_digest,
            self.num_blocks,
            self.geometry.block_bytes,
            self.pool_offset,
        )

    @classmethod
    def decode(cls, data: bytes, file_bytes: int) -> "Preamble":
        """Returns the preamble that was encoded. Raises KVError when this version cannot read such a segment."""
        if len(data) != _PREAMBLE.size:
            raise KVError("not a kvrelay segment: too short")
        magic, version, slot_bytes, epoch, digest, num_blocks, block_bytes, pool_offset = _PREAMBLE.unpack(data)
        preamble = cls(epoch, Geometry(digest, block_bytes), num_blocks, on_device=magic == _DEVICE_MAGIC)
        if magic not in (_MAGIC, _DEVICE_MAGIC) or (version, slot_bytes) != (SEGMENT_VERSION, SLOT_BYTES):
            raise KVError("not a kvrelay segment, or one of another version")
        if min(num_blocks, block_bytes) < 1 or (pool_offset, file_bytes) != (preamble.pool_offset, preamble.file_bytes):
            raise KVError("a kvrelay segment whose size does not match its description")
        return preamble


class SegmentRemovedError(KVRelayError):
    """Somebody has removed the file of a segment. Not a KVError: no peer will ever map this pool, until its node makes
    another one."""


class OwnedSegment:
    """A segment as its owner has it: created, locked, mapped writable."""

    def __init__(
        self,
        directory: Path,
        node_id: str,
        epoch: int,
        layout: KVLayout,
        num_blocks: int,
        *,
        device_handle: bytes | None = None,
    ) -> None:
        """Creates the file and reserves all of its space. `device_handle`: how peers map the pool, which is then not in
        the file. Raises ConfigurationError when there is not enough space."""
        on_device = device_handle is not None
        self.preamble = Preamble(epoch, Geometry.of(layout), num_blocks, on_device)
        self.path = directory / f"kvrelay-{re.sub(r'[^A-Za-z0-9._-]', '_', node_id)[:100] or '_'}-{epoch:016x}.kv"
        self._fd = _create_locked(self.path)
        try:
            _reserve(self._fd, self.path, self.preamble)
            os.pwrite(self._fd, self.preamble.encode(), 0)
            if device_handle is not None:
                assert len(device_handle) <= MAX_HANDLE_BYTES
                handle = _HANDLE_LENGTH.pack(len(device_handle)) + device_handle
                os.pwrite(self._fd, handle, self.preamble.pool_offset)
            self.mapping = mmap.mmap(self._fd, self.preamble.file_bytes)
        except BaseException:
            self._unlink()
            raise
        self.slots = OwnedSlots(self.mapping, num_blocks, offset=mmap.PAGESIZE)

    def check_present(self) -> None:
        """Raises SegmentRemovedError if the file has been removed, as systemd-logind does with the files of a user who
        has logged out (`RemoveIPC`)."""
        if os.fstat(self._fd).st_nlink == 0:
            raise SegmentRemovedError(f"{self.path}, from which peers copy KV, was removed")

    def close(self) -> None:
        """Unlinks the file and gives up the lock. The pool closes the mapping."""
        self.slots.release()
        self._unlink()

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._fd)


class PeerSegment:
    """A segment as peers see it, mapped read-only. Used by one thread. `rows`: the pool, `[num_blocks, block_bytes]`,
    none if it is in device memory. `device_handle`: how we map it there, empty if it is in the segment."""

    def __init__(self, directory: Path, name: str, *, on_device: bool = False) -> None:
        """Raises OSError when there is no such file or it is another user's, KVError when it is not a segment,
        `on_device` is wrong, or the handle is none."""
        if not _NAME.fullmatch(name):
            raise KVError(f"{name!r} does not name a kvrelay segment")
        self._fd = _open(directory / name)
        try:
            status = os.fstat(self._fd)
            if status.st_uid != os.geteuid():  # who could truncate it under us, or forge blocks
                raise PermissionError(errno.EPERM, "it belongs to another user", str(directory / name))
            file_bytes = status.st_size
            self.preamble = Preamble.decode(os.pread(self._fd, _PREAMBLE.size, 0), file_bytes)
            if self.preamble.on_device != on_device:
                raise KVError(f"the pool of {name!r} is {'' if self.preamble.on_device else 'not '}in device memory")
            self.device_handle = _read_handle(self._fd, self.preamble.pool_offset) if on_device else b""
            self._mapping: mmap.mmap | None = mmap.mmap(self._fd, file_bytes, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        num_blocks, block_bytes = self.preamble.num_blocks, self.preamble.geometry.block_bytes
        self.slots = PeerSlots(self._mapping, self.preamble.geometry, num_blocks, offset=mmap.PAGESIZE)
        num_rows = 0 if on_device else num_blocks
        pool = np.frombuffer(self._mapping, np.uint8, num_rows * block_bytes, self.preamble.pool_offset)
        self.rows: Rows = pool.reshape(num_rows, block_bytes)

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def owner_is_alive(self) -> bool:
        """Tells whether the owner has neither closed the segment nor died."""
        if os.fstat(self._fd).st_nlink == 0:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def mismatch(self, source: KVSource, geometry: Geometry) -> Mismatch | None:
        """Returns the reason to refuse all of its blocks, if there is one: another epoch, or another geometry."""
        return Mismatch.EPOCH if self.preamble.epoch != source.epoch else geometry.mismatch(self.preamble.geometry)

    def close(self) -> None:
        if self._mapping is None:
            return
        self.slots.release()
        self.rows = np.empty((0, 0), np.uint8)
        self._mapping.close()
        self._mapping = None
        os.close(self._fd)


def _page_aligned(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _read_handle(fd: int, offset: int) -> bytes:
    """Returns the handle of a pool in device memory. Raises KVError when it is not one."""
    (length,) = _HANDLE_LENGTH.unpack(os.pread(fd, _HANDLE_LENGTH.size, offset))
    if length > MAX_HANDLE_BYTES:
        raise KVError(f"a device handle of {length} bytes")
    return os.pread(fd, length, offset + _HANDLE_LENGTH.size)


def _open(path: Path) -> int:
    """Opens a regular file read-only, but no link and no pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _create_locked(path: Path) -> int:
    """Creates a file and locks it. A sweeper may unlink it between the two; then it is created again."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"cannot create the shared-memory segment {path}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _is_file_at(fd, path):
            return fd
        os.close(fd)


def _reserve(fd: int, path: Path, preamble: Preamble) -> None:
    """Reserves the whole space, so that running out of it is an error here and not a SIGBUS at the first access."""
    needed = preamble.file_bytes
    file_system = os.fstatvfs(fd)
    free = file_system.f_bavail * file_system.f_frsize
    if needed <= free:
        try:
            os.posix_fallocate(fd, 0, needed)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise ConfigurationError(
                    f"cannot reserve {_size(needed)} in {path.parent}: {error.strerror}"
                ) from error
    if preamble.on_device:
        need = f"headers of {preamble.num_blocks} KV blocks in device memory need"
    else:
        need = f"the KV pool of {preamble.num_blocks} blocks needs"
    others = ", of which another node has just taken some" if needed <= free else ""
    raise ConfigurationError(
        f"{need} {_size(needed)} of shared memory, but {path.parent} has {_size(free)} free{others}: "
        "use fewer blocks (--num-blocks), give the file system more space (docker: --shm-size), "
        "or set another directory (--shared-memory-dir)"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
