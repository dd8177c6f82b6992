"""Against an older vLLM: `make test-vllm VLLM=0.30.0`. Short, and for releases that have no /weight_checker.

What is served is the trainer's by the digest of the live weights, and by the answers of a server freshly started from a
checkout.
"""

from __future__ import annotations

from pathlib import Path

from vllm_live import Streams, Trainer, make_model, serving

from deltawire.bucket.run import Run
from deltawire.engines.live.launch import write_version

VERSIONS = 5


def test_a_few_versions_under_load(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    trainer = Trainer(model, tmp_path / "run", anchor_every=3)
    trainer.publish(0)
    with serving(model, tmp_path / "log", run=trainer.run) as server:
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
        tokens = server.greedy([5, 9, 11])
        live = server.http.get("/deltawire/digest").raise_for_status().json()
        assert live == {"version": newest, "digest": Run.open(str(trainer.run)).manifest(newest).digest}
        answer = server.complete([5, 9, 11])
        assert answer.headers["deltawire-version"] == str(newest)
        assert {span["version"] for span in answer.json()["choices"][0]["weight_versions"]} == {newest}
    trainer.close()
    write_version(str(trainer.run), newest, tmp_path / "fresh")
    with serving(tmp_path / "fresh", tmp_path / "fresh.log") as fresh:
        assert fresh.greedy([5, 9, 11]) == tokens
