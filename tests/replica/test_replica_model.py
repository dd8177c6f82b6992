"""What a replica writes reaches the memory that the model computes with, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deltawire as dw  # noqa: E402
from deltawire.core.errors import UnsupportedTensor  # noqa: E402
from deltawire.store import Store  # noqa: E402


def linear(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(8, 4).bfloat16()


class Loaded(Mapping[str, Any]):
    """A mapping whose values are made when they are asked for, as from a file."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor.copy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Views(Loaded):
    """A mapping whose values are made when they are asked for, of live memory."""

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name][:]


def with_a_hook(model: Any) -> Any:
    """A module whose state dict is a copy, as of those that gather their weights from elsewhere."""

    def copied(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update({name: tensor.clone() for name, tensor in state.items()})

    model.register_state_dict_post_hook(copied)
    return model


def in_numpy(model: Any) -> dict[str, Any]:
    return {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in model.state_dict().items()}


COPIES: dict[str, Callable[[Any], Any]] = {
    "mapping": lambda model: Loaded(model.state_dict()),
    "numpy": lambda model: Loaded(in_numpy(model)),
    "hook": with_a_hook,
    "wrapped": lambda model: torch.nn.DataParallel(with_a_hook(model)),
}


@pytest.mark.parametrize("kind", COPIES)
def test_tensors_that_are_made_for_the_asking_are_refused(kind: str, store: Store) -> None:
    with dw.Publisher(store) as publisher:
        publisher.publish(linear())
    replica = dw.Replica(store, heartbeat=0)
    with pytest.raises(UnsupportedTensor, match=r"'weight' of this .* is a copy .* check the version out"):
        replica.sync(COPIES[kind](linear(1)))
    assert replica.version is None
    with pytest.raises(UnsupportedTensor):
        next(replica.follow(COPIES[kind](linear(1))))


def test_views_made_for_the_asking_are_live(store: Store) -> None:
    trained, served = linear(), linear(1)
    with dw.Publisher(store) as publisher:
        publisher.publish(trained)
    dw.Replica(store, heartbeat=0).sync(Views(served.state_dict()))
    assert torch.equal(served.weight, trained.weight)


def test_shards_are_refused(store: Store) -> None:
    from torch.distributed.tensor import distribute_module

    with dw.Publisher(store) as publisher:
        publisher.publish(linear())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        served = linear(1)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        distribute_module(served, mesh)
        with pytest.raises(UnsupportedTensor, match="'weight' is spread over several processes"):
            dw.Replica(store, heartbeat=0).sync(served)
    finally:
        torch.distributed.destroy_process_group()


def moved_to(dtype: Any) -> Callable[[Any], object]:
    return lambda model: model.to(dtype)


MOVES: dict[str, Callable[[Any], object]] = {
    "another dtype": moved_to(torch.float32),
    "assigned": lambda model: model.load_state_dict(linear(2).state_dict(), assign=True),
    "a parameter of one's own": lambda model: setattr(model, "weight", torch.nn.Parameter(model.weight.clone())),
}


@pytest.mark.parametrize("how", MOVES)
def test_weights_that_were_moved_between_two_versions_are_found_again(how: str, store: Store) -> None:
    trained, served = linear(), linear(1)
    replica = dw.Replica(store, heartbeat=0)
    with dw.Publisher(store) as publisher:
        publisher.publish(trained).result(60)
        replica.sync(served)
        MOVES[how](served)
        with torch.no_grad():
            trained.weight[0, 0] += 1
        publisher.publish(trained).result(60)
        assert replica.sync(served) == 1
    assert torch.equal(served.weight.bfloat16(), trained.weight)
    assert torch.equal(served.bias.bfloat16(), trained.bias)


def test_a_dict_whose_arrays_are_exchanged_is_followed(store: Store) -> None:
    trained, served = {"w": np.arange(8, dtype=np.float32)}, {"w": np.zeros(8, np.float32)}
    replica = dw.Replica(store, heartbeat=0)
    with dw.Publisher(store) as publisher:
        publisher.publish(trained).result(60)
        replica.sync(served)
        served["w"] = served["w"].copy()
        trained["w"][3] = 7
        publisher.publish(trained).result(60)
        replica.sync(served)
    assert np.array_equal(served["w"], trained["w"])
