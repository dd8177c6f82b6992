"""What a replica asks of a target, whatever is behind it: bind, stage, swap, and nothing else."""

from __future__ import annotations

import textwrap
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import deltawire as dw
from deltawire import Publisher, Replica
from deltawire.bucket.run import Run
from deltawire.bucket.walk import Delta
from deltawire.core.digest import StateDigest
from deltawire.core.errors import DigestMismatch, NotRestored
from deltawire.models import ModelView
from deltawire.replica.model import ModelTarget, StagedModel
from deltawire.replica.target import Target, Update
from deltawire.store import Store
from support import Model, blank, copy, history, same


class Recording:
    """A target that notes what it is asked for, and passes it on."""

    def __init__(self, live: Model, takes_deltas: bool = True) -> None:
        self._inner = ModelTarget(live)
        self.takes_deltas = takes_deltas
        self.asked: list[str] = []
        self.staged: list[Update] = []
        self.fails: Exception | None = None

    def bind(self, run: Run) -> bool:
        self.asked.append("bind")
        return self._inner.bind(run)

    def digest(self) -> StateDigest:
        return self._inner.digest()

    def stage(self, update: Update) -> StagedModel:
        self.asked.append("stage")
        self.staged.append(update)
        return self._inner.stage(update)

    def swap(self, staged: StagedModel) -> None:
        self.asked.append("swap")
        if self.fails is not None:
            raise self.fails
        self._inner.swap(staged)


def documented() -> Any:
    """The class that the docstring of `Target` shows."""
    shown = textwrap.dedent((dw.Target.__doc__ or "").partition("\n\n")[2])
    text = shown[shown.index("    @dataclass") : shown.index("    dw.Replica(")]
    scope: dict[str, Any] = {"dw": dw, "dataclass": dataclass}
    exec(textwrap.dedent(text), scope)
    return scope["Target"]


Plain = documented()


@pytest.fixture
def versions(store: Store) -> list[Model]:
    made = history(4)
    with Publisher(store, anchor_ratio=1e9) as publisher:
        for weights in made:
            publisher.publish(weights).result(60)
    return made


def test_a_target_in_place_of_a_model(store: Store, versions: list[Model]) -> None:
    live = blank(versions[0])
    target = Recording(live)
    assert isinstance(target, Target)
    replica = Replica(store, heartbeat=0)
    for version, weights in enumerate(versions):
        assert replica.sync(target, version) == version
        assert same(live, weights)
    assert target.asked == ["bind", "stage", "swap"] * 4
    assert [isinstance(update.content, Delta) for update in target.staged] == [False, True, True, True]


def test_a_target_of_public_names(store: Store, versions: list[Model]) -> None:
    target = Plain(blank(versions[0]))
    replica = Replica(store, heartbeat=0)
    for version in (1, 2, 3, 0):
        assert replica.sync(target, version) == version
        assert same(target.weights, versions[version])
    assert replica.rejected == []


def test_a_write_that_goes_wrong_is_undone_and_follow_goes_on(store: Store, versions: list[Model]) -> None:
    """With the target of the docstring: whatever it raises for that is retried."""

    class Once(Plain):  # type: ignore[misc]
        writes, broken = 0, False

        def bits(self, tensor: Any) -> Any:
            found = super().bits(tensor)
            if self.broken:
                self.broken = False
                found[0] ^= 1
            return found

        def swap(self, staged: Any) -> None:
            self.writes += 1
            self.broken = staged.update.version == 3 and self.writes == 2
            super().swap(staged)

    target, stop, replica = Once(blank(versions[0])), threading.Event(), Replica(store, heartbeat=0)
    replica.sync(target, 2)
    for version in replica.follow(target, poll=0.001, stop=stop):
        assert version == 3
        stop.set()
    assert same(target.weights, versions[3])
    assert target.writes > 2


def test_what_require_says_of_weights_is_true_in_swap(store: Store, versions: list[Model]) -> None:
    update = Update(2, StateDigest(1, 2), StateDigest(), ModelView(versions[2]))
    update.require(StateDigest(1, 2))
    with pytest.raises(DigestMismatch, match=r"version 2 .* have 0{32}$") as raised:
        update.require(StateDigest())
    assert (raised.value.version, raised.value.expected) == (2, str(update.digest))
    assert isinstance(update.content, dw.Source)
    assert not isinstance(Delta(dw.Schema.build(()), Any, ()), dw.Source)  # type: ignore[arg-type]


