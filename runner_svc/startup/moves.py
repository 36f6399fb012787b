"""Sets up a runner's part in moves: what it serves, where it listens, and by which transports it reads."""

from __future__ import annotations

import hashlib
import socket
import time

import numpy as np
import structlog
import zmq
from numpy.typing import NDArray

from roster_common.endpoints import join_address, split_address
from roster_common.setting_sources import UnusableSettings
from runner_svc.interface.backend import Backend
from runner_svc.link.curve import CurveClient
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.tiers.block_copies import DeviceCache
from runner_svc.tiers.block_store import BlockStore, HostBlocks, MovableCache
from runner_svc.tiers.thread_copier import HostCache
from runner_svc.transfer.block_reader import BlockReader
from runner_svc.transfer.block_server import BlockServer
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.memory_frames import Layout
from runner_svc.transfer.memory_reader import MemoryReader, MemoryStore
from runner_svc.transfer.memory_server import MemoryServer
from runner_svc.transfer.mover import Mover
from runner_svc.transfer.nixl_agent import NixlAgent, NixlMissing, Staging, device_in
from runner_svc.transfer.nixl_reader import NixlReader
from runner_svc.transfer.nixl_source import NixlSource
from runner_svc.transfer.transport import Transport
from runner_svc.transfer.wire import CHUNK_BYTES

log = structlog.get_logger()

NIXL_PLACES = 12
"""Places for chunks that a source stages, and as many for those that a target reads: two pulls at once, and some that
were given up."""
_WILDCARDS = ("0.0.0.0", "::")


def make_mover(settings: RunnerSettings, backend: Backend, curve: CurveClient | None) -> Mover | None:
    """Returns what takes part in moves for `backend`; None if `move_listen` is off. Raises UnusableSettings."""
    if not settings.move_listen:
        return None
    store = _store_of(backend)
    memory_store = store if isinstance(store, MemoryStore) else None
    if settings.test_backend.move_chunk_ms:
        store = SlowBlocks(store, settings.test_backend.move_chunk_ms / 1000)
    grants = Grants(backend.num_blocks)
    keys = (curve.secret, curve.public) if curve is not None else None
    tcp = BlockReader(store, keys)
    nixl = _Nixl(settings, store, grants, tcp) if settings.move_transport == "nixl" else None
    host, port = split_address(settings.move_listen, "127.0.0.1:50065")
    bound = join_address("127.0.0.1" if host == "localhost" else host, port or "*")
    endpoint, secret = f"tcp://{bound}", curve.secret if curve is not None else b""
    try:
        if nixl is None:
            server = BlockServer(store, grants, endpoint, secret)
        else:
            server = BlockServer(store, grants, endpoint, secret, nixl.source.answer)
    except zmq.ZMQError as error:
        raise UnusableSettings(f"move_listen: {settings.move_listen!r} can't be listened at: {error}") from error
    transports: list[Transport] = [tcp] if nixl is None else [nixl.reader, tcp]
    is_shared = settings.move_transport == "auto"
    if memory_store is not None and is_shared:
        from runner_svc.cuda.memory.shared_memory import SharedMemory  # a CPU's runner has no driver

        transports.insert(0, MemoryReader(memory_store, SharedMemory.imported))
    mover = Mover(grants, transports, backend.num_blocks)
    mover.endpoint = _reachable(server.endpoint, host, settings.link)
    mover.public_key = curve.public.decode() if curve is not None else ""
    mover.format = kv_format(backend)
    memory = _memory_server(backend, grants) if is_shared else None
    mover.memory = memory.name if memory is not None else nixl.agent.name if nixl is not None else ""

    def close_sources() -> None:
        server.close()
        if memory is not None:
            memory.close()

    mover.close_source = close_sources
    return mover


class _Nixl:
    """A runner's part in moves by NIXL. Raises UnusableSettings."""

    def __init__(self, settings: RunnerSettings, store: BlockStore, grants: Grants, tcp: BlockReader) -> None:
        place_bytes = max(CHUNK_BYTES, store.block_bytes)
        try:
            self.agent = NixlAgent(device_in(settings.move_network or "127.0.0.0/8"))
            staged, read = (Staging(self.agent, place_bytes, NIXL_PLACES) for _ in range(2))
        except NixlMissing as error:
            raise UnusableSettings(str(error)) from error
        self.source = NixlSource(staged, store, grants)
        self.reader = NixlReader(self.agent, read, store, tcp)
        log.info("blocks move by NIXL, unencrypted", **self.agent.reached_by)


