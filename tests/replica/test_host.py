"""float32 weights that are a version: written wide, read narrow, proven bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deltawire as dw  # noqa: E402
from deltawire.core import full  # noqa: E402
from deltawire.core.change import compare, regions  # noqa: E402
from deltawire.core.errors import DigestMismatch, SchemaMismatch  # noqa: E402
from deltawire.core.scatter import scatter  # noqa: E402
from deltawire.models import ModelView  # noqa: E402
from deltawire.replica import host  # noqa: E402
from deltawire.replica.host import Copied, HostShard  # noqa: E402
from deltawire.replica.model import open_weights  # noqa: E402
from deltawire.replica.shard import PieceChange  # noqa: E402
from deltawire.store import Store  # noqa: E402
from support import specials  # noqa: E402

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16}


class Tiny(torch.nn.Module):
    """An embedding that may be tied to the head, a layer, and a norm."""

    def __init__(self, tied: bool = True, hidden: int = 8, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(24, hidden)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def nudge(model: torch.nn.Module, seed: int) -> None:
    """A training step: some weights move, by enough to be seen in bf16."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.rand(parameter.shape, generator=rng) < 0.1
            parameter.add_(moved * torch.randn(parameter.shape, generator=rng) * 0.1)


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def narrow_copy(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_the_digest_is_that_of_the_narrow_weights(dtype: str) -> None:
    model = Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(TORCH[dtype]).float())
    narrow = narrow_copy(model, TORCH[dtype])
    schema = ModelView(narrow).schema
    assert open_weights(model, schema).digest() == open_weights(narrow, schema).digest()


def test_every_bfloat16_survives_and_changes_can_be_undone() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = {"w": torch.from_numpy((every.astype(np.uint32) << 16).view(np.float32).copy())}
    narrow = {"w": every.copy()}
    schema = ModelView(narrow).schema
    target = open_weights(wide, schema)
    assert np.array_equal(target.shard.read(0).reshape(-1), every)
    new = np.roll(every, 7)
    region = next(regions(schema.tensors[0]))
    change = compare(region, every, new)
    target.shard.write([PieceChange(0, change)])
    assert np.array_equal(target.shard.read(0).reshape(-1), new)
    assert target.digest() == open_weights({"w": new}, schema).digest()
    target.shard.undo([PieceChange(0, change)])
    assert target.digest() == open_weights(narrow, schema).digest()


def test_every_float16_survives_but_signalling_nans_which_hardware_quiets() -> None:
    bits = specials("F16")
    is_nan = (bits & 0x7C00 == 0x7C00) & (bits & 0x3FF != 0)
    quiet = bits[~is_nan | (bits & 0x200 != 0)]
    narrow = {"w": quiet.view(np.float16)}
    schema = ModelView(narrow).schema
    target = open_weights({"w": torch.zeros(quiet.size)}, schema)
    target.shard.load(ModelView(narrow))
    assert np.array_equal(target.shard.read(0).reshape(-1), quiet)
    assert target.digest() == open_weights({"w": quiet.view(np.float16).copy()}, schema).digest()


def test_a_weight_between_two_bfloat16_is_no_version() -> None:
    model = rounded(Tiny())
    narrow = narrow_copy(model, torch.bfloat16)
    schema = ModelView(narrow).schema
    target = open_weights(model, schema)
    exact = target.digest()
    with torch.no_grad():
        # the upper half, which is the bfloat16, stays as it is
        model.norm.weight.view(torch.int32)[3] += 1
    number = [tensor.name for tensor in schema.tensors].index("norm.weight")
    assert np.array_equal(target.shard.read(number), open_weights(narrow, schema).shard.read(number))
    assert target.digest() != exact


def test_loading_overwrites_everything() -> None:
    model, other = Tiny(), Tiny()
    nudge(other, 1)
    narrow = {name: tensor.contiguous() for name, tensor in narrow_copy(other, torch.bfloat16).items()}
    schema = ModelView(narrow).schema
    target = open_weights(model, schema)
    target.shard.load(ModelView(narrow))
    assert target.digest() == open_weights(narrow, schema).digest()
    for name, tensor in narrow.items():
        assert torch.equal(model.state_dict()[name], tensor.float())


