"""Against a real SGLang: `make test-sglang`. Not collected by the everyday run, whose environment has none."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
from sglang_live import Server

from deltawire.engines.live.launch import write_version
from deltawire.engines.names import VERSION_HEADER
from tests.engines.live.live_server import ON_GPU, Streams, Trainer, make_model, serving
from tests.engines.live.live_tests import LiveTests


class TestSglang(LiveTests):
    server = Server
    cells = MappingProxyType(
        {("llama", 1): 20, ("qwen3_moe", 1): 10, ("qwen3", 1): 50, **({} if ON_GPU else {("qwen3", 2): 20})}
    )


def test_a_run_without_a_tokenizer_is_served_by_token_ids(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tokenizer=False)
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    with serving(Server, None, tmp_path / "log", run=trainer.run) as server:
        asked = {"sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        answer = server.http.post("/generate", json={"input_ids": [5, 9, 11], **asked}).raise_for_status().json()
        assert len(answer["output_ids"]) == 4
        assert answer["weight_versions"] == [{"version": 0, "start": 0, "end": 4}]
        refused = server.http.post("/generate", json={"text": "t5 t9", **asked})
        assert (refused.status_code, "cannot accept text prompts" in refused.text) == (400, True)
        assert "has no tokenizer, so the server is started without one" in server.log.read_text()
    trainer.close()
    refusing = Server(model, tmp_path / "refusing", run=trainer.run)
    try:
        assert "has no tokenizer, and SGLang would fail once the model is loaded" in refusing.ended()
    finally:
        refusing.kill()


@pytest.mark.parametrize("kv, guard", [("keep", "patch"), ("clear", "reload: a test asked for it")])
def test_keys_and_values_are_kept_or_dropped(tmp_path: Path, kv: str, guard: str) -> None:
    """And with that: versions that SGLang's own loader loads, and chats."""
    model = make_model(tmp_path / "model", "qwen3")
    config = model / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    trainer = Trainer(model, tmp_path / "run")
    trainer.publish(0)
    refuse = guard.partition(": ")[2] or None
    with serving(
        Server, model, tmp_path / "log", run=trainer.run, DELTAWIRE_KV=kv, SGLANG_TEST_REFUSE=refuse
    ) as server:
        assert server.status()["guard"] == guard
        prompt = [7 + i % 200 for i in range(400)]
        assert server.reused(prompt) == 0
        assert server.reused(prompt) > 0
        with Streams(server) as streams:
            for _ in range(5):
                newest = trainer.publish()
                server.until(version=newest, state="healthy")
        assert streams.failures == []
        assert (server.reused(prompt) > 0) == (kv == "keep")
        assert server.status()["failures"] == 0
        sums = server.checksums()
        talk = {"model": "m", "messages": [{"role": "user", "content": "t5 t9"}], "max_tokens": 4, "ignore_eos": True}
        for stream in (False, True):
            answer = server.http.post("/v1/chat/completions", json={**talk, "stream": stream}).raise_for_status()
            assert answer.headers[VERSION_HEADER] == str(newest)
            assert f'"weight_versions":[{{"version":{newest},"start":0,"end":4}}]' in answer.text.replace(" ", "")
    trainer.close()
    write_version(str(trainer.run), newest, tmp_path / "fresh")
    assert Server.fresh_checksums([tmp_path / "fresh"], 1) == [sums]
