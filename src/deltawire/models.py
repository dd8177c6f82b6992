"""Weights of numpy mappings, torch modules and state dicts, read as named bits.

torch is never imported here; it is used only where the caller has imported it, through the objects it passed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from .core import dtypes
from .core.change import Region
from .core.dtypes import Bits
from .core.errors import SchemaMismatch, UnsafeName, UnsupportedDtype, UnsupportedTensor
from .core.full import Source
from .core.schema import Schema, TensorSpec
from .huggingface import Band, checkpoint_tensors, is_pretrained, kept_in_fp32, pretrained_files

_TORCH_DTYPES = {f"torch.{dtype.plain}": dtype.name for dtype in dtypes.DTYPES.values()}
_WIRE_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
_FLOATS = {"BF16", "F16", "F32", "F64"}
_UNIT_NAMES = {1: "uint8", 2: "int16", 4: "int32"}
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile, FSDP and activation checkpointing put into names, anywhere."""
_PARALLEL = {
    "DataParallel",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
}
"""Wrappers that keep the model as `module`, a name that a model's own part may have as well."""

AUTO = "auto"
"""The wire dtype that is chosen: bf16 for the fp32 and fp64 weights of a torch module, everything else as it is."""


class Module(Protocol):
    """A torch module, or a view of one such as `adapter(model)`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its tensors by name, sharing its memory."""
        ...


Model: TypeAlias = "Module | Mapping[str, Any] | Source"
"""A torch module, a mapping of arrays or tensors by name, or weights read by region such as a checkpoint folder."""


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(model: Any) -> bool:
    return not isinstance(model, Mapping) and hasattr(model, "state_dict")


def is_state_dict(model: Any) -> bool:
    """Whether it comes from `state_dict()` of a torch module, which notes the modules' versions in it."""
    return isinstance(model, Mapping) and hasattr(model, "_metadata")


def is_peft(model: Any) -> bool:
    """A model that PEFT has wrapped: its weights have other names than the base checkpoint's, and an adapter beside."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def unwrapped(model: Any) -> Any:
    """The module inside what torch.compile, DDP and the like put around it."""
    return [*_layers(model)][-1]


def _layers(model: Any) -> Iterator[Any]:
    """A module, what it is wrapped around, and so on."""
    yield model
    while hasattr(model, "_orig_mod") or type(model).__name__ in _PARALLEL:
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        yield model


def fsdp1_root(model: Any) -> Any | None:
    """The outermost module of FSDP1, or what is around several of them; None for a model without."""
    if not is_fsdp1_imported() or not hasattr(model, "modules"):
        return None
    for module in _layers(model):
        if is_fsdp1(module):
            return module
    return module if any(map(is_fsdp1, module.modules())) else None


def is_fsdp1_imported() -> bool:
    return "torch.distributed.fsdp.fully_sharded_data_parallel" in sys.modules


def is_fsdp1(module: Any) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"


FLATTENED = (
    "sharded by FSDP1: several processes hold parts of its flattened weights. Publish the outermost "
    "FullyShardedDataParallel module on all ranks, without group=None; to sync it, sync a model that is whole and load "
    "its state dict"
)


def is_flattened(parameter: Any) -> bool:
    """Whether FSDP1 keeps a parameter's values in a flat one, or it is such a flat one."""
    return getattr(parameter, "_fsdp_flattened", False)


def is_zero3(model: Any) -> bool:
    """Whether DeepSpeed ZeRO 3 has cut a module's parameters into slices."""
    return "deepspeed" in sys.modules and any(hasattr(p, "ds_tensor") for p in getattr(model, "parameters", tuple)())


def is_partitioned(model: Any) -> bool:
    """Whether each of several processes holds a part of a module's parameters, as flat memory."""
    return is_module(model) and (is_zero3(model) or fsdp1_root(model) is not None)


