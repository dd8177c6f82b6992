"""An import is interrupted at each line or killed at each step, goes on, and publishes what was written."""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from writers import Model, model, trained, write_base, write_delta

import deltawire as dw
from deltawire.errors import DeltawireError
from deltawire.foreign import Importer, folders, importer, indexed, version
from deltawire.store import ObjectStore
from interrupting import Interrupted, raising_at_each_line
from killing import Killer, quick_folder
from support import blank, same


@cache
def history() -> list[Model]:
    made = [model()]
    for seed in (1, 2, 3):
        made.append(trained(made[-1], seed))
    return made


def numbers_in(run: ObjectStore | Path) -> list[int]:
    """Which of the weights each version has."""
    opened, found = dw.Run.open(run), []
    for number in opened.listed():
        live = blank(model())
        dw.Replica(run, heartbeat=0).sync(live, number)
        found += [n for n, weights in enumerate(history()) if same(live, weights)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("again", ("goes on", "begins anew"))
def test_interrupted_at_each_line(tmp_path: Path, again: str) -> None:
    base, source = write_base(tmp_path / "base", history()[0]), tmp_path / "source"
    for number in (1, 2):
        write_delta(source, number, *history()[number - 1 : number + 1], files=2)
    write_base(source / "weight_v000003", history()[3], index={})

    def operation(interrupted: Interrupted) -> None:
        run = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
        following = Importer(source, run, base=base)
        interrupted(lambda: [*following.follow(once=True)])
        if again == "begins anew":
            with suppress(DeltawireError):
                following.close()
            following = Importer(source, run, base=base)
        with following:
            for _ in following.follow(once=True):
                pass
        assert numbers_in(run) == [0, 1, 2, 3]

    places = raising_at_each_line([importer, version, indexed, folders], operation)
    assert len(places) > 150


@pytest.mark.slow
def test_killed_at_each_step(tmp_path: Path) -> None:
    home = quick_folder(tmp_path)
    base, source = write_base(home / "base", history()[0]), home / "source"
    for number in (1, 2, 3):
        write_delta(source, number, *history()[number - 1 : number + 1])
    killed = 0
    with Killer(0) as killer:
        while True:
            run = home / f"run-{killed}"
            task = {"source": str(source), "run": str(run), "base": str(base)}
            if killer.run("take", die=killed + 1, **task)["code"] == 0:
                break
            killed += 1
            assert killer.run("take", **task)["code"] == 0
            assert numbers_in(run) == [0, 1, 2, 3]
            shutil.rmtree(run)
    shutil.rmtree(home)
    assert killed > 50


@pytest.mark.slow
def test_killed_while_the_source_goes_on_and_begins_again(tmp_path: Path) -> None:
    home = quick_folder(tmp_path)
    base, source, run = write_base(home / "base", history()[0]), home / "source", home / "run"
    written, everything, kills = [history()[0]], [history()[0]], 0
    with Killer(3) as killer:
        task = {"source": str(source), "run": str(run), "base": str(base)}
        for step in range(60):
            if killer.dice.random() < 0.15:
                shutil.rmtree(source, ignore_errors=True)
                del written[1:]
            for _ in range(killer.dice.randint(1, 3)):
                written.append(trained(written[-1], 1000 * step + len(written)))
                everything.append(written[-1])
                encoding = killer.dice.choice(("xor", "overwrite"))
                write_delta(source, len(written) - 1, *written[-2:], encoding)
            kills += killer.run("take", after=killer.dice.uniform(0, 0.15), **task)["code"] != 0
        assert killer.run("take", **task) == {"code": 0, "said": ""}
    newest = dw.Run.open(run).newest()
    assert newest is not None
    assert kills > 20
    place = -1
    for number in range(newest + 1):
        live = blank(model())
        dw.Replica(run, heartbeat=0).sync(live, number)
        # in the order in which they were written
        place = next(n for n, weights in enumerate(everything) if n > place and same(live, weights))
    assert same(live, written[-1])
    shutil.rmtree(home)
