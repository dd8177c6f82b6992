"""Adapters in a vLLM worker. Runs between two steps of the model, so nothing heavy is imported here.

vLLM reads the first version of an adapter. Beside that its own code is run on tiny tensors, each of which holds the
number of one of the adapter's: what comes out says which tensors every part of the result consists of, and what they
were multiplied by (`_Learned`). The second version is read both ways and compared, bit for bit. If they are equal,
later versions with the same tensors and config are copied from what the decoder's process has arranged; else vLLM goes
on to read them, and `read_by_engine` says why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

from ..live import Answer, LoadingAdapter

if TYPE_CHECKING:
    from ..live import Arrangement

TURN_S = 0.001
"""Seconds of copying to the device between two steps."""


def call(worker: Any, operation: str, id: int, name: str = "", folder: str = "", key: str = "") -> Answer:
    """Do a part of the way of an adapter on this rank (`LoadingAdapter.call`). The API server reaches this method
    through `collective_rpc("deltawire_adapter", …)`."""
    return LoadingAdapter.call(worker, lambda: _VLLMLoading(worker, id, name, folder, key), operation, id)


class _VLLMLoading(LoadingAdapter):
    """Reads an adapter beside the model; then registers it; then copies it in turns with steps of the model, none of
    which uses it yet."""

    def __init__(self, worker: Any, id: int, name: str, folder: str, key: str) -> None:
        from vllm.lora.request import LoRARequest

        super().__init__(worker.device)
        self._worker, self._manager = worker, worker.model_runner.lora_manager
        self._adapters = self._manager._adapter_manager
        self._request, self._folder, self._key = LoRARequest(name, id, folder), folder, key
        self._found: Any = None
        self._copies: deque[Callable[[], None]] = deque()
        self._slot: int | None = None

    def read(self) -> None:
        name = self._request.lora_name.rpartition("@")[0]
        # of each adapter: only one config at a time is served
        all_learned: dict[str, tuple[str, _Learned]] = self._worker.__dict__.setdefault("deltawire_learned", {})
        key, learned = all_learned.get(name, ("", None))
        if learned is None or key != self._key:
            self._found, learned = self._learn()
            all_learned[name] = self._key, learned
            self.read_by_engine = learned.refused or "the first version of its config"
        elif learned.refused or (bits := self.arranged(self._folder, learned.pinned)) is None:
            self._found = self._read_as_vllm_does(self._manager)
            self.read_by_engine = learned.refused or "it was not arranged"
        elif learned.proven:
            self._found = learned.model(self._request.lora_int_id, bits)
        else:
            self._found = self._read_as_vllm_does(self._manager)
            learned.compare(self._found, bits)
            self.read_by_engine = learned.refused or "the version that was read both ways"
        self.arrangement = None if learned.refused else learned.arrangement

    def _read_as_vllm_does(self, manager: Any) -> Any:
        found = manager._load_adapter(self._request)
        self._adapters._create_merged_loras_inplace(found)
        return found

    def _learn(self) -> tuple[Any, _Learned]:
        """Read the adapter, and beside it numbered tensors in the same way."""
        import torch

        manager, own, seen = copy(self._manager), self._manager._lora_model_cls, []

        class Noting(own):  # type: ignore[misc, valid-type]
            @classmethod
            def from_lora_tensors(cls, *args: Any, **given: Any) -> Any:
                seen.append((args, given))
                return own.from_lora_tensors(*args, **given)

        manager._lora_model_cls = Noting
        found, learned = self._read_as_vllm_does(manager), _Learned()
        try:
            [((), given)] = seen
            names, tensors = [*given["tensors"]], given["tensors"]
            tags = {name: torch.tensor([[n, 1.0]], dtype=torch.float64) for n, name in enumerate(names)}
            # vocabularies have other sizes
            changed = {"tensors": tags, "dtype": torch.float64, "model_vocab_size": None}
            tagged = own.from_lora_tensors(**{**given, **changed})
            self._adapters._create_merged_loras_inplace(tagged)
            learned.see({name: tuple(tensors[name].shape) for name in names}, tagged, found, given["dtype"])
            if learned.pinned:
                self.reserve(learned.size, self._adapters.capacity)
        except Exception as error:
            # vLLM was not made for such tensors: whatever it is, what vLLM itself has read can be served
            learned.refused = f"vLLM arranges it in another way than can be learned: {type(error).__name__}: {error}"
        return found, learned

    def put(self) -> bool:
        """Register the adapter, then copy for a moment. If requests for other adapters have taken the slot, nothing is
        left to do: vLLM copies the adapter again when a request needs it."""
        if self._found is not None:
            self._register(self._found)
            self._found = None
            return False
        end = time.perf_counter() + TURN_S
        while self._copies and self._place() == self._slot:
            self._copies.popleft()()
            if time.perf_counter() > end:
                return False
        self._copies.clear()
        return True

    def unload(self) -> None:
        self._worker.remove_lora(self._request.lora_int_id)

    def _register(self, found: Any) -> None:
        """Have vLLM add the adapter, less what was done already, and note what it copies instead of copying it."""
        # of both only the attributes are copied: lists of adapters and slots are those of the model
        manager, adapters = copy(self._manager), copy(self._adapters)
        manager._adapter_manager = adapters
        manager._load_adapter = lambda request: found
        adapters._create_merged_loras_inplace = lambda found: None
        adapters.modules = {name: _Noting(module, self._copies) for name, module in self._adapters.modules.items()}
        if not manager.add_adapter(self._request):
            raise RuntimeError("vLLM did not add it")
        self._slot = self._place()

    def _place(self) -> int | None:
        places, id = self._adapters.lora_index_to_id, self._request.lora_int_id
        return places.index(id) if id in places else None


class _Noting:
    """Stands for a layer while vLLM puts an adapter in place, and notes the copies that it should make."""

    def __init__(self, module: Any, copies: deque[Callable[[], None]]) -> None:
        self.set_lora = lambda *args: copies.append(partial(module.set_lora, *args))
        self.reset_lora = lambda *args: copies.append(partial(module.reset_lora, *args))


class _Learned:
    """How vLLM arranges versions of an adapter, and that done with what was arranged beforehand."""

    def __init__(self) -> None:
        self.refused = ""
        """Why vLLM has to read them itself."""
        self.proven = False
        """Whether a version was the same both ways."""
        self.pinned = False
        """Whether vLLM keeps it in pinned memory."""
        self.size = 0
        """Bytes of a version as it is arranged."""
        self.arrangement: Arrangement | None = None
        self._model: Any = None
        """What vLLM makes of an adapter, without tensors."""
        self._layers: dict[str, tuple[Any, _Numbers, _Numbers]] = {}
        """By name each layer, without tensors, and the parts that are its A and B."""
        self._views: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        """Shape, strides and begin of each part."""
        self._dtype: Any = None

    def see(self, tensors: dict[str, tuple[int, ...]], tagged: Any, found: Any, dtype: Any) -> None:
        """Learn it from what vLLM has made of numbered tensors, and of the real ones, of which the shapes are given."""
        from ..live import Arrangement

        if found.modules_to_save:
            raise ValueError(f"modules_to_save: {', '.join(found.modules_to_save)}")
        names, parts = [*tensors], list[list[tuple[str, float]]]()
        shapes: list[tuple[int, ...]] = []

        def number(tag: Any, real: Any) -> int:
            rows = tag.reshape(-1, 2).tolist()
            parts.append([(names[round(value / scale)], scale) for value, scale in rows])
            shapes.append(tuple(real.shape))
            self.pinned = self.pinned or bool(real.is_pinned())
            own = [tensors[name] for name, _ in parts[-1]]
            if shapes[-1] != (own[0] if tag.dim() == 2 else (len(own), *own[0])) or len({*own}) > 1:
                raise ValueError(f"{[name for name, _ in parts[-1]][:3]} become {list(real.shape)}")
            return len(parts) - 1

        for name, layer in found.loras.items():
            stripped, of_tags = copy(layer), tagged.loras[name]
            stripped.lora_a = stripped.lora_b = None
            self._layers[name] = (
                stripped,
                _each(number, of_tags.lora_a, layer.lora_a),
                _each(number, of_tags.lora_b, layer.lora_b),
            )
        self.arrangement = Arrangement(_DTYPES[str(dtype)], parts)
        starts, self.size = self.arrangement.places([prod(shape) for shape in shapes])
        self._views = [
            (shape, tuple(accumulate((1, *reversed(shape[1:])), mul))[::-1], start // dtype.itemsize)
            for shape, start in zip(shapes, starts, strict=True)
        ]
        self._model, self._dtype = copy(found), dtype
        self._model.loras = {}

    def model(self, id: int, bits: Any) -> Any:
        """Return what vLLM would make of a version, given its arranged bytes."""
        flat = bits.view(self._dtype)
        parts = [flat.as_strided(*view) for view in self._views]
        made = copy(self._model)
        made.id, made.loras = id, {}
        for name, (stripped, a, b) in self._layers.items():
            made.loras[name] = layer = copy(stripped)
            layer.lora_a, layer.lora_b = _each(parts.__getitem__, a), _each(parts.__getitem__, b)
        return made

    def compare(self, found: Any, bits: Any) -> None:
        """Prove what was learned: a version that vLLM has read must be the same, bit for bit."""
        import torch

        made = self.model(found.id, bits)
        for name, layer in found.loras.items():
            for half in ("lora_a", "lora_b"):
                for own, ours in zip(*(_listed(getattr(it, half)) for it in (layer, made.loras[name])), strict=True):
                    if own is not None and not torch.equal(*(t.contiguous().view(torch.uint8) for t in (own, ours))):
                        self.refused = f"{half} of {name} was arranged otherwise than by vLLM"
                        return
        self.proven = True


_Numbers = Any
"""Of a part, or of a list of which some may be None."""

_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


def _each(work: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Call it with a value, or with each of a list that is not None, and with those of other lists beside them."""
    if isinstance(first, list):
        return [None if values[0] is None else work(*values) for values in zip(first, *others, strict=True)]
    return work(first, *others)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