def tensors_of(model: Any, held: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The named tensors of a module or mapping, tied ones included.

    Those of a module are named and cut as in its checkpoint, whatever it is wrapped in, and share its memory wherever
    that is possible; `live_tensors` are sure to. A state dict has the names of its module, without what wraps it; any
    other mapping its own. `held` is what a process holds of a partitioned module, by the names in its state dict.
    """
    if isinstance(model, Mapping):
        found = {_plain(name): tensor for name, tensor in model.items()} if is_state_dict(model) else dict(model)
        _check(found)
        if is_state_dict(model):
            # what DeepSpeed notes on a parameter is lost here
            _check_gathered(found, lambda: "deepspeed" in sys.modules)
        return found
    if not is_module(model):
        raise TypeError(f"cannot read weights from {type(model).__name__}: pass a module, a state dict or a mapping")
    whole, model = model, unwrapped(model)
    if is_peft(model):
        raise SchemaMismatch(
            f"{type(model).__name__} holds base weights and an adapter: pass adapter(model) or merged_weights(model), "
            "both from deltawire"
        )
    if held is None and is_fsdp1_imported() and any(map(is_flattened, getattr(whole, "parameters", tuple)())):
        if hasattr(whole, "named_modules"):
            raise UnsupportedTensor(f"{type(model).__name__} is {FLATTENED}")
        raise UnsupportedTensor(
            f"{type(model).__name__} is of a model sharded by FSDP1, whose flattened weights PEFT cannot name: shard "
            "it with torch.distributed.fsdp.fully_shard"
        )
    # state_dict of a module gives detached tensors that share the parameters' storage
    tensors = model.state_dict() if held is None else held
    named = {_plain(name): tensor for name, tensor in tensors.items()}
    _check(named)
    parameters = getattr(checkpoint_of(model), "parameters", tuple)
    _check_gathered(named, lambda: any(map(_is_placeholder, parameters())))
    return checkpoint_tensors(checkpoint_of(model), named)


def live_tensors(model: Any) -> dict[str, Any]:
    """The named tensors of a model as memory that can be written to.

    UnsupportedTensor where some are computed on every access (merged adapters, gathered shards, rearranged experts,
    a mapping that loads its values): what is written to such a copy is lost.
    """
    tensors = tensors_of(model)
    # the first ones are still held, so copies made now lie elsewhere
    again = tensors_of(model)
    for name, tensor in tensors.items():
        if isinstance(tensor, Band) or hasattr(tensor, "to_local"):
            raise UnsupportedTensor(
                f"{name[:80]!r} is spread over several processes and cannot be patched in place: sync a model that is "
                "whole, or check the version out and load that"
            )
        if name not in again or identity(again[name]) != identity(tensor):
            instead = "pass the tensors it is computed from, or check the version out and load that"
            raise UnsupportedTensor(
                f"{name[:80]!r} of this {type(unwrapped(model)).__name__} is a copy that is made whenever it is asked "
                f"for, so nothing written to it would stay: {getattr(model, 'to_follow', instead)}"
            )
    return tensors


def whereabouts(model: Any) -> dict[str, Any] | None:
    """Identity of the memory of a model's tensors, by name; None for what is neither a module nor a mapping."""
    if not isinstance(model, Mapping) and not is_module(model):
        return None
    return {name: identity(tensor) for name, tensor in tensors_of(model).items()}


def checkpoint_of(model: Any) -> Any:
    """The module whose checkpoint a model's tensors belong to: itself, unless it is a view of another."""
    model = unwrapped(model)
    return getattr(model, "checkpoint_of", model)


def class_name(model: Any) -> str:
    """Name of a module's class, without its wrappers; empty for a mapping."""
    # fully_shard puts its own class before the model's
    return type(checkpoint_of(model)).__name__.removeprefix("FSDP") if is_module(model) else ""


def files_of(model: Any, wire_dtype: str | None) -> dict[str, bytes]:
    """The files of a model of transformers whose weights are published in a wire dtype; none for other models."""
    owner = checkpoint_of(model)
    if not is_pretrained(owner):
        return {}
    dtype = owner.dtype
    widest = 2 if wire_dtype == AUTO else 1
    wire = "bfloat16" if wire_dtype == AUTO else _WIRE_DTYPES.get(wire_dtype or "")
    return pretrained_files(owner, wire if wire and dtype.itemsize > widest else str(dtype).removeprefix("torch."))


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True, slots=True)
class Known:
    """The result of reading a model's tensors. Does not reference the model."""

    where: Any
    """Its tensors, see `_memory_of`."""
    wire: str | None
    """The torch dtype that floating-point weights are cast to."""
    schema: Schema