def test_a_tie_that_this_model_does_not_have_is_written_twice() -> None:
    tied, untied = Tiny(), Tiny(tied=False)
    nudge(tied, 3)
    schema = ModelView(tied, "bf16").schema
    assert schema.ties
    source = ModelView(tied, "bf16")
    target = open_weights(untied, schema)
    target.shard.load(source)
    assert torch.equal(untied.head.weight, tied.head.weight.bfloat16().float())
    proven = target.digest()
    with torch.no_grad():
        untied.head.weight[0, 0] = 0.5
    assert target.digest() != proven


def test_a_tie_that_the_run_does_not_have_is_refused_before_anything_is_written(store: Store) -> None:
    trained, served = Tiny(tied=False), Tiny()
    before = values(served)
    with dw.Publisher(store) as publisher:
        publisher.publish(trained).result(60)
        with pytest.raises(SchemaMismatch, match=r"ties 'embed\.weight' and 'head\.weight', which differ in the run"):
            dw.Replica(store, heartbeat=0).sync(served)
        assert all(torch.equal(values(served)[name], before[name]) for name in before)
        # a checkpoint may hold both where they are equal
        trained.head.weight.data.copy_(trained.embed.weight.data)
        publisher.publish(trained).result(60)
        assert dw.Replica(store, heartbeat=0).sync(served) == 1