def _memory_server(backend: Backend, grants: Grants) -> MemoryServer | None:
    """Returns what offers a GPU's cache to processes of this host; None if it is not, or not all of it, in memory that
    can be shared: then its blocks move over TCP."""
    shared = getattr(backend, "shared_cache", None)
    if shared is None or not isinstance(backend, DeviceCache):
        return None
    try:
        layout = Layout.of(shared.size, shared.address, backend.cache_regions)
        return MemoryServer(layout, grants, shared.descriptor)
    except (ValueError, OSError) as error:
        log.info("the cache is not shared with processes of this host: blocks move over TCP", reason=str(error))
        return None


def _store_of(backend: Backend) -> BlockStore:
    if isinstance(backend, MovableCache):
        return backend.block_store()
    if not isinstance(backend, HostCache) or backend.device == "null":
        raise UnusableSettings(f"move_listen: the device {backend.device!r} has no blocks that can move; leave it out")
    return HostBlocks(backend.cache_regions, getattr(backend, "forget_drafts", _forget_nothing))


def _forget_nothing(blocks: NDArray[np.int32]) -> None:
    pass


def kv_format(backend: Backend) -> str:
    """Returns what the bytes of a block depend on besides model and weights: sizes and type, and scales if it has any.

    What a drafter keeps of the model's states is a part of a block, and of the format.
    """
    parts = [f"block {backend.block_size}"]
    if isinstance(backend, DeviceCache):
        parts += [f"{region.num_parts} x {region.piece_bytes} bytes" for region in backend.cache_regions]
    elif isinstance(backend, HostCache):
        parts += [f"{len(region)} x {region.shape[2]} bytes" for region in backend.cache_regions]
    cache = getattr(backend, "cache", None)
    if cache is not None:
        layers, _, _, _, heads, head_dim = cache.data.shape
        parts += [f"{layers} layers of {heads} heads of {head_dim} {str(cache.data.dtype).removeprefix('torch.')}"]
        if cache.scales is not None:
            scales = cache.scales.detach().cpu().contiguous().numpy().tobytes()
            parts += [f"scales {hashlib.blake2b(scales, digest_size=8).hexdigest()}"]
    return ", ".join(parts)


def _reachable(endpoint: str, host: str, link: str) -> str:
    """Returns the endpoint with an address that other runners can dial: for a wildcard, the one that faces the
    scheduler."""
    if host not in _WILDCARDS:
        return endpoint
    own = _facing(link)
    port = endpoint.rpartition(":")[2]
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"


def _facing(link: str) -> str:
    """Returns this machine's address on the way to the scheduler, without sending anything. Raises UnusableSettings."""
    host, _, port = link.removeprefix("tcp://").rpartition(";")[2].rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UnusableSettings(
            f"move_listen: which of this machine's addresses faces the scheduler at {link!r} can't be found ({error}): "
            "state the address instead of a wildcard"
        ) from error


class SlowBlocks:
    """A store whose reads and writes take a while, so that tests can end processes in mid-copy."""

    def __init__(self, store: BlockStore, chunk_s: float) -> None:
        self._store = store
        self._chunk_s = chunk_s
        self.block_bytes = store.block_bytes

    def read(self, blocks: NDArray[np.int32]) -> memoryview:
        """As `BlockStore.read`; half of the blocks are read after the pause."""
        half = len(blocks) // 2
        first = bytes(self._store.read(blocks[:half])) if half else b""
        time.sleep(self._chunk_s)
        return memoryview(first + bytes(self._store.read(blocks[half:])))

    def write(self, blocks: NDArray[np.int32], data: memoryview) -> None:
        """As `BlockStore.write`; half of the blocks are written after the pause."""
        half = len(blocks) // 2
        split = half * self.block_bytes
        if half:
            self._store.write(blocks[:half], data[:split])
        time.sleep(self._chunk_s)
        self._store.write(blocks[half:], data[split:])