class ModelView:
    """The weights of a model as bits, read a tensor at a time.

    view = dw.ModelView(model, "bf16")          # a Source
    str(dw.digest_of(view)) == published.digest
    """

    def __init__(
        self,
        model: Any,
        wire_dtype: str | None = None,
        *,
        known: Known | None = None,
        of: Any = None,
    ) -> None:
        """`known` is what an earlier view had: if these tensors lie where those did, their schema is not made again.
        `of` is the model that a mapping of tensors was taken from, which then decides about the wire dtype."""
        owner = model if of is None else of
        require_wire_dtype(wire_dtype)
        self._widest = 2 if wire_dtype == AUTO else 1
        """Bytes of the widest float that is not cast."""
        self._kept: re.Pattern[str] | None = None
        """Names of weights that are never cast."""
        if wire_dtype == AUTO:
            # a module has one dtype by habit; who passes a mapping of their own has chosen what is in it
            wire_dtype = "bf16" if is_module(owner) or is_state_dict(owner) else None
            self._kept = kept_in_fp32(checkpoint_of(owner))
        self._wire = _WIRE_DTYPES[wire_dtype] if wire_dtype else None
        tensors = tensors_of(model)
        where = _memory_of(tensors)
        if known is not None and (known.where, known.wire) == (where, self._wire):
            self.known: Known | None = known
            self.schema: Schema = known.schema
            self.tensors: dict[str, Any] = {name: tensors[name] for name in tensors if name not in known.schema.ties}
            return
        self.tensors = {}
        """The schema's tensors as the model has them, in its own dtypes."""
        ties: dict[str, str] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            memory = identity(tensor)
            first = seen.setdefault(memory, name) if memory is not None else name
            if first == name:
                self.tensors[name] = tensor
            else:
                ties[name] = first
        self.schema = Schema.build(
            (TensorSpec(name, self._dtype(name, t), tuple(t.shape)) for name, t in self.tensors.items()), ties
        )
        self.known = None if where is None else Known(where, self._wire, self.schema)

    def device(self) -> Any | None:
        """The accelerator that every tensor lies on in one piece; None where kernels cannot work on all of them."""
        tensors = list(self.tensors.values())
        if not tensors or not all(is_torch(t) and t.is_contiguous() for t in tensors):
            return None
        devices = {t.device for t in tensors}
        return devices.pop() if len(devices) == 1 and tensors[0].device.type == "cuda" else None

    def wire_dtype(self, name: str) -> Any:
        """The torch dtype that a torch tensor is published in."""
        tensor = self.tensors[name]
        return getattr(sys.modules["torch"], self._wire) if self._wire and self._casts(name, tensor) else tensor.dtype

    def bits(self, name: str) -> Bits:
        """Flat bits of a tensor: a view where the tensor is contiguous, on the CPU and already in the wire dtype."""
        tensor = self.tensors[name]
        if not is_torch(tensor):
            return dtypes.bits_of(np.asarray(tensor))
        return torch_bits(tensor.to(self.wire_dtype(name)))

    def region(self, region: Region) -> Bits:
        tensor = self.tensors[region.tensor.name]
        per = dtypes.lookup(region.tensor.dtype).units_per_element
        whole_elements = region.start % per == 0 and region.units % per == 0
        if is_torch(tensor) and tensor.is_contiguous() and region.contiguous and whole_elements:
            # cut before it is cast or leaves its device: a region is asked for, the tensor may be gigabytes
            flat = tensor.detach().reshape(-1)
            flat = flat[region.start // per : (region.start + region.units) // per]
            return torch_bits(flat.to(self.wire_dtype(region.tensor.name)))
        return region.cut(self.bits(region.tensor.name))

    def __iter__(self) -> Iterator[tuple[str, Bits]]:
        return ((tensor.name, self.bits(tensor.name)) for tensor in self.schema.tensors)

    def _casts(self, name: str, tensor: Any) -> bool:
        if not self._wire or not tensor.is_floating_point() or tensor.dtype.itemsize <= self._widest:
            return False
        return self._kept is None or self._kept.search(name) is None

    def _dtype(self, name: str, tensor: Any) -> str:
        if not is_torch(tensor):
            try:
                found = dtypes.of_numpy(np.asarray(tensor))
            except UnsupportedDtype as error:
                raise UnsupportedDtype(f"{name[:80]!r}: {error}") from None
            if self._widest == 1:
                check_wire_dtype(name, found, self._wire)
            return found
        dtype = f"torch.{self._wire}" if self._casts(name, tensor) else str(tensor.dtype)
        if dtype not in _TORCH_DTYPES:
            raise UnsupportedDtype(
                f"{name[:80]!r} is {dtype}, which cannot be published; known: {', '.join(sorted(_TORCH_DTYPES))}"
            )
        return _TORCH_DTYPES[dtype]


def require_wire_dtype(wire_dtype: str | None) -> None:
    """Raise UnsupportedDtype for what is no `wire_dtype=`."""
    if wire_dtype not in (None, AUTO, *_WIRE_DTYPES):
        names = ", ".join([AUTO, *sorted(_WIRE_DTYPES)])
        raise UnsupportedDtype(f"wire dtype {wire_dtype!r} is unknown; known: {names}, None (as they are)")


def check_wire_dtype(name: str, dtype: str, wire_dtype: str | None) -> None:
    """UnsupportedDtype for floats that are not torch tensors and would have to be cast."""
    wire = _WIRE_DTYPES.get(wire_dtype or "")
    if wire is not None and dtype in _FLOATS and dtype != _TORCH_DTYPES[f"torch.{wire}"]:
        raise UnsupportedDtype(
            f"{name[:80]!r} is {dtype}, and wire_dtype= casts torch tensors only: pass it as one, or leave out "
            "wire_dtype= to publish it as it is"
        )


def torch_bits(tensor: Any) -> Bits:
    """Flat bits of a torch tensor: a live view of it where it is contiguous and on the CPU, else a copy."""
    torch = sys.modules["torch"]
    dtype = dtypes.lookup(_TORCH_DTYPES[str(tensor.dtype)])
    if tensor.numel() == 0:
        # an empty tensor may have a stride of 0, which torch refuses to view in another width
        return np.empty(0, dtype.unit)
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    # a single element is contiguous whatever its stride, and torch views only strides of 1 in another width
    flat = flat.as_strided(flat.shape, (1,))
    # torch knows few unsigned dtypes: go through the signed one of the same width
    signed = flat.view(getattr(torch, _UNIT_NAMES[dtype.unit_size]))
    return signed.numpy().view(dtype.unit)  # type: ignore[no-any-return]


def dtype_of(tensor: Any) -> str:
    """The dtype of an array or tensor, by its name in the format."""
    return _TORCH_DTYPES[str(tensor.dtype)] if is_torch(tensor) else dtypes.of_numpy(np.asarray(tensor))


def torch_dtype(name: str) -> Any:
    """The torch dtype that has this name in the format."""
    return getattr(sys.modules["torch"], dtypes.lookup(name).plain)


def like(template: Any, bits: Bits) -> Any:
    """A new array or tensor with these bits and the shape and dtype of `template`."""
    if not is_torch(template):
        array = np.asarray(template)
        return bits.view(array.dtype).reshape(array.shape)
    torch = sys.modules["torch"]
    if bits.size == 0:
        return torch.empty_like(template)
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else np.uint8))
    return signed.view(template.dtype).reshape(template.shape).to(template.device)


