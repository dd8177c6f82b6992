"""What of a PEFT model to publish: its adapter alone, or the base weights with the adapter merged into them.

publisher.publish(adapter(model))     # a small run; a checkout of it is a folder that peft loads
publisher.publish(merged_weights(model))  # full weights under the base checkpoint's names, for servers without adapters

Both are views: make one once and publish it again and again, or make one for every publish.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ..core.errors import SchemaError, SchemaMismatch
from ..core.full import ADAPTER_CONFIG
from ..core.manifest import Base
from ..core.schema import listed
from ..models import AUTO, ModelView, is_peft, unwrapped
from .detectors import default_detector

log = logging.getLogger("deltawire")

BASE_DTYPES = (None, AUTO, "fp16")
"""Wire dtypes in which the digest of a base model is computed: as it is, and those it may have been loaded from."""

_fitting: WeakKeyDictionary[Any, set[Base]] = WeakKeyDictionary()
"""The bases of runs whose adapters were found to fit a PEFT model."""


def adapter(model: Any, name: str | None = None) -> Adapter:
    """Return the adapter of a PeftModel, by default the active one, as `model.save_pretrained` would write it.

        publisher.publish(dw.adapter(model))

    `replica.sync(adapter(model))` is the other direction: a run's adapter into a live model.
    """
    peft_model = _peft_model(model)
    active = [name] if name is not None else list(peft_model.active_adapters)
    if len(active) != 1 or active[0] not in peft_model.peft_config:
        known = ", ".join(map(repr, peft_model.peft_config))
        raise SchemaMismatch(f"a run carries one adapter, and this is {active}; adapter(model, name) takes {known}")
    return Adapter(peft_model, active[0])


def merged_weights(model: Any) -> Merged:
    """Return the base weights of a PeftModel with its active adapters merged, as `merge_and_unload` would leave them.

        publisher.publish(dw.merged_weights(model))

    The model itself stays as it is. Every publish makes a copy of the layers that an adapter touches, merges there as
    PEFT does, and frees it once what changed is known.
    """
    peft_model = _peft_model(model)
    if not hasattr(peft_model.base_model, "merge_and_unload"):
        kind = peft_model.peft_config[peft_model.active_adapters[0]].peft_type.value
        raise SchemaMismatch(f"a {kind} adapter cannot be merged into weights; publish adapter(model)")
    _require_no_ties(peft_model.get_base_model())
    return Merged(peft_model)


def _peft_model(model: Any) -> Any:
    found = unwrapped(model)
    if not is_peft(found):
        raise SchemaMismatch(
            f"{type(found).__name__} is no PeftModel, so there is no adapter to publish: pass it as is"
        )
    return found


def _require_no_ties(base: Any) -> None:
    """An adapter on one of two tied weights makes them two, where the base model's config says that they are one."""
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [name for group in names.values() if len(group) > 1 for name in group]
    for path, _ in _tuned(base):
        if any(name.startswith(f"{path}.") for name in tied):
            raise SchemaMismatch(
                f"{path!r} has an adapter and is tied to another weight: merging would untie them; "
                "load the base model with tie_word_embeddings=False, or publish adapter(model)"
            )


class _View:
    """Named tensors that are treated as those of a module: by default fp32 is published as bf16."""

    def __init__(self, peft_model: Any) -> None:
        self._model = peft_model

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def parameters(self) -> Iterator[Any]:
        return self._model.parameters()  # type: ignore[no-any-return]

    def modules(self) -> Iterator[Any]:
        return self._model.modules()  # type: ignore[no-any-return]


