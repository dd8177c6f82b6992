"""Layouts that post-load hooks make, learned by running them on copies; hooks that compute are refused by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fused import Fused, Hook  # noqa: E402
from test_follower import World, loop  # noqa: E402
from test_placement import as_tensors  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from deltawire.core.schema import Schema, TensorSpec  # noqa: E402
from deltawire.engines.live import decode_pieces, learn, rank  # noqa: E402
from deltawire.engines.live.learn import Layer, Learned  # noqa: E402
from deltawire.engines.live.node import WorkerError  # noqa: E402
from deltawire.engines.live.placement import open_shard, trace  # noqa: E402
from deltawire.replica import device  # noqa: E402
from deltawire.replica.host import Placed  # noqa: E402
from deltawire.store import ObjectStore  # noqa: E402
from support import random_bag  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_programs")

__all__ = ["loop"]


def each(change: Callable[[Tensor], Tensor]) -> Hook:
    """A hook that puts something else in the place of each parameter."""

    def hook(module: nn.Module) -> None:
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None:
                module._parameters[name] = nn.Parameter(change(parameter.data), requires_grad=False)

    return hook


def swap(w: Tensor) -> Tensor:
    return torch.cat([w[w.shape[0] // 2 :], w[: w.shape[0] // 2]])


def tiles(w: Tensor) -> Tensor:
    """Tiles of 16 rows, column by column: as a CPU kernel packs."""
    return w.reshape(-1, 16, w.shape[1]).transpose(1, 2).contiguous().view(w.shape)


def pairs(w: Tensor) -> Tensor:
    """Tiles of 16 rows, pairs of columns together: as AMX takes them."""
    return w.reshape(-1, 16, w.shape[1] // 2, 2).transpose(1, 2).contiguous().view(w.shape)


def padded(w: Tensor) -> Tensor:
    """Rows to a multiple of 128, in another order, and columns to one of 128."""
    out = torch.zeros(-(-w.shape[0] // 128) * 128, -(-w.shape[1] // 128) * 128, dtype=w.dtype)
    out[: w.shape[0], : w.shape[1]] = w
    return out[torch.arange(out.shape[0]).reshape(-1, 2).t().reshape(-1)]


def transposed(w: Tensor) -> Tensor:
    return w.t()


def ones_around(w: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(w[:1]), w, torch.ones_like(w[:1])])


def in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.copy_(swap(parameter.data))


MOVES = [each(swap), each(tiles), each(pairs), each(padded), each(transposed), each(ones_around), in_place]


def located(hook: Hook, dtype: torch.dtype = torch.bfloat16, **sizes: int):  # type: ignore[no-untyped-def]
    """A model after its hook, its pieces, and why some are not found."""
    model = Fused(dtype=dtype, **sizes)
    layers = model.hooked(hook)
    bag = random_bag(model.schema(), 3)
    model.load(as_tensors(bag), hook)
    learned = Learned(layers)
    placement = trace(model, model.load_weights, model.schema(), learned.standing())
    return bag, *learned.compose(placement.pieces)


@pytest.mark.parametrize("hook", MOVES)
@pytest.mark.parametrize("ffn", (192, 224))
def test_weights_are_found_where_a_hook_moved_them(hook: Hook, ffn: int) -> None:
    bag, pieces, problems = located(hook, ffn=ffn)
    assert problems == []
    shard = open_shard(pieces)
    for number, piece in enumerate(pieces):
        expected = piece.region.matrix(bag.bits(piece.region.tensor.name))
        assert np.array_equal(shard.read(number), expected), piece.region.tensor.name
        corner = (slice(1, 3), slice(2, 5))
        assert np.array_equal(shard.read(number, corner), expected[corner]) or piece.region.rows == 1


def test_writes_to_a_kernels_layout_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, _ = located(each(tiles))
    # plain rows of the same width come first
    pieces = sorted(found, key=lambda piece: piece.places is not None)
    assert pieces[0].places is None
    written, real = [], Placed.write
    monkeypatch.setattr(decode_pieces, "compile_decoders", lambda: None)
    monkeypatch.setattr(Placed, "write", lambda *given: written.append(1) or real(*given))
    decode_pieces.warm_up(open_shard(pieces), (0,) * len(pieces))
    assert len(written) == 1


def test_rows_that_stay_rows_are_plain_views() -> None:
    """Swapped halves of gate and up are two plain pieces, which a device patches as it patches all others."""

    def placed(hook: Hook) -> set[str]:
        _, pieces, _ = located(hook)
        return {piece.region.tensor.name.split(".")[1] for piece in pieces if piece.places is not None}

    assert placed(each(swap)) == {"down"}
    assert placed(each(tiles)) == {"gate", "up", "down"}


def test_a_device_refuses_many_weights_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pieces, _ = located(each(tiles))
    monkeypatch.setattr(device, "SHADOW_UNITS", 1000)
    with pytest.raises(ValueError, match=r"a kernel keeps '0\.down\.weight' in tiles"):
        device.DeviceShard(pieces)


def test_a_hook_that_leaves_weights_alone_is_not_run_on_copies() -> None:
    runs = []
    model = Fused()
    learned = Learned(model.hooked(lambda module: runs.append(module)))
    assert learned.standing() == []
    assert len(runs) == 2


class OfLoader(nn.Parameter):
    """A parameter that a model's loader fills by a method of its class, as those of vLLM's linear layers."""


def of_loader(parameter: nn.Parameter) -> nn.Parameter:
    return OfLoader(parameter.data, requires_grad=False)


def with_loader(parameter: nn.Parameter) -> nn.Parameter:
    parameter.weight_loader = print  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize("kind", (of_loader, with_loader))
def test_loaders_are_traced_with_the_parameters_that_they_need(kind: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """vLLM's hooks for block-fp8 put a plain parameter with the same memory in the place of theirs."""
    model = Fused()
    for module in (model.gate_up, model.down):
        for name, parameter in [*module._parameters.items()]:
            module._parameters[name] = kind(parameter)
    layers = model.hooked(each(lambda w: w))
    stood = {(id(s.module), s.name): s.tensor for s in Learned(layers).standing()}
    live = {(id(layer.module), n): p for layer in layers for n, p in layer.module._parameters.items()}
    assert stood.keys() == live.keys()
    assert all(type(stood[key]) is type(live[key]) and vars(stood[key]) == vars(live[key]) for key in live)


