"""The placement map, the decoder and the digest on a model with fused, padded and sharded layouts; no vLLM needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fused import Drafting, Fused  # noqa: E402

from deltawire.core.schema import Schema, TensorSpec  # noqa: E402
from deltawire.core.sparse import DeltaFile  # noqa: E402
from deltawire.engines.live.decode_pieces import ShardDecoder, Wanted  # noqa: E402
from deltawire.engines.live.layout import Layout, arrange  # noqa: E402
from deltawire.engines.live.placement import open_shard, trace, trace_draft  # noqa: E402
from deltawire.replica.shard import LiveShard, Piece  # noqa: E402
from support import Bag, random_bag  # noqa: E402


def as_tensors(bag: Bag) -> list[tuple[str, torch.Tensor]]:
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    return [
        (t.name, torch.from_numpy(bag.bits(t.name).view(np.uint8).copy()).view(dtypes[t.dtype]).reshape(t.shape))
        for t in bag.schema.tensors
    ]


class Ranks:
    """All ranks of a tensor-parallel model, each with its shard."""

    def __init__(
        self, world: int, open_shard: Callable[[Sequence[Piece]], LiveShard] = open_shard, **shape: int
    ) -> None:
        self.models = [Fused(rank=rank, world=world, **shape) for rank in range(world)]
        self.schema: Schema = self.models[0].schema()
        self.placements = [trace(model, model.load_weights, self.schema) for model in self.models]
        self.shards: list[LiveShard] = [open_shard(placement.pieces) for placement in self.placements]
        self.decoders = [ShardDecoder(shard) for shard in self.shards]
        self.layout: Layout = arrange(
            self.schema,
            [[piece.region for piece in shard.pieces] for shard in self.shards],
            [problem for placement in self.placements for problem in placement.problems],
        )

    def load(self, bag: Bag) -> None:
        for model in self.models:
            model.load_weights(as_tensors(bag))

    def bytes(self) -> list[dict[str, bytes]]:
        return [{n: p.view(torch.uint8).numpy().tobytes() for n, p in m.named_parameters()} for m in self.models]

    def digest(self) -> str:
        sums = [shard.digests(groups) for shard, groups in zip(self.shards, self.layout.groups, strict=True)]
        return str(self.layout.total(sums))

    def decode(self, blob: bytes) -> list:
        """Every rank's changes, with old weights borrowed where a tile is cut."""
        file = DeltaFile(lambda start, length: blob[start : start + length], len(blob), self.schema)
        result = []
        for decoder in self.decoders:
            try:
                result.append(decoder.delta(file))
            except Wanted as wanted:
                lent = {part: bits for other in self.decoders for part, bits in other.lend(wanted.regions)}
                result.append(decoder.delta(file, lent))
        return result


WORLDS = pytest.mark.parametrize("world", (1, 2, 4))


@WORLDS
def test_every_weight_is_found_once(world: int) -> None:
    ranks = Ranks(world)
    assert ranks.layout.problems == ()
    assert set(ranks.layout.holders.values()) >= {(rank,) for rank in range(world)}


@WORLDS
def test_tracing_writes_nothing(world: int) -> None:
    ranks = Ranks(world)
    ranks.load(random_bag(ranks.schema, 1))
    before = ranks.bytes()
    for model in ranks.models:
        trace(model, model.load_weights, ranks.schema)
    assert ranks.bytes() == before


@WORLDS
def test_the_digest_is_the_checkpoints(world: int) -> None:
    ranks = Ranks(world)
    bag = random_bag(ranks.schema, 2)
    ranks.load(bag)
    assert ranks.digest() == str(bag.digest())


def test_a_replicated_weight_that_differs_on_one_rank_is_seen() -> None:
    ranks = Ranks(2)
    ranks.load(random_bag(ranks.schema, 9))
    ranks.models[1].norm.data.view(torch.int16)[3] += 1
    with pytest.raises(Exception, match="different copies"):
        ranks.digest()


def test_what_is_not_a_plain_copy_is_a_problem() -> None:
    model = Fused()
    schema = model.schema()

    def refused(load: object) -> str:
        placement = trace(model, load, schema)  # type: ignore[arg-type]
        layout = arrange(schema, [[p.region for p in placement.pieces]], placement.problems)
        return " | ".join(layout.problems)

    def dropping(weights):  # type: ignore[no-untyped-def]
        model.load_weights((n, t) for n, t in weights if n != "norm.weight")

    def casting(weights):  # type: ignore[no-untyped-def]
        model.load_weights((n, t.float() if n == "norm.weight" else t) for n, t in weights)

    def scaling(weights):  # type: ignore[no-untyped-def]
        model.load_weights(weights)
        model.norm.data.mul_(2)

    def transposing(weights):  # type: ignore[no-untyped-def]
        for name, tensor in weights:
            model.out[0].data.copy_(tensor.t()) if name == "0.out.weight" else model.load_weights([(name, tensor)])

    assert "does not use 'norm.weight'" in refused(dropping)
    assert "computed" in refused(casting)
    assert "mul_" in refused(scaling)
    assert "not laid out in rows" in refused(transposing)


def test_a_run_in_another_dtype_is_a_problem() -> None:
    model = Fused(dtype=torch.float32)
    placement = trace(model, model.load_weights, model.schema())
    assert "wire_dtype" in placement.problems[0]


def test_what_both_models_hold_in_one_place_is_found_once() -> None:
    model = Fused()
    draft = Drafting(model)
    schema = draft.schema()
    both = trace_draft(draft, model, schema, trace(model, model.load_weights, schema))
    assert both is not None
    layout = arrange(schema, [[piece.region for piece in both.pieces]], both.problems)
    assert layout.problems == ()
    assert [piece.region.tensor.name for piece in both.pieces].count("embed.weight") == 1
    # the checkpoint has the embedding once more, and no model computes with that: it lies beside them
    assert [piece.region.tensor.name for piece in both.spare] == ["next.embed.weight"]
    bag = random_bag(schema, 5)
    shard = open_shard(both.pieces)
    for one in (draft, model):
        one.load_weights(as_tensors(bag))
    open_shard(both.spare).load(bag)
    assert str(layout.total([shard.digests(layout.groups[0])])) == str(bag.digest())


def test_a_draft_of_which_something_is_not_in_the_run_is_not_followed() -> None:
    model = Fused()
    draft = Drafting(model)
    schema = Schema.build([spec for spec in draft.schema().tensors if spec.name != "next.out.weight"])
    found = trace(model, model.load_weights, schema)
    assert trace_draft(draft, model, schema, found) is None
    draft.load_weights = lambda weights: 1 / 0  # type: ignore[method-assign]
    assert trace_draft(draft, model, draft.schema(), found) is None


def test_a_draft_with_a_checkpoint_of_its_own_is_given_its_own_tensors() -> None:
    model = Fused()
    draft = Drafting(model)
    own = {spec.name: TensorSpec(f"draft.{spec.name}", spec.dtype, spec.shape) for spec in draft.schema().tensors}
    schema = Schema.build([*model.schema().tensors, own["next.out.weight"]])
    found = trace(model, model.load_weights, schema)
    assert trace_draft(draft, model, schema, found) is None
    both = trace_draft(draft, model, schema, found, has_own=True)
    assert both is not None
    assert arrange(schema, [[piece.region for piece in both.pieces]], both.problems).problems == ()
    assert both.spare == ()
