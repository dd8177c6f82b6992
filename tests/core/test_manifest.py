"""The JSON objects of a run: what they say is checked before anybody acts on it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.core import keys
from deltawire.core.errors import DeltawireError, ForeignObject, ManifestError, ModelTooLarge, UnknownFormat
from deltawire.core.manifest import (
    SUMMARY_METRICS,
    Base,
    Blob,
    File,
    Heartbeat,
    Link,
    Manifest,
    Pruned,
    RunInfo,
    Tag,
    dump,
    parse,
    parse_manifest,
    parse_run,
    ranges_of,
)
from deltawire.core.schema import Schema, TensorSpec

SCHEMA = Schema.build([TensorSpec("w", "BF16", (64,))])
RUN = RunInfo("r", 1.0, SCHEMA, SCHEMA.hash)
BLOB = Blob(keys.delta(4, 5, "0123abcd"), 100, "0" * 32)
GOOD = Manifest("r", 5, 4, SCHEMA.hash, "0" * 32, (Link("delta", 4, (BLOB,)),), 2.0, "0123abcd")


def test_a_manifest_survives_its_json() -> None:
    assert parse_manifest(dump(GOOD), 5, RUN) == GOOD
    assert parse_run(dump(RUN)) == RUN
    adapters = msgspec.structs.replace(RUN, base=Base("org/model", ("0" * 32,)))
    assert parse_run(dump(adapters)) == adapters
    with pytest.raises(ManifestError):
        GOOD.link("anchor", None)
    assert GOOD.link("delta", 4) is GOOD.links[0]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"run": "other"}, ForeignObject),
        ({"schema": "0" * 32}, ForeignObject),
        ({"format": 2}, UnknownFormat),
        ({"version": 6}, ManifestError),
        ({"parent": None}, ManifestError),
        ({"parent": 5}, ManifestError),
        ({"digest": "0" * 31 + "x"}, ManifestError),
        ({"links": ()}, ManifestError),
        ({"links": (*GOOD.links, *GOOD.links)}, ManifestError),
        ({"links": (Link("delta", 5, (BLOB,)),)}, ManifestError),
        ({"links": (Link("anchor", 4, (BLOB,)),)}, ManifestError),
        ({"links": (Link("reference", objects=(BLOB,), source="a"),)}, ManifestError),
        ({"links": (Link("delta", 4, (msgspec.structs.replace(BLOB, key="run.json"),)),)}, ForeignObject),
        ({"links": (Link("delta", 4, (msgspec.structs.replace(BLOB, size=1 << 40),)),)}, ManifestError),
        ({"files": (File("a.json", "files/" + "1" * 32, 1, "0" * 32),)}, ManifestError),
        ({"files": (File("../a", keys.file("0" * 32), 1, "0" * 32),)}, DeltawireError),
        ({"metrics": {str(i): 0.0 for i in range(1001)}}, ManifestError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradictions_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_manifest(dump(msgspec.structs.replace(GOOD, **wrong)), 5, RUN)


def test_a_run_is_no_larger_than_allowed_and_has_the_schema_it_states() -> None:
    parse_run(dump(RUN), max_model=128)
    with pytest.raises(ModelTooLarge):
        parse_run(dump(RUN), max_model=127)
    with pytest.raises(ManifestError):
        parse_run(dump(msgspec.structs.replace(RUN, schema_hash="0" * 32)))


def test_a_summary_carries_a_few_short_metrics() -> None:
    metrics = {"x" * 41: 1.0} | {f"m{i}": float(i) for i in range(10)}
    summary = msgspec.structs.replace(GOOD, metrics=metrics).summary()
    assert list(summary.metrics) == [f"m{i}" for i in range(SUMMARY_METRICS)]
    assert (summary.links[0].bytes, summary.links[0].objects) == (100, 1)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_pruned_versions_are_a_set_in_few_ranges(one: set[int], two: set[int]) -> None:
    pruned = Pruned.of("r", one).also(two)
    assert pruned.versions == ranges_of(one | two)
    assert {version for version in range(42) if version in pruned} == one | two
    assert pruned.last == max(one | two, default=-1)


def test_versions_that_cannot_be_one_are_refused() -> None:
    with pytest.raises(ManifestError):
        parse(b'{"run":"r","version":-1,"at":0}', Tag, keys.tag("best"))
    beat = {"run": "r", "replica": "a", "version": 1, "newest": 1, "healthy": True, "at": 0}
    assert parse(msgspec.json.encode(beat), Heartbeat, "it").version == 1
    for wrong in ({"version": -1}, {"reading": [[3, 2]]}, {"reading": [[0, 1 << 70]]}, {"at": "x"}):
        with pytest.raises(ManifestError):
            parse(msgspec.json.encode(beat | wrong), Heartbeat, "it")