def test_a_target_that_lacks_a_name_is_told_which(store: Store, versions: list[Model]) -> None:
    class Misspelled:
        takes_delta = True
        bind = digest = stage = swap = None

    with pytest.raises(TypeError, match=r"^Misspelled is no Target: it has no takes_deltas$"):
        Replica(store, heartbeat=0).sync(Misspelled())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot read weights from object"):
        Replica(store, heartbeat=0).sync(object())  # type: ignore[arg-type]


def test_weights_that_strayed_are_found_before_they_are_patched(store: Store, versions: list[Model]) -> None:
    target, replica = Plain(blank(versions[0])), Replica(store, heartbeat=0)
    replica.sync(target, 1)
    update = Update(2, StateDigest(), replica.digest, ModelView(versions[2]))
    before = copy(target.weights)
    with pytest.raises(DigestMismatch, match="nothing was changed"):
        target.stage(update)
    assert same(target.weights, before)
    # the weight that the delta to 2 changes first, changed by something else: full weights are loaded
    at = np.flatnonzero(versions[1]["embed.weight"] != versions[2]["embed.weight"])[0]
    target.weights["embed.weight"].reshape(-1)[at] ^= 0x10
    assert replica.sync(target, 2) == 2
    assert same(target.weights, versions[2])


def test_a_target_that_takes_no_deltas_is_given_full_weights(store: Store, versions: list[Model]) -> None:
    live = blank(versions[0])
    target = Recording(live, takes_deltas=False)
    replica = Replica(store, heartbeat=0)
    for version in (1, 3, 2):
        assert replica.sync(target, version) == version
        assert same(live, versions[version])
    assert [update.version for update in target.staged] == [1, 3, 2]
    assert not any(isinstance(update.content, Delta) for update in target.staged)


def test_full_weights_that_are_not_the_version_touch_nothing(store: Store, versions: list[Model]) -> None:
    live = blank(versions[0])
    target = ModelTarget(live)
    target.bind(Replica(store).opened())
    before = target.digest()
    wrong = ModelView(versions[1])
    with pytest.raises(DigestMismatch, match="nothing was changed"):
        target.stage(Update(1, StateDigest(1, 2), before, wrong))
    assert target.digest() == before


def test_weights_that_could_not_be_restored_have_no_name(store: Store, versions: list[Model]) -> None:
    named: list[int | None] = []
    target = Recording(blank(versions[0]))
    replica = Replica(store, heartbeat=0, on_name=named.append)
    replica.sync(target, 0)
    target.fails = NotRestored("half of it was written")
    with pytest.raises(NotRestored):
        replica.sync(target, 1)
    # at once, and when the sync is over
    assert (replica.version, replica.trouble, replica.failures) == (None, "half of it was written", 1)
    assert named == [0, None, None]
    target.fails = None
    assert replica.sync(target) == 3
    assert (named[-1], replica.trouble) == (3, "")


def test_a_swap_that_was_undone_leaves_the_name(store: Store, versions: list[Model]) -> None:
    named: list[int | None] = []
    target = Recording(blank(versions[0]))
    replica = Replica(store, heartbeat=0, on_name=named.append)
    replica.sync(target, 0)
    target.fails = OSError("before anything was written")
    with pytest.raises(OSError, match="before anything"):
        replica.sync(target, 1)
    assert (replica.version, named) == (0, [0, 0])


def test_a_pin_is_asked_for_at_every_look(store: Store, versions: list[Model]) -> None:
    live, stop = blank(versions[0]), threading.Event()
    pins: list[int | None] = [2, 2, 1]
    seen = []
    replica = Replica(store, heartbeat=0)
    for version in replica.follow(live, poll=0.001, stop=stop, pin=lambda: pins.pop(0) if pins else None):
        seen.append(version)
        assert same(live, versions[version])
        if version == 3:
            stop.set()
    assert seen == [2, 1, 3]
