"""The HTTP side, by a real client: what is asked for, what comes back, what is refused."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from serving import checkpoint, generate, nudge, published_run, publisher, serving, tiny_model, tokenizer

from deltawire.bucket.run import Run
from deltawire.core.errors import Misconfigured
from deltawire.engines.server import RolloutServer, ServerOptions, app
from deltawire.engines.server.requests import CompletionRequest
from deltawire.metrics import Prometheus
from support import heartbeats

TOKEN = "correct horse"
HELLO = tokenizer().encode("hello")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[tuple[RolloutServer, httpx.Client]]:
    with serving(run, token=TOKEN, max_body=0.02, max_batch=4, max_queue=40, name="letters") as it:
        yield it


@pytest.fixture
def client(served: tuple[RolloutServer, httpx.Client]) -> httpx.Client:
    return served[1]


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"temperature": 0, "max_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, route: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", route, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["deltawire-version"] == "0"
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ── completions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_and_token_ids_mean_the_same(client: httpx.Client) -> None:
    expected = generate(tiny_model(), HELLO, 8)
    for prompt in ("hello", HELLO, ["hello"], [HELLO]):
        answer = complete(client, prompt=prompt, return_token_ids=True)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected
        assert choice["prompt_token_ids"] == HELLO
        assert choice["text"] == tokenizer().decode(expected, skip_special_tokens=True)
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


def test_the_call_of_trls_rollout_worker(client: httpx.Client) -> None:
    """Prompt ids, one choice, token ids and the log-probs of what was drawn."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    body = {"model": "any", "prompt": HELLO, "n": 1, "max_tokens": 12, "temperature": 1.0, "seed": 7, **neutral}
    body |= {"return_token_ids": True, "logprobs": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.headers["deltawire-version"] == "0"
    choice = answer.json()["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(choice["token_ids"])}]
    assert client.get("/health").json() == {"state": "healthy"}
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 256


def test_several_prompts_and_choices_in_order(client: httpx.Client) -> None:
    answer = complete(client, prompt=["hello", "abc"], n=3, seed=5, temperature=1, return_token_ids=True)
    assert [c["index"] for c in answer["choices"]] == [*range(6)]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [HELLO] * 3 + [tokenizer().encode("abc")] * 3
    assert len({tuple(c["token_ids"]) for c in answer["choices"][:3]}) > 1
    assert answer["usage"]["prompt_tokens"] == 8
    again = complete(client, prompt=["hello", "abc"], n=3, seed=5, temperature=1, return_token_ids=True)
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"]]
    # the second choice of a seed is the first one of the next
    second = complete(client, prompt="hello", seed=6, temperature=1, return_token_ids=True)
    assert second["choices"][0]["token_ids"] == answer["choices"][1]["token_ids"]


def test_logprobs_as_vllm_gives_them(client: httpx.Client) -> None:
    choice = complete(client, prompt="hello", logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [*range(8)]
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        # greedy: the token is the likeliest, and is named once
        assert len(top) == 2
        assert top[token] == value == max(top.values())
    ids = complete(client, prompt="hello", logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in ids["tokens"])
    assert complete(client, prompt="hello")["choices"][0]["logprobs"] is None


def test_stop_strings_echo_and_length(client: httpx.Client) -> None:
    whole = complete(client, prompt="hello", max_tokens=30)["choices"][0]["text"]
    stop = whole[3:5]
    cut = complete(client, prompt="hello", max_tokens=30, stop=[stop, "never"], return_token_ids=True)["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (whole[: whole.index(stop)], "stop", stop)
    assert tokenizer().decode(cut["token_ids"]).endswith(stop)
    kept = complete(client, prompt="hello", max_tokens=30, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == whole[: whole.index(stop) + 2]
    assert complete(client, prompt="hello", echo=True)["choices"][0]["text"] == "hello" + whole[:8]
    assert complete(client, prompt="hello", max_tokens=3)["choices"][0]["finish_reason"] == "length"
    rest = complete(client, prompt="hello", max_tokens=None, ignore_eos=True)
    assert rest["usage"]["completion_tokens"] == 256 - 5


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_adds_up_to_the_answer(client: httpx.Client) -> None:
    body = {"prompt": "hello", "n": 2, "seed": 3, "max_tokens": 20, "logprobs": 1, "return_token_ids": True}
    whole = complete(client, **{**body, "temperature": 1})
    chunks = events(client, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [t for c in mine for t in c["token_ids"]] == choice["token_ids"]
        assert [o for c in mine for o in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["weight_versions"] == choice["weight_versions"]
        assert mine[0]["prompt_token_ids"] == HELLO


def test_a_stream_holds_back_what_may_be_a_stop(client: httpx.Client) -> None:
    whole = complete(client, prompt="hello", max_tokens=30)["choices"][0]["text"]
    stop = whole[3:6]
    chunks = events(client, "/v1/completions", prompt="hello", temperature=0, max_tokens=30, stop=stop)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_chat(client: httpx.Client) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {"messages": said, "temperature": 0, "max_completion_tokens": 9, "return_token_ids": True, "logprobs": True,
            "top_logprobs": 2}  # fmt: skip
    answer = client.post("/v1/chat/completions", json=body).json()
    prompt = tokenizer().encode("user:hi.a:")
    assert answer["prompt_token_ids"] == prompt
    (choice,) = answer["choices"]
    assert choice["token_ids"] == generate(tiny_model(), prompt, 9)
    assert choice["message"] == {"role": "assistant", "content": tokenizer().decode(choice["token_ids"])}
    assert len(choice["logprobs"]["content"]) == 9
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == choice["logprobs"]["content"][0]["token"]
    chunks = events(client, "/v1/chat/completions", **body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == choice["message"]["content"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body, said",
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "larger than"),
        ({}, "prompt"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "no tokens"),
        ({"prompt": [1, "a"]}, "must be text"),
        ({"prompt": [True]}, "must be text"),
        ({"prompt": [35]}, "vocabulary"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": "a", "stop_token_ids": [99]}, "vocabulary"),
        ({"prompt": "a", "max_tokens": 0}, "nothing to generate"),
        ({"prompt": "a", "max_tokens": 256}, "do not fit"),
        ({"prompt": "a" * 256, "max_tokens": None}, "nothing to generate"),
        ({"prompt": "a", "n": 0}, "n must be"),
        ({"prompt": "a", "n": 41}, "at most 40"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty is not implemented"),
        ({"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias is not implemented"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a valid number"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(client: httpx.Client, body: Any, said: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/completions", content=content)
    assert answer.status_code == (413 if said == "larger than" else 400)
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["code"] == answer.status_code
    assert complete(client, prompt="hello")["choices"]


def test_a_chat_that_the_template_refuses(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert answer.status_code == 400
    assert "only text" in answer.json()["error"]["message"]


def test_control_routes_need_the_token(client: httpx.Client) -> None:
    control = (("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("GET", "/deltawire/status"))
    for wrong in (None, "Bearer wrong", TOKEN, "Basic " + TOKEN, "Bearer " + TOKEN + "x"):
        for method, route in control:
            headers = {} if wrong is None else {"authorization": wrong}
            assert client.request(method, route, headers=headers).status_code == 401
    right = {"authorization": f"Bearer {TOKEN}"}
    assert client.get("/is_paused", headers=right).json() == {"is_paused": False}
    status = client.get("/deltawire/status", headers=right).json()
    assert (status["version"], status["lag"], status["state"], status["model"]) == (0, 0, "healthy", "letters")
    assert TOKEN not in json.dumps(status)
    assert client.get("/metrics").status_code == 200


def test_the_token_may_guard_everything(run: Path) -> None:
    with serving(run, token=TOKEN, guard_all=True) as (_, client):
        assert client.get("/health").json() == {"state": "healthy"}
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        right = {"authorization": f"Bearer {TOKEN}"}
        assert client.post("/v1/completions", json={"prompt": "a"}, headers=right).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_may_reach_it_only_with_a_token(host: str, run: Path) -> None:
    with pytest.raises(Misconfigured, match="DELTAWIRE_TOKEN"):
        RolloutServer.open(ServerOptions(run=str(run), host=host))


# ── control and limits ───────────────────────────────────────────────────────────────────────────────────────────────


def test_pause_and_resume(client: httpx.Client) -> None:
    right = {"authorization": f"Bearer {TOKEN}"}
    assert client.post("/pause?mode=never", headers=right).status_code == 400
    assert client.post("/pause?mode=keep", headers=right).json() == {"status": "paused"}
    assert client.get("/is_paused", headers=right).json() == {"is_paused": True}
    got: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: got.append(complete(client, prompt="hello")))
    asking.start()
    asking.join(0.2)
    assert asking.is_alive()
    assert client.post("/resume", headers=right).json() == {"status": "resumed"}
    asking.join(60)
    assert got[0]["choices"][0]["finish_reason"] == "length"


def test_a_full_queue_says_when_to_come_back(served: tuple[RolloutServer, httpx.Client]) -> None:
    server, client = served
    server.scheduler.pause("keep")
    asking = threading.Thread(target=complete, args=(client,), kwargs={"prompt": "hello", "n": 40})
    asking.start()
    try:
        while server.scheduler.waiting < 40:
            threading.Event().wait(0.005)
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    finally:
        server.scheduler.resume()
        asking.join(60)


def test_a_request_that_takes_too_long_to_read_is_given_up_and_what_waits_for_it_never_starts(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, release, started = CompletionRequest.prompts, threading.Event(), []

    def slow(request: CompletionRequest, *args: Any) -> Any:
        started.append(request.prompt)
        release.wait(120)
        return read(request, *args)

    monkeypatch.setattr(CompletionRequest, "prompts", slow)
    monkeypatch.setattr(app, "PREPARE_S", 0.05)
    # again where its thread was not even started in time
    while len(started) < app.PREPARED_AT_ONCE:
        answer = client.post("/v1/completions", json={"prompt": "slow"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "took more than 0.05 s" in answer.text
    assert client.post("/v1/completions", json={"prompt": "never"}).status_code == 503
    monkeypatch.setattr(app, "PREPARE_S", 120.0)
    release.set()
    assert complete(client, prompt="next")["usage"]["prompt_tokens"] == 4
    assert started == ["slow"] * app.PREPARED_AT_ONCE + ["next"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_sequences_along(
    served: tuple[RolloutServer, httpx.Client], stream: bool
) -> None:
    server, _ = served
    scheduler = server.scheduler
    scheduler.pause("keep")
    before = scheduler.counts.aborted
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "n": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            while scheduler.waiting < 3:
                threading.Event().wait(0.005)
        # they are counted before they leave the queue
        while scheduler.counts.aborted < before + 3 or scheduler.waiting or scheduler.running:
            threading.Event().wait(0.005)
    finally:
        server.scheduler.resume()


def test_dashboards_get_what_they_ask_for(tmp_path: Path) -> None:
    gauges, model = CollectorRegistry(), tiny_model()
    folder = checkpoint(tmp_path / "model", model)
    with publisher(tmp_path / "run", folder, on_version=Prometheus(registry=gauges)) as it:
        it.publish(model).result(60)
        with serving(tmp_path / "run", poll=0.05) as (_, client):
            nudge(model, 1)
            it.publish(model).result(60)
            while client.get("/deltawire/status").json()["syncs"] == 0:
                time.sleep(0.05)
            text = client.get("/metrics").text + generate_latest(gauges).decode()
    # the page of `deltawire dash` reads it from the bucket
    (beat,) = heartbeats(Run.open(str(tmp_path / "run")))
    assert [(sync.version, sync.error) for sync in beat.syncs] == [(1, "")]
    assert {"fetch", "decode", "apply", "prove", "pause"} <= beat.syncs[0].timings.keys()
    # Grafana from Prometheus
    exported = {found.group() for found in re.finditer(r"^deltawire_\w+", text, re.MULTILINE)}
    phases = set(re.findall(r'deltawire_sync_seconds{phase="(\w+)"}', text))
    board = json.loads((Path(__file__).parents[3] / "deploy/grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += [variable["query"] for variable in board["templating"]["list"]]
    names = {name for expression in asked for name in re.findall(r"\bdeltawire_\w+", expression)}
    assert names - exported == set()
    assert {"deltawire_lag_versions", "deltawire_sync_seconds", "deltawire_state", "deltawire_bytes"} <= names
    assert {"pause", "total"} <= phases
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_metrics_count(client: httpx.Client) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    complete(client, prompt="hello", max_tokens=8)
    client.get("/no/such/route")
    after = read()
    assert after["deltawire_generated_tokens_total"] - before["deltawire_generated_tokens_total"] == 8
    assert after["deltawire_version"] == 0
    assert [after[f'deltawire_state{{state="{state}"}}'] for state in ("healthy", "paused")] == [1, 0]
    assert after['deltawire_requests_total{route="other",status="404"}'] >= 1


def test_ending_lets_requests_finish_or_ends_them(run: Path) -> None:
    got: list[dict[str, Any]] = []
    for grace, reason in ((120.0, "length"), (0.0, "abort")):
        got.clear()
        with serving(run, grace=grace) as (server, client):
            if not grace:
                server.scheduler.pause("keep")
            ask = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
            asking = threading.Thread(target=lambda c=client, a=ask: got.append(complete(c, **a)))
            asking.start()
            # or it has come and gone
            while not server.scheduler.running and not server.scheduler.waiting and not got:
                threading.Event().wait(0.001)
            server.stop()
            asking.join(120)
        assert got[0]["choices"][0]["finish_reason"] == reason


def test_without_a_tokenizer_token_ids_do(run: Path, tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path / "bare")
    options = {"model": str(tmp_path / "bare")}
    with serving(run, **options) as (server, client):
        # a folder without weights: all of them came from the run
        answer = complete(client, prompt=HELLO, return_token_ids=True, logprobs=0)
        assert answer["choices"][0]["token_ids"] == generate(tiny_model(), HELLO, 8)
        assert answer["choices"][0]["text"] == ""
        assert client.post("/v1/completions", json={"prompt": "hello"}).status_code == 400
        assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
        assert server.loaded.tokenizer is None