def test_a_tie_that_breaks_in_the_run_rejects_the_delta(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of one memory are written by two threads, and each may read what the other one wrote."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(64, 32)).astype(np.float32)
    trained = {"embed": first.copy(), "head": first.copy()}
    memory = torch.zeros(64, 32)
    served = {"embed": memory, "head": memory}
    replica = dw.Replica(store, heartbeat=0)

    monkeypatch.setattr(host, "scatter_and_look", lambda *given: scatter(*given))
    with dw.Publisher(store, wire_dtype=None, anchor_ratio=1e9) as publisher:
        publisher.publish(trained).result(60)
        assert replica.sync(served) == 0
        trained["head"][3] += 1
        publisher.publish(trained).result(60)
        with pytest.raises(DigestMismatch):
            replica.sync(served)
    assert [step.kind for step, _ in replica.rejected] == ["delta"]
    assert replica.version == 0
    assert np.array_equal(memory.numpy(), first)


def test_what_can_be_taken_back_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {name: np.arange(8, dtype=np.float32) for name in "abc"}
    live = {name: array.copy() for name, array in old.items()}
    shard = open_weights(live, ModelView(old).schema).shard
    patch = [
        PieceChange(number, compare(piece.region, *(np.full(8, n, np.float32).view(np.uint32) for n in (1, 2))))
        for number, piece in enumerate(shard.pieces)
    ]
    shard.write(patch)
    put = HostShard.put

    def failing(self: HostShard, item: PieceChange) -> None:
        if item.piece == 0:
            raise RuntimeError("memory of 'a'")
        put(self, item)

    monkeypatch.setattr(HostShard, "put", failing)
    with pytest.raises(RuntimeError, match="memory of 'a'"):
        shard.undo(patch)
    assert {name: float(array[0]) for name, array in live.items()} == {"a": 2, "b": 1, "c": 1}


def test_another_model_is_refused_before_anything_is_written() -> None:
    model = Tiny()
    schema = ModelView(model, "bf16").schema
    with pytest.raises(SchemaMismatch, match="in the run but") as wrong:
        open_weights(model, ModelView(Tiny(hidden=4), "bf16").schema)
    assert "dtype" not in str(wrong.value), "advice about dtypes helps nobody whose shapes are wrong"
    with pytest.raises(SchemaMismatch, match="this model does not"):
        open_weights(model, ModelView(Tiny(layers=3), "bf16").schema)
    with pytest.raises(SchemaMismatch, match="does not carry"):
        open_weights(Tiny(layers=3), schema)
    with pytest.raises(SchemaMismatch, match="load the model in the run's dtype or a wider one"):
        open_weights(Tiny().bfloat16(), ModelView(Tiny()).schema)
    with pytest.raises(SchemaMismatch, match="wider one"):
        open_weights(Tiny().half(), schema)


def test_an_expanded_tensor_is_refused_by_name() -> None:
    tensor = torch.zeros(1, 3).expand(2, 3)
    with pytest.raises(SchemaMismatch, match="'w' is expanded"):
        open_weights({"w": tensor}, ModelView({"w": tensor.clone()}).schema)


def test_an_empty_tensor_is_not_expanded_whatever_its_strides() -> None:
    tensor = torch.empty_strided((3, 0), (0, 0))
    assert open_weights({"w": tensor}, ModelView({"w": tensor}).schema)


def test_all_names_that_differ_are_named() -> None:
    model = {f"model.layers.{i}.weight": torch.zeros(4) for i in range(5)} | {"norm": torch.zeros(3)}
    run = {f"layers.{i}.weight": torch.zeros(4) for i in range(5)} | {"norm": torch.zeros(4)}
    with pytest.raises(SchemaMismatch) as refused:
        open_weights(model, ModelView(run).schema)
    assert str(refused.value) == (
        "the run has 'layers.0.weight', 'layers.1.weight', 'layers.2.weight' and 2 more, this model does not; "
        "this model has 'model.layers.0.weight', 'model.layers.1.weight', 'model.layers.2.weight' and 2 more, which "
        "the run does not carry; 'norm': [4] in the run but [3] in this model: another model, or another "
        "configuration of it"
    )


def strided(model: torch.nn.Module) -> Any:
    """The same weights where they are not contiguous, so that they are read and written as copies."""
    tensors = {n: torch.zeros(*t.shape, 2)[..., 0] for n, t in model.state_dict().items() if n != "head.weight"}
    for name, tensor in tensors.items():
        tensor.copy_(model.state_dict()[name])
    return tensors


def test_weights_that_are_copied_are_copied_once_for_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = {"w": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()}
    schema = ModelView(narrow).schema
    digest = open_weights(narrow, schema).digest()
    monkeypatch.setattr(full, "_READ_UNITS", 64)
    for live in (narrow["w"].T.contiguous().T, narrow["w"].double()):
        target, reads = open_weights({"w": live}, schema), []
        read = Copied.read
        with monkeypatch.context() as counted:
            counted.setattr(Copied, "read", lambda *its, reads=reads, read=read: reads.append(1) or read(*its))
            assert target.digest() == digest
        assert len(reads) == 1
        assert not np.shares_memory(target.shard.read(0), live.view(torch.int16).numpy())


KINDS = {
    "module": lambda: Tiny(),
    "untied module": lambda: Tiny(tied=False),
    "state dict": lambda: Tiny().state_dict(),
    "fp64": lambda: Tiny().double(),
    "not contiguous": lambda: strided(Tiny()),
    "numpy": lambda: {n: t.numpy().copy() for n, t in Tiny().state_dict().items()},
}


def values(model: Any) -> dict[str, Any]:
    tensors = model if isinstance(model, dict) else model.state_dict()
    return {name: torch.as_tensor(tensor).double().clone() for name, tensor in tensors.items() if name != "head.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wider_model_follows_what_an_fp32_trainer_publishes(store: Store, kind: str) -> None:
    """The two snippets of README, with one kind of model."""
    trained, served = Tiny(), KINDS[kind]()
    nudge(trained, 9)
    replica = dw.Replica(store, heartbeat=0)
    with dw.Publisher(store) as publisher:
        for step in range(3):
            publisher.publish(trained).result(60)
            assert replica.sync(served) == step
            expected = {n: t.bfloat16().double() for n, t in trained.state_dict().items() if n != "head.weight"}
            found = values(served)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            nudge(trained, step)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_no_version_can_hold_are_repaired_by_full_ones(store: Store, kind: str) -> None:
    trained, served = Tiny(), KINDS[kind]()
    with dw.Publisher(store, anchor_every=1) as publisher:
        publisher.publish(trained).result(60)
        replica = dw.Replica(store, heartbeat=0)
        replica.sync(served)
        before = values(served)
        tensors = served if isinstance(served, dict) else served.state_dict()
        tensors["norm.weight"][3] += 1e-6
        nudge(trained, 1)
        publisher.publish(trained).result(60)
        replica.sync(served)
    assert any(not torch.equal(values(served)[name], before[name]) for name in before)
    assert torch.equal(values(served)["norm.weight"], trained.norm.weight.bfloat16().double())


def test_a_state_dict_and_its_module_are_the_same_model(store: Store) -> None:
    trained, served = Tiny(), rounded(Tiny())
    with dw.Publisher(store) as publisher:
        publisher.publish(trained).result(60)
        nudge(trained, 1)
        publisher.publish(torch.compile(trained, backend="eager").state_dict()).result(60)
    replica = dw.Replica(store, heartbeat=0)
    replica.sync(torch.compile(served, backend="eager").state_dict())
    assert torch.equal(served.head.weight, trained.head.weight.bfloat16().float()), "the module's own memory"
    assert dw.Replica(store, heartbeat=0).sync(served) == 1
