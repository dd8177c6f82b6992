"""Models of transformers as `save_pretrained` writes them: the checkpoint's names and shapes, as views of live weights.

transformers 5 fuses weights when it loads a checkpoint (all experts of a layer are one tensor) and undoes that when it
saves. Engines read checkpoints, so the checkpoint's names are published. The conversion is found out with tensors
that have no data: nearly all of it is cutting, and a cut is a view of the live weight, so nothing is copied.

torch and transformers are only used where the caller already has, by way of the model it passed.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from .core import full
from .core.errors import SchemaMismatch

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a distributed tensor that are one tensor of the checkpoint."""

    whole: Any
    """The DTensor, or the pieces of a tensor, that they are part of."""
    row: int
    """The first of them, where that is seen as a matrix of its last dimension."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _TensorView:
    """A tensor of the checkpoint in a tensor of the model."""

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool
    """Whether it is the model's tensor itself."""


@dataclass(frozen=True, slots=True)
class _Conversion:
    """How a model's tensors become its checkpoint's."""

    layouts: dict[str, _Layout]
    """Layouts of the model's tensors, by their names in the model."""
    views: dict[str, _TensorView]
    """Tensors of the checkpoint, by their names there. Empty if one of them is not a view of a tensor of the model."""


_Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""

_conversions: WeakKeyDictionary[Any, _Conversion] = WeakKeyDictionary()


def is_pretrained(model: Any) -> bool:
    """Whether it is a model of transformers, without a wrapper."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def checkpoint_tensors(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a model under the names and in the shapes that `save_pretrained` would write.

    `tensors` are the model's, by its own names. What comes back shares their memory. Where a conversion is more than a
    cut, which few are, it is a copy. Part of a DTensor is a `Band`. Any other model than one of transformers has the
    names of its checkpoint already. Names that `save_pretrained` leaves out because they are tied to another one come
    last, so that it is the other one that is stored.
    """
    if not is_pretrained(model):
        return tensors
    ignored = set(model._keys_to_ignore_on_save or ())
    # transformers 5 says which tie each name has, transformers 4 only the names
    tied = set(getattr(model, "all_tied_weights_keys", model._tied_weights_keys) or ())
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    conversion = _conversion(model, tensors)
    if conversion is not None and conversion.views:
        views = sorted(conversion.views.items(), key=lambda item: item[1].source in tied)
        return {name: _cut(name, tensors[view.source], view) for name, view in views}
    tensors = dict(sorted(tensors.items(), key=lambda item: item[0] in tied))
    if conversion is None:
        return tensors
    if any(not hasattr(tensor, "as_strided") for tensor in tensors.values()):
        raise SchemaMismatch(
            f"weights of {type(model).__name__}'s checkpoint are computed from its own, of which several ranks hold "
            "slices: gather them, and publish the state dict that save_pretrained would write"
        )
    return _revert(model, tensors)


def kept_in_fp32(model: Any) -> re.Pattern[str] | None:
    """Matches the names of weights that transformers loads as fp32 whatever the dtype of the model."""
    if not is_pretrained(model) or not model._keep_in_fp32_modules_strict:
        return None
    return re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(model._keep_in_fp32_modules_strict)))})(?!\w)")


def pretrained_files(model: Any, dtype: str) -> dict[str, bytes]:
    """config.json and generation_config.json as `save_pretrained` would write them beside weights of a dtype."""
    with tempfile.TemporaryDirectory() as folder:
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        # fully_shard puts its own class before the model's
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)
        if model.can_generate():
            try:
                model.generation_config.save_pretrained(folder)
            except ValueError as error:
                # transformers refuses to write one that contradicts itself, and loads models without
                log.warning("generation_config.json does not travel: %s", error)
        return full.companion_files(Path(folder))


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a tokenizer or processor, its chat template among them."""
    if not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            f"tokenizer= takes a tokenizer or processor of transformers, not a {type(tokenizer).__name__}: "
            "load it with AutoTokenizer.from_pretrained, or give its folder as files="
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return full.companion_files(Path(folder))


def checkpoint_folder(model: Any) -> Path | None:
    """The folder that a model of transformers was loaded from, also one in the cache of the Hub. Nothing is fetched."""
    name = model.name_or_path if is_pretrained(model) else ""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _conversion(model: Any, tensors: Mapping[str, Any]) -> _Conversion | None:
    layouts = {name: (tuple(tensor.shape), tuple(tensor.stride())) for name, tensor in tensors.items()}
    known = _conversions.get(model)
    if known is None or known.layouts != layouts:
        try:
            from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
        except ImportError:  # transformers 4 has the checkpoint's names in its models
            return None
        known = _conversions[model] = _Conversion(layouts, _probe(model, layouts))
    return known


def _probe(model: Any, layouts: dict[str, _Layout]) -> dict[str, _TensorView]:
    """Let transformers convert tensors without data, and look which of them the results are part of."""
    import torch

    probes = {name: torch.empty_strided(*layout, device="meta") for name, layout in layouts.items()}
    homes = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    with _views_stay_views():
        converted = _revert(model, probes)
    views: dict[str, _TensorView] = {}
    for name, tensor in converted.items():
        source = homes.get(tensor.untyped_storage()._cdata)
        if source is None:
            return {}
        layout, offset = (tuple(tensor.shape), tuple(tensor.stride())), tensor.storage_offset()
        views[name] = _TensorView(source, *layout, offset, whole=(layout, offset) == (layouts[source], 0))
    return views


def _revert(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return revert_weight_conversion(model, tensors)  # type: ignore[no-any-return]
    except (RuntimeError, ValueError) as error:
        raise SchemaMismatch(
            f"transformers cannot give the weights of this {type(model).__name__} the names of its checkpoint: {error}"
            "; model.state_dict() can be published under the names it has"
        ) from error


def _views_stay_views() -> Any:
    """Make copies for the sake of contiguity views, on tensors without data."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    reshapes = (aten.view.default, aten._unsafe_view.default)

    class ViewsStayViews(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.clone.default:
                return aten.alias.default(args[0])
            if func in reshapes:
                try:
                    return aten.view.default(*args)
                except RuntimeError:
                    # what was left a view above would have been copied for this
                    return torch.empty(args[1], dtype=args[0].dtype, device="meta")
            return func(*args, **(kwargs or {}))

    return ViewsStayViews()  # type: ignore[no-untyped-call]


def _cut(name: str, tensor: Any, view: _TensorView) -> Any:
    if view.whole:
        return tensor
    if hasattr(tensor, "as_strided") and not hasattr(tensor, "to_local"):
        # the tensor may itself be part of something
        return tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)
    width = tensor.shape[-1]
    if view.offset % width or view.shape[-1:] != (width,) or not _in_one_piece(view):
        raise SchemaMismatch(f"{name!r} is not made of whole rows of {view.source!r}, which several ranks hold")
    return Band(tensor, view.offset // width, view.shape)


def _in_one_piece(view: _TensorView) -> bool:
    expected = 1
    for side, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if side != 1 and stride != expected:
            return False
        expected *= side
    return True
