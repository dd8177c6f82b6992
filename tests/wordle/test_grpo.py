"""The pieces of asynchronous GRPO: advantages, clipping, which version made what, and what is too old."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator

import httpx
import pytest
import torch

from deltawire.core.errors import PublishFailed, StoreUnavailable
from deltawire.store import ObjectStore
from deltawire.trainer import Publisher
from deltawire_wordle import grpo, small_policy
from deltawire_wordle.grpo import Learner, Ledger, Rollout, RolloutGroup, Settings, advantages, clipped_loss
from deltawire_wordle.layout import BOS, render, spell
from deltawire_wordle.sampling import Sample
from support import HookedStore

# ── advantages and clipping ──────────────────────────────────────────────────────────────────────────────────────────


def test_advantages_compare_within_a_group() -> None:
    found = advantages([0.0, 1.0, 1.0, 2.0])
    assert sum(found) == pytest.approx(0)
    assert found[0] < 0 < found[3]
    assert found[1] == pytest.approx(0)
    assert found[3] == pytest.approx(1 / (math.sqrt(2 / 3) + 1e-4))
    assert advantages([5.0, 6.0]) == pytest.approx(advantages([0.0, 1.0]))


@pytest.mark.parametrize("rewards", [[0.7] * 4, [1.0]])
def test_equal_rewards_give_no_advantage(rewards: list[float]) -> None:
    assert advantages(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize(
    "ratio, advantage, objective, pulls",
    [
        (1.0, 1.0, 1.0, True),
        (1.2, 1.0, 1.2, True),
        (1.5, 1.0, 1.28, False),  # likely enough already
        (0.5, 1.0, 0.5, True),
        (0.5, -1.0, -0.8, False),  # unlikely enough already
        (0.9, -1.0, -0.9, True),
        (1.5, -1.0, -1.5, True),
    ],
)
def test_the_ratio_is_clipped_where_it_has_gone_far_enough(
    ratio: float, advantage: float, objective: float, pulls: bool
) -> None:
    logprobs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    loss, clipped = clipped_loss(
        logprobs, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.tensor([[True]]), 0.2, 0.28
    )
    loss.backward()
    assert loss.item() == pytest.approx(-objective)
    assert clipped.item() == (0 if pulls else 1)
    assert logprobs.grad is not None
    assert (logprobs.grad.abs().sum() > 0) == pulls


def test_what_the_environment_wrote_does_not_count() -> None:
    logprobs = torch.tensor([[-1.0, -7.0], [-1.0, -9.0]], requires_grad=True)
    sampled = torch.tensor([[True, False], [True, False]])
    loss, _ = clipped_loss(logprobs, torch.tensor([[-1.0, 0.0]] * 2), torch.tensor([1.0, 3.0]), sampled, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0)
    assert logprobs.grad is not None
    assert logprobs.grad[:, 1].tolist() == [0.0, 0.0]


# ── games as samples ─────────────────────────────────────────────────────────────────────────────────────────────────


def game(word: str, reward: float, version: int = 0, logprob: float = -3.0) -> Rollout:
    rollout = Rollout(reward=reward, solved=reward >= 1)
    rollout.add_context([BOS])
    rollout.add_sample(Sample(tuple(spell(word)), (logprob,) * len(word)), [version])
    return rollout


def test_a_game_is_its_own_prompt() -> None:
    rollout = game("crane", 0.0, version=4)
    rollout.add_context(spell("XYXXG"))
    assert rollout.tokens == render([(spell("crane"), "XYXXG")])
    rollout.add_sample(Sample((2,), (-0.5,)), [5, 6])
    assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.sampled) == 12
    assert [token for token, made in zip(rollout.tokens, rollout.sampled, strict=True) if made] == [*spell("crane"), 2]
    assert sum(rollout.logprobs) == pytest.approx(5 * -3.0 - 0.5)
    assert rollout.versions == {4, 5, 6}
    assert RolloutGroup([rollout, game("shows", 1.0, version=7)]).oldest == 4


def test_what_was_rewarded_becomes_likelier() -> None:
    model = small_policy.load()

    def chance(word: str) -> float:
        ids = torch.tensor([[1, *spell(word)]])
        with torch.no_grad():
            found = torch.log_softmax(model(input_ids=ids[:, :-1]).logits, -1).gather(2, ids[:, 1:, None])
        return float(found.sum())

    good, bad = chance("shows"), chance("crane")
    learner = Learner(model, Settings(rate=1e-3))
    for _ in range(3):
        # as a server would: with the chances it draws from
        games = [game(word, reward, logprob=chance(word) / 5) for word, reward in (("shows", 1.0), ("crane", 0.0))]
        figures = learner.step([RolloutGroup(games)])
    assert chance("shows") - good > 0.5
    assert chance("crane") - bad < -0.5
    assert figures["tokens"] == 10
    assert figures["solved"] == 0.5


# ── servers that come and go ─────────────────────────────────────────────────────────────────────────────────────────


def away(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


# ── versions, steps, staleness ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


def moved(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.1
    return model


@pytest.fixture
def publisher(model: torch.nn.Module) -> Iterator[Publisher]:
    with Publisher(ObjectStore.from_url(f"memory://{uuid.uuid4()}")) as made:
        made.publish(model, wait=True)
        yield made


def test_age_is_counted_in_steps_not_in_versions(publisher: Publisher, model: torch.nn.Module) -> None:
    ledger = Ledger(publisher)
    for step in (1, 2, 3):
        ledger.publish(moved(model), step, {})
    publisher.flush()
    new = ledger.arrived()
    # however many versions three publishes became, the last one carries step 3
    assert sum(version.publishes for version in new) == 3
    last = new[-1].version
    assert ledger.age(last, 3) == 0
    assert ledger.age(last, 10) == 7
    assert ledger.age(0, 3) == 3
    assert ledger.age(last + 1, 3) == 0, "a version that servers heard of first is new"


def test_the_oldest_version_of_a_step(publisher: Publisher, model: torch.nn.Module) -> None:
    ledger = Ledger(publisher)
    for step in (1, 2, 3):
        ledger.publish(moved(model), step, {})
        publisher.flush()
    ledger.arrived()
    assert [ledger.since(step) for step in (-4, 0, 1, 3)] == [0, 0, 1, 3]
    assert ledger.since(9) == 3, "nothing newer is in the bucket yet"


def test_versions_from_before_are_older_still(publisher: Publisher, model: torch.nn.Module) -> None:
    publisher.publish(moved(model), wait=True)
    publisher.publish(moved(model), wait=True)
    ledger = Ledger(publisher)
    assert [ledger.age(version, 5) for version in (2, 1, 0)] == [5, 6, 7]


def test_a_run_without_a_version_cannot_be_sampled_from() -> None:
    with pytest.raises(ValueError, match="publish"):
        Ledger(Publisher(ObjectStore.from_url(f"memory://{uuid.uuid4()}")))


def test_a_bucket_that_goes_away_costs_no_step(model: torch.nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    away = False

    def weather(*event: str) -> None:
        if away:
            raise StoreUnavailable("away")

    publisher = Publisher(HookedStore(ObjectStore.from_url(f"memory://{uuid.uuid4()}"), weather))
    publisher.publish(model, wait=True)
    ledger, away = Ledger(publisher), True
    ledger.publish(moved(model), 1, {})
    with pytest.raises(PublishFailed, match="away"):
        publisher.flush()
    assert ledger.arrived() == []
    assert ledger.owed
    assert "step 1 is not in the bucket yet" in caplog.text
    ledger.publish(moved(model), 2, {})
    away = False
    versions = ledger.settle(model, 2, seconds=60)
    assert ledger.age(versions[-1].version, 2) == 0
    assert not ledger.owed
    publisher.close()


class Given:
    """Rollouts that were made beforehand."""

    waiting = 0

    def __init__(self, groups: list[RolloutGroup]) -> None:
        self._groups = groups
        self.oldest = 0

    def take(self) -> RolloutGroup | None:
        return self._groups.pop(0) if self._groups else None


class Counting(Learner):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.batches = model, []  # type: ignore[assignment]

    def step(self, groups: object) -> dict[str, float]:
        self.batches.append([group.oldest for group in groups])  # type: ignore[attr-defined]
        moved(self.model)
        return {"loss": 0.0, "reward": 0.0, "solved": 0.0, "clipped": 0.0}


def groups(*versions: int) -> list[RolloutGroup]:
    return [RolloutGroup([game("crane", 0.0, version)]) for version in versions]


def test_samples_that_are_too_old_are_dropped(publisher: Publisher, model: torch.nn.Module) -> None:
    settings = Settings(secrets=2, staleness=1)
    learner = Counting(model)
    given = Given(groups(0, 0, 0, 0, 0, 1, 0, 2))
    done = []
    for step in grpo.train(learner, Ledger(publisher), given, settings, steps=3):  # type: ignore[arg-type]
        publisher.flush()
        done.append((step.step, step.dropped, step.staleness, step.stalest))
    assert given.oldest == 1, "in the third step, samples of version 1 are one step old"
    assert learner.batches == [[0, 0], [0, 0], [1, 2]]
    assert done == [(1, 0, 0, 0), (2, 0, 1, 1), (3, 2, 0.5, 1)]


def test_without_a_limit_or_syncing_nothing_is_too_old(publisher: Publisher, model: torch.nn.Module) -> None:
    settings = Settings(secrets=1, staleness=None, sync=False)
    learner, ledger = Counting(model), Ledger(publisher)
    done = [*grpo.train(learner, ledger, Given(groups(0, 0, 0)), settings, steps=3)]  # type: ignore[arg-type]
    assert [step.stalest for step in done] == [0, 1, 2]
    assert publisher.version == 0
    assert [version.version for version in ledger.settle(model, 3, 60)] == [1]


def test_training_ends_on_time_without_samples(publisher: Publisher, model: torch.nn.Module) -> None:
    learner = Counting(model)
    assert [*grpo.train(learner, Ledger(publisher), Given([]), Settings(), seconds=0.01)] == []  # type: ignore[arg-type]