class Adapter(_View):
    """An adapter's tensors, live, under the names of PEFT's checkpoint."""

    def __init__(self, peft_model: Any, name: str) -> None:
        super().__init__(peft_model)
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        from peft import get_peft_model_state_dict

        # its own choice about embeddings asks the hub whether the vocabulary has grown, which a publish has no time for
        return get_peft_model_state_dict(  # type: ignore[no-any-return]
            self._model, adapter_name=self._name, save_embedding_layers=False
        )

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Files that make a checkout a folder which peft loads."""
        config = copy.copy(self._model.peft_config[self._name])
        # as PEFT does when it saves
        base = type(self._model.get_base_model())
        if config.task_type is None:
            config.auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
        config.inference_mode = True
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_bytes()}

    @property
    def base(self) -> BaseWeights:
        """The weights that the adapter is trained on."""
        return BaseWeights(self._model)

    def check_base(self, base: Base, run: str) -> None:
        """Raise SchemaMismatch if the adapters of a run are trained on another base model than this one is on.

        A base that fits is not read again for the same model. Where a digest is unknown, nothing is checked.
        """
        fitting = _fitting.setdefault(self._model, set())
        if not base.digests or base in fitting:
            return
        found: dict[str, str] = {}
        try:
            if any(hasattr(tensor, "to_local") for tensor in self.base.state_dict().values()):
                raise SchemaMismatch("it is spread over several processes")
            for wire in BASE_DTYPES:
                view = ModelView(self.base, wire)
                if view.schema.hash in found:
                    break
                found[view.schema.hash] = str(default_detector(view).digest_of(view))
        except SchemaError as error:
            log.info("not checked that the adapters in %s are for this base model: %s", run, error)
            return
        mine = Base(self._model.peft_config[self._name].base_model_name_or_path or "", tuple(found.values()))
        if base.same(mine):
            fitting.add(base)
            return
        raise SchemaMismatch(
            f"the run {run} has adapters of {base}, and this model's base is {mine}: load the base model that they are "
            "trained on"
        )


class _OfBase(_View):
    """Tensors under the names of the base model's checkpoint."""

    @property
    def checkpoint_of(self) -> Any:
        """The model whose checkpoint has these names."""
        return self._model.get_base_model()


class BaseWeights(_OfBase):
    """The base model's own tensors, live, under the names of its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Raises SchemaMismatch where the weights of the base model's checkpoint are not in memory."""
        base = self.checkpoint_of
        tensors: dict[str, Any] = base.state_dict(keep_vars=True)
        for path, layer in _tuned(base):
            for name in [name for name in tensors if name.startswith(f"{path}.")]:
                del tensors[name]
            for name, tensor in _base_layer(path, layer).state_dict(keep_vars=True).items():
                tensors[f"{path}.{name}"] = tensor
        # a matrix of a quantised model may also look like numbers of 16 bits
        if getattr(base, "is_quantized", False) or any(_is_quantised(tensor) for tensor in tensors.values()):
            raise SchemaMismatch("it is quantised")
        if trained := [name for name, tensor in tensors.items() if tensor.requires_grad]:
            raise SchemaMismatch(f"some of its own weights are trained: {listed(trained)}")
        return {name: tensor.detach() for name, tensor in tensors.items()}


class Merged(_OfBase):
    """The base model's tensors: live where no adapter touches them, else merged in a copy."""

    to_follow = (
        "merged_weights(model) is for publishing; sync the model that merge_and_unload() returns or one without an "
        "adapter, or follow a run of adapter(model)"
    )
    """What to give a replica instead."""

    def state_dict(self) -> dict[str, Any]:
        import torch

        base = self.checkpoint_of
        tensors: dict[str, Any] = base.state_dict()
        with torch.no_grad():
            for path, layer in _tuned(base):
                for name in [name for name in tensors if name.startswith(f"{path}.")]:
                    del tensors[name]
                for name, tensor in _merged_layer(layer).state_dict().items():
                    if not tensor.is_floating_point():
                        raise SchemaMismatch(f"{path} is quantised: what it is merged into is not a base weight")
                    tensors[f"{path}.{name}"] = tensor
        return tensors


def _tuned(base: Any) -> Iterator[tuple[str, Any]]:
    """The outermost modules that PEFT has put in place of the model's own, and where."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    within: str | None = None
    for path, module in base.named_modules():
        if within is not None and path.startswith(within):
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            within = f"{path}."
            yield path, module


def _base_layer(path: str, layer: Any) -> Any:
    """The model's own layer below what PEFT has put in its place."""
    if getattr(layer, "merged", False):
        raise SchemaMismatch(f"an adapter is merged into {path!r}; unmerge_adapter() takes it out again")
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module


def _is_quantised(tensor: Any) -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter) and not tensor.is_floating_point()


def _merged_layer(layer: Any) -> Any:
    """PEFT's own merge, done to a copy: every kind of adapter merges in its own way."""
    layer = copy.deepcopy(layer)
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    layer.merge()
    return layer.get_base_layer()
