"""Exchanges of GPU tensors over memory that the ranks of one host share, in place of NCCL's.

Every rank computes the same sums in the order of ranks, so that all have the same bits, whatever stands beside an
element: what NCCL's order of additions depends on is no part of it. Several ranks may share a GPU, which NCCL refuses.
It was not run on several GPUs.

When a rank is lost, the host raises a word that waiting launches poll: they end without a sum, and later ones do
nothing and touch no window. Windows of lost ranks stay mapped, and so remain memory, until no launch is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from runner_svc.cuda.module import DTYPE_DEFINES
from runner_svc.cuda.ranks.exchange_state import ExchangeState
from runner_svc.cuda.ranks.lost_watch import LostWatch
from runner_svc.cuda.ranks.one_shot import OneShot
from runner_svc.cuda.ranks.window_exchange import Window, close_all, exchange_windows
from runner_svc.interface.device import Device, SharedTensor
from runner_svc.interface.ranks import Communicator, RankLost, Shard

HALF_BYTES = 8 << 20
"""Most bytes of one launch."""


class PeerRanks:
    """A communicator of GPU tensors; implements `runner_svc.interface.ranks.PeerCommunicator`."""

    def __init__(
        self,
        ranks: Communicator,
        device: Device,
        import_memory: Callable[[int, int], Window],
        *,
        limit_s: float,
        half_bytes: int = HALF_BYTES,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        one_shot: Callable[[Shard, ExchangeState, int], OneShot] = OneShot,
    ) -> None:
        """`ranks` exchanges tensors of the host. `limit_s`: how long a launch waits at most.

        Raises ValueError for more ranks than kernels support.
        """
        self._ranks, self._device = ranks, device
        self._import, self._is_capturing = import_memory, is_capturing
        self._state = ExchangeState(device, limit_s)
        self._exchange = one_shot(ranks.shard, self._state, half_bytes)
        self._own: SharedTensor | None = None
        self._others: dict[int, Window] = {}
        self._is_open = self._records = False
        self._watch: LostWatch | None = None

    @property
    def shard(self) -> Shard:
        return self._ranks.shard

    def open(self) -> None:
        """Shares windows with the ranks of the group that has formed just now. Raises RankLost, SharedMemoryError."""
        self.close()
        own = self._device.share(self._exchange.window_bytes)
        own.tensor.zero_()
        self._device.synchronize()
        self._own = own
        self._others = exchange_windows(self._ranks, own, self._import)
        windows = {**self._others, self.shard.rank: own}
        self._state.begin([windows[rank].address for rank in range(self.shard.size)])
        self._device.synchronize()
        self._ranks.least(0)  # all windows are zeros before a flag is raised
        self._is_open = True
        self._watch = LostWatch(self._ranks.given_up, self._state.raise_abort)

    def close(self) -> None:
        """Gives the windows back, once no launch uses them. Launches under way end without sums."""
        self.abort()
        self._is_open = False
        self._device.synchronize()
        self._state.end()
        close_all(list(self._others.values()))
        self._others = {}
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def abort(self) -> None:
        """Ends the waiting of launches, now and until the windows are opened again. For any thread."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self._state.raise_abort()

    def given_up(self) -> str:
        """Returns why what was launched may have no right result; '' if nothing is known to be wrong."""
        if why := self._ranks.given_up():
            return why
        return "an exchange on the GPU ended without another rank" if self._is_open and self._state.has_failed else ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it is open, exchanges that are captured are recorded, and others are left out.

        So each rank captures its graphs by itself, and keeps them when others are replaced.
        """
        self._records = True
        try:
            yield
        finally:
            self._records = False

    # ------------------------------------------------------------------ exchanges

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and self._device.device.type != "cpu":
            return self._ranks.all_reduce(x)
        if self._exchanges():
            self._exchange.reduce(self._device.current_stream(), x, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and self._device.device.type != "cpu":
            return self._ranks.all_gather(x)
        out = torch.empty(len(x), self.shard.size * x.shape[1], dtype=x.dtype, device=x.device)
        self.gather_into(x, out)
        return out

    def gather_into(self, x: Tensor, out: Tensor) -> None:
        """Fills `out` [rows, width] with all ranks' x [rows, columns] side by side, cut to `width` columns."""
        if self._exchanges():
            self._exchange.gather(self._device.current_stream(), x, out)
            return
        columns = x.shape[1]
        for begin in range(0, out.shape[1], columns):
            out[:, begin : begin + columns] = x[:, : out.shape[1] - begin]

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._ranks.broadcast(x.cpu()))

    def least(self, value: int) -> int:
        return self._ranks.least(value)

    def compile(self, *dtypes: torch.dtype) -> None:
        """Compiles the kernels that sum these types."""
        self._exchange.compile(*(DTYPE_DEFINES[each] for each in dtypes))

    def _exchanges(self) -> bool:
        """Returns whether to launch. Raises RankLost once the group was given up."""
        if self._is_capturing():
            return self._records
        if self._records or not self._is_open:
            return False
        if why := self.given_up():
            raise RankLost(why)
        return True
