"""An adapter on its way into one rank of an engine. Runs between two steps of the model, so nothing heavy is imported
here, and what takes long is done in a thread, or a little between every two steps."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .channel import Answer
from .turns import short_turns

if TYPE_CHECKING:
    from .arrangement import Arrangement

FILE = "arranged"
"""Name of the file with the weights as ranks copy them, in the folder of a version."""

_AT_ONCE = 1 << 24
"""Bytes that are read at a time."""


class LoadingAdapter(threading.Thread, ABC):
    """Reads an adapter beside the model, then puts it in place. Each engine extends it, and answers the calls of its
    `Adapters` in every worker, between two steps:

        def adapter(worker, operation, id, name="", folder="", key=""):
            return LoadingAdapter.call(worker, lambda: MyLoading(worker, id, name, folder), operation, id)

    device    of the rank
    """

    read_by_engine = ""
    """Why the engine itself has read it, where this rank can also copy what was arranged for it."""
    arrangement: Arrangement | None = None
    """How later versions of the same key are to be arranged, where this rank has learned that."""

    def __init__(self, device: Any) -> None:
        super().__init__(name="deltawire-adapter", daemon=True)
        self._device = device
        self._error: Exception | None = None
        self._done = False

    @abstractmethod
    def read(self) -> None:
        """Read the adapter, in a thread, while the model computes."""

    @abstractmethod
    def put(self) -> bool:
        """Put what was read in place, or a part of it, between two steps; whether that was the last. Called again
        after False."""

    @abstractmethod
    def unload(self) -> None:
        """Drop it, whatever of it is there."""

    def arranged(self, folder: str, pin: bool) -> Any:
        """Return the bytes that were arranged for ranks, from which the device can copy; None if there are none. Python
        is free while they are read."""
        import torch

        try:
            file = FileIO(Path(folder) / FILE)
        except FileNotFoundError:
            return None
        with file:
            made = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8, pin_memory=pin)
            rest = made.numpy().data
            while rest:
                done = file.readinto(rest[:_AT_ONCE])
                if not done:
                    raise EOFError(f"{folder} is cut short")
                rest = rest[done:]
        return made

    @staticmethod
    def reserve(size: int, count: int) -> None:
        """Pin so many buffers for `arranged` and leave them to torch, which keeps them: pinning one for a later version
        would hold up the model for tens of milliseconds."""
        import torch

        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        del buffers

    def run(self) -> None:
        try:
            if self._device.type != "cpu":
                import torch

                # pinned memory belongs to the device of the thread that allocates it
                torch.accelerator.set_device_index(self._device)
            with short_turns():
                self.read()
        except Exception as error:
            self._error = error

    def proceed(self) -> bool:
        """Put a part of it in place; whether all is. Raises what reading it has raised."""
        self.join()
        if self._error is not None:
            raise self._error
        # some ranks are done before others
        self._done = self._done or self.put()
        return self._done

    def staged(self) -> Answer:
        """Whether it has been read, and what was learned."""
        if self.is_alive():
            return {"done": False}
        arrangement = msgspec.to_builtins(self.arrangement)
        return {"done": True, "read_by_engine": self.read_by_engine, "arrangement": arrangement}

    @staticmethod
    def call(rank: Any, begin: Callable[[], LoadingAdapter], operation: str, id: Any) -> Answer:
        """What all ranks do at the same step with the adapter `id`.

        stage     begin to read it, in a thread; whether it has been read
        load      put what was read in place, or a part of it; whether all is
        unload    drop it, whatever of it is there

        Errors are returned: every rank must learn of those of the others, and vLLM loses count of the answers if one
        raises. `rank` is the engine's object that keeps what is loaded.
        """
        loading: dict[Any, LoadingAdapter] = rank.__dict__.setdefault("deltawire_loading", {})
        try:
            if operation == "stage":
                if id not in loading:
                    loading[id] = begin()
                    loading[id].start()
                return loading[id].staged()
            if operation == "load":
                return {"done": loading[id].proceed()}
            if id in loading:
                loading[id].unload()
                del loading[id]
            return {}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
