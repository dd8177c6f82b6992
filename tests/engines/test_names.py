"""Names that both engines use."""

from __future__ import annotations

from deltawire.engines.names import SERVING, STATES, VERSIONS_FIELD, health, model_name, versions_of


def test_a_model_has_the_name_of_its_run() -> None:
    assert model_name("s3://bucket/runs/chat?region=eu-west-1") == "chat"
    assert model_name("/data/runs/chat/") == "chat"


def test_health_says_why_only_where_there_is_something_to_say() -> None:
    assert health("healthy") == {"state": "healthy"}
    assert health("failed", "no run") == {"state": "failed", "reason": "no run"}
    assert set(SERVING) <= set(STATES)


def test_versions_of_a_choice() -> None:
    assert versions_of({VERSIONS_FIELD: [{"version": 4, "start": 0, "end": 2}, {"version": 5}]}) == [4, 5]
    assert versions_of({}) == versions_of({VERSIONS_FIELD: None}) == versions_of({VERSIONS_FIELD: [{}]}) == []
