"""The memory that tensors hold at a time, for tests of what a computation needs at most."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations of this thread make, on any device, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most bytes that such tensors held at a time."""
        self._held = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note((args, kwargs), are_new=False)
        made = func(*args, **(kwargs or {}))
        self._note(made, are_new=True)
        self.peak = max(self.peak, self._held)
        return made

    def _note(self, tensors: Any, *, are_new: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self._sizes:
                self._sizes[address] = storage.nbytes() if are_new else 0
                self._held += self._sizes[address]
                weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self._held -= self._sizes.pop(address)