def _check(tensors: Mapping[Any, Any]) -> None:
    """UnsafeName or UnsupportedTensor for what is not a named piece of memory."""
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UnsafeName(f"tensors are named by strings; this mapping has {name!r:.80}, a {type(name).__name__}")
        if name.rpartition(".")[2] == "_flat_param":
            why = "is several weights in one, flattened by FSDP1: publish the FullyShardedDataParallel module itself"
        elif is_torch(value):
            why = _unreadable(value)
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            continue
        else:
            why = f"is a {type(value).__name__}: pass a numpy array or a torch tensor, as numpy.asarray makes one"
        if why:
            raise UnsupportedTensor(f"{name[:80]!r} {why}")


def _unreadable(tensor: Any) -> str:
    """Why the memory of a torch tensor is not its values, and what to do; empty where it is."""
    if sys.modules["torch"].nn.parameter.is_lazy(tensor):
        return "is not initialized: run the model once on an example before"
    if tensor.is_meta:
        return (
            "is on the meta device and has no weights: load the checkpoint before; where accelerate keeps them in host "
            "memory or on disk (device_map, cpu_offload), load the model without"
        )
    if _is_placeholder(tensor):
        return f"is {_PLACEHOLDER}"
    if tensor.is_quantized:
        return "is quantized, its scales are not in its bits: pass dequantize(), or int_repr() and the scales by names"
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        return f"is {'nested' if tensor.is_nested else 'sparse'}, not one array: pass to_dense()"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazily conjugated or negated view: pass resolve_conj().resolve_neg()"
    return ""


