"""Against an older vLLM: `make test-vllm VLLM=0.30.0`. Short, and for releases that have no /weight_checker.

Equality is that of the hash of all parameters (guard.py) with a server freshly started from a checkout.
"""

from __future__ import annotations

from pathlib import Path

from vllm_live import Server, Streams, Trainer, make_model, serving

from deltawire.engines.live.launch import write_version

VERSIONS = 5


def fingerprint(server: Server) -> str:
    body = {"method": "deltawire", "args": ["fingerprint"]}
    (answer,) = server.http.post("/collective_rpc", json=body).raise_for_status().json()["results"]
    return answer["fingerprint"]  # type: ignore[no-any-return]


def test_a_few_versions_under_load(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    trainer = Trainer(model, tmp_path / "run", anchor_every=3)
    trainer.publish(0)
    with serving(model, tmp_path / "log", run=trainer.run) as server:
        started = fingerprint(server)
        with Streams(server) as streams:
            for _ in range(VERSIONS):
                newest = trainer.publish()
                server.until(version=newest, state="healthy")
        assert streams.failures == []
        said = {span["version"] for completion in streams.completions for span in completion["spans"]}
        assert said
        assert said <= {*range(VERSIONS + 1)}
        status = server.status()
        assert (status["guard"], status["syncs"], status["failures"]) == ("patch", VERSIONS, 0)
        patched, tokens = fingerprint(server), server.greedy([5, 9, 11])
        assert patched != started
        answer = server.complete([5, 9, 11])
        assert answer.headers["deltawire-version"] == str(newest)
        assert {span["version"] for span in answer.json()["choices"][0]["weight_versions"]} == {newest}
    trainer.close()
    write_version(str(trainer.run), newest, tmp_path / "fresh")
    with serving(tmp_path / "fresh", tmp_path / "fresh.log") as fresh:
        assert fingerprint(fresh) == patched
        assert fresh.greedy([5, 9, 11]) == tokens
