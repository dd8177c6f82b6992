"""What this process holds of a model: all of it here, or the parts of one rank in shards.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..bucket.references import OTHER_MODEL
from ..core import full
from ..core.change import Block, Region, whole
from ..core.digest import StateDigest
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.schema import Schema
from ..models import Known, ModelView, check_wire_dtype
from ..views.blocks import Blocks
from ..views.host import BlockView, is_view
from .adapters import BASE_DTYPES, Adapter
from .collective import Group, Ranks
from .detectors import Detector, HostDetector, default_detector
from .pairs import OneByOne


class LocalModel:
    """The part of a model that this process holds. This class is for all of it; `Shards` for a part."""

    def __init__(self, url: str, wire_dtype: str | None, view: str | None, detector: Detector | None) -> None:
        """`url` is that of the run. Without a `view` the weights themselves are published."""
        self._url, self._wire_dtype, self.view, self._detector = url, wire_dtype, view, detector
        self._known: Known | None = None
        """About the model published last, which is usually the next one too."""
        self._schema: Schema | None = None
        """Of the weights that this process writes, once they were opened."""
        self._bound = False
        self._blocks: Blocks | None = None
        """Of the view, once the model is known."""

    def sharded(self) -> LocalModel:
        """The same where each rank holds parts of a model."""
        from .shards import Shards

        return Shards(self._url, self._wire_dtype, self.view, self._detector)

    @property
    def regions(self) -> Sequence[Region]:
        """The regions that this process writes."""
        return [whole(tensor) for tensor in self._schema.tensors] if self._schema else []

    def open(self, model: Any, group: Group) -> tuple[Schema, Source]:
        """Agree on what each rank writes. Returns the checkpoint's schema and the weights that this one writes."""
        self._schema = None
        # a rank may hold nothing, and would not notice what is wrong
        source = group.each(lambda: self.source(model))
        self._schema = source.schema
        return source.schema, source

    def source(self, model: Any) -> Source:
        """The present weights that this process writes. SchemaMismatch if they are others than those opened."""
        if isinstance(model, full.Checkpoint):
            full.check_links(model.folder)
            for tensor in model.schema.tensors:
                check_wire_dtype(tensor.name, tensor.dtype, self._wire_dtype)
        if hasattr(model, "schema") and hasattr(model, "region"):
            source: Source = model
        else:
            view = ModelView(model, self._wire_dtype, known=self._known)
            self._known, source = view.known, view
        holds_nothing = isinstance(source, OneByOne) and not source.schema.tensors
        if self.view is not None and not is_view(source) and not holds_nothing:
            if self._blocks is None or self._blocks.source != source.schema:
                self._blocks = Blocks(source.schema, self.view)
            source = self._viewed(source, self._blocks)
        if self._schema is not None:
            self._schema.require_equal(
                source.schema, ours=f"the run {self._url}", theirs="this model", advice=OTHER_MODEL
            )
        return source

    def one_by_one(self, schema: Schema | None, held: Detector | None, *, keeps: bool) -> OneByOne:
        """A source that takes weights one by one. `schema` is that of the run, and `held` has the weights captured
        last, where there are any."""
        if self.view is not None:
            # both are those of the view
            return OneByOne(self._wire_dtype, self._blocks.source if self._blocks else None, keeps=keeps)
        base = held.state if isinstance(held, HostDetector) else None
        return OneByOne(self._wire_dtype, schema, base, keeps=keeps)

    def base_digests(self, model: Any, name: str, group: Group) -> tuple[str, ...]:
        """State digests of the base model of an adapter, which is called `name`: as it is in memory and, if that is
        wider, in the dtypes of 16 bits that it may have been loaded from.

        All ranks call it. Raises SchemaMismatch where the weights are not here.
        """
        if not isinstance(model, Adapter):
            if not name:
                raise SchemaMismatch("adapter_config.json names no base model (base_model_name_or_path)")
            if not Path(name).is_dir():
                raise SchemaMismatch("it is not a folder here")
            return (str(full.digest_of(full.Checkpoint(name))),)
        if not isinstance(group, Ranks) and any(
            hasattr(tensor, "to_local") for tensor in model.base.state_dict().values()
        ):
            raise SchemaMismatch("it is spread over several processes, and one alone publishes")
        found: dict[str, str] = {}
        for wire in BASE_DTYPES:
            local = type(self)(self._url, wire, None, None)
            schema, source = local.open(model.base, group)
            if schema.hash in found:
                break
            parts = group.together(partial(local.digest, source, default_detector(source)))
            found[schema.hash] = str(sum(parts, StateDigest()))
        return tuple(found.values())

    def detector(self, source: Source) -> Detector:
        """A detector that is bound to these weights."""
        given = self._detector
        if given is None:
            detector = default_detector(source)
            detector.bind(source)
            return detector
        if isinstance(source, OneByOne) and not given.in_host_memory:
            raise SchemaMismatch(
                f"{type(given).__name__} compares a live model; weights that come one by one are compared with a copy "
                "in host memory: leave out detector="
            )
        if not self._bound:
            given.bind(source)
            self._bound = True
        if not given.suits(source):
            raise SchemaMismatch(
                f"{type(given).__name__} was made for other tensors than those of this model; "
                "pass the same model to every publish, or a new detector to a new Publisher"
            )
        return given

    def is_elsewhere(self, source: Source) -> bool:
        """Whether these weights are compared where they are, and not in host memory."""
        return not (self._detector or default_detector(source)).in_host_memory

    def _viewed(self, source: Source, blocks: Blocks, *parts: Any) -> Source:
        """The view of these weights: computed where they are compared."""
        given = self._detector
        compared_in_torch = given is not None and not given.in_host_memory
        if isinstance(source, ModelView) and source.tensors and (compared_in_torch or source.device() is not None):
            from ..views.device import BlockModel

            return BlockModel(source, blocks, *parts)
        return BlockView(source, blocks, *parts)

    def plan(self, detector: Detector) -> list[Block] | None:
        """Where the regions of a detector's plan are in the checkpoint; None if they are the same."""
        return None

    def digest(self, source: Source, detector: Detector) -> StateDigest:
        """State digest of these weights, or their share in that of the model."""
        return detector.digest_of(source)