_PLACEHOLDER = (
    "the placeholder of a weight whose values DeepSpeed ZeRO 3 keeps in parts on several ranks: publish the engine or "
    "its module on all ranks, without group=None; read anything else while all ranks are in "
    "deepspeed.zero.GatheredParameters(model.parameters())"
)


def _is_placeholder(parameter: Any) -> bool:
    """Whether a parameter is what DeepSpeed leaves of one while its values are elsewhere."""
    return hasattr(parameter, "ds_shape") and tuple(parameter.ds_shape) != tuple(parameter.shape)


def _check_gathered(tensors: Mapping[str, Any], partitioned: Callable[[], bool]) -> None:
    """UnsupportedTensor for a placeholder: an empty tensor, where the model's parameters are partitioned."""
    empty = next((name for name, tensor in tensors.items() if tuple(tensor.shape) == (0,)), None)
    if empty is not None and partitioned():
        raise UnsupportedTensor(f"{empty[:80]!r} is {_PLACEHOLDER}")


def _memory_of(tensors: Mapping[str, Any]) -> Any:
    """Equal as long as no tensor was replaced or moved. None where that cannot be known."""
    values, torch = list(tensors.values()), sys.modules.get("torch")
    if torch is None or not all(issubclass(kind, torch.Tensor) for kind in set(map(type, values))):
        identities = {name: identity(value) for name, value in tensors.items()}
        # what has no identity of its own may change its shape unseen
        return None if None in identities.values() else identities
    # a model has hundreds of tensors and this runs in every publish: whole lists take a third of the time
    kind = torch.Tensor
    if 0 in map(kind.numel, values):
        return None
    own = [[getattr(value, what) for value in values] for what in ("shape", "dtype", "device")]
    return [*tensors], [*map(kind.data_ptr, values)], [*map(kind.stride, values)], *own


def identity(tensor: Any) -> tuple[Any, ...] | None:
    """Equal for two names of one piece of memory. None for a value that shares no memory."""
    if is_torch(tensor):
        try:
            if tensor.numel() == 0:
                return None
            return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        except RuntimeError:
            # sparse, nested and the like: refused by name where their bits are asked for
            return None
    # a numpy scalar becomes an array only for the moment, and the next one may get the same address
    if not isinstance(tensor, np.ndarray) or tensor.size == 0:
        return None
    interface = tensor.__array_interface__
    return "numpy", interface["data"][0], tensor.shape, tensor.strides, tensor.dtype.str