def test_hooks_run_on_the_device_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    outside = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append(device)
        try:
            yield
        finally:
            entered.pop()

    def hook(module: nn.Module) -> None:
        if entered != [torch.device("cpu")]:
            outside.append(module)
        each(swap)(module)

    monkeypatch.setattr(learn, "on_device", noted)
    learned = Learned((model := Fused()).hooked(hook))
    placement = trace(model, model.load_weights, model.schema(), learned.standing())
    learned.compose(placement.pieces)
    assert not outside


def test_a_device_is_made_the_current_one_and_gets_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    fake = SimpleNamespace(
        device=lambda device: (done.append(device), nullcontext())[1], empty_cache=lambda: done.append("empty")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    with learn.on_device(torch.device("cuda", 1)), learn.on_device(torch.device("cpu")):
        assert done == [torch.device("cuda", 1)]
    done.clear()
    rank.Rank(nn.Linear(2, 2), 0)._free_copies()
    assert done == []
    rank.Rank(nn.Linear(2, 2, device="meta"), 0)._free_copies()
    assert done == ["empty"]


class Stack(nn.Module):
    """Layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 48, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            dict(self.named_parameters())[name].data.copy_(tensor)


def test_layers_alike_are_learned_once() -> None:
    runs = []

    def hook(module: nn.Module) -> None:
        runs.append(module)
        each(tiles)(module)

    model = Stack()
    schema = Schema.build([TensorSpec(name, "BF16", tuple(p.shape)) for name, p in model.named_parameters()])
    learned = Learned(
        [
            Layer(str(n), layer, {"weight": torch.empty_like(layer.weight, device="meta")}, hook, ("tiles",))
            for n, layer in enumerate(model.layers)
        ]
    )
    standing = learned.standing()
    assert (len(standing), len(runs)) == (3, 1)
    for layer in model.layers:
        each(tiles)(layer)
    pieces, problems = learned.compose(trace(model, model.load_weights, schema, standing).pieces)
    assert problems == []
    # without weights, a digit, two times random bits
    assert len(runs) == 1 + 4
    assert [piece.view.untyped_storage()._cdata for piece in pieces] == [
        layer.weight.untyped_storage()._cdata for layer in model.layers
    ]


def scaled(w: Tensor) -> Tensor:
    return w * 2


def quantized(w: Tensor) -> Tensor:
    return w.to(torch.float8_e4m3fn)


def summed(module: nn.Module) -> None:
    each(tiles)(module)
    module.total = sum(p.float().sum() for p in module.parameters()).reshape(1)  # type: ignore[union-attr,assignment]


def copied(module: nn.Module) -> None:
    each(tiles)(module)
    module.register_buffer("again", next(module.parameters()).data.clone(), persistent=False)


def sorted_rows(w: Tensor) -> Tensor:
    return w[w[:, 0].float().argsort()]


def failing(w: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this device")


@pytest.mark.parametrize(
    "hook, reason",
    [
        (each(scaled), "'0.down.weight'"),
        (each(quantized), "'0.down.weight'"),
        (each(sorted_rows), "'0.down.weight'"),
        (summed, "'total'"),
        (copied, "second copy"),
        (each(failing), "'0.down.weight' and others.: RuntimeError: no kernel for this device"),
    ],
)
def test_a_hook_that_computes_is_refused_by_name(hook: Hook, reason: str) -> None:
    model = Fused()
    learned = Learned(model.hooked(hook))
    pieces, problems = learned.compose(trace(model, model.load_weights, model.schema(), learned.standing()).pieces)
    assert len(problems) == 1
    assert "'down'" in problems[0]
    assert re.search(reason, problems[0]), problems[0]
    with pytest.raises(ValueError, match=r"not known where '0\.down\.weight' lies"):
        open_shard(pieces)


def test_probing_leaves_the_live_layer_as_it_is() -> None:
    model = Fused()
    hook = each(tiles)
    layers = model.hooked(hook)
    model.load(as_tensors(random_bag(model.schema(), 3)), hook)
    before = {name: (id(p), p.data.view(torch.int16).clone()) for name, p in model.named_parameters()}
    learned = Learned(layers)
    learned.compose(trace(model, model.load_weights, model.schema(), learned.standing()).pieces)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter.data.view(torch.int16), before[name][1])


@pytest.mark.parametrize("world, on_device", [(1, False), (2, False), (1, True)])
def test_a_server_with_packed_weights_is_patched(
    tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop, world: int, on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Deltas and full weights, staged, written, taken back and proven through the learned layout."""
    if on_device:
        monkeypatch.setattr(rank, "open_shard", lambda pieces, _: device.DeviceShard(pieces))
    made = World(tmp_path, store, loop, world, each(tiles))
    for _ in range(2):
        made.publish()
    assert made.sync() == 2
    assert made.target.guard == "patch"
    made.holds(2)
    made.client.fail[world - 1, "apply"] = 1
    made.publish()
    with pytest.raises(WorkerError, match="a fault that a test asked for"):
        made.sync()
    made.holds(2)
    assert made.sync() == 3
    made.holds(3)
    # full weights: those that differ little, and those that differ everywhere
    assert made.sync(0) == 0
    made.holds(0)
    made.publish(density=0.9)
    assert made.sync() == 4
    made.holds(4)
    made.publisher.close()
    if made.target._here._decoder is not None:
        made.target._here._decoder.close()


def test_a_server_whose_hook_computes_is_reloaded(
    tmp_path: Path, store: ObjectStore, loop: asyncio.AbstractEventLoop
) -> None:
    made = World(tmp_path, store, loop, 2, each(scaled))
    version = made.publish()
    assert made.sync() == version
    assert made.target.guard.startswith("reload: 'down': its hook")
    assert "'0.down.weight'" in made.target.guard
    made.holds(version)
    made.publisher.close()
