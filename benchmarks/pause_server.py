"""What clients of a real vLLM or SGLang notice of a sync: server and clients are processes on cores of their own.

    python benchmarks/pause_server.py --shape 0.6B --phases control packed context throughput prefixes rivals
    python benchmarks/pause_server.py --shape 8B --phases control packed
    python benchmarks/pause_server.py --shape 30B-A3B --layers 6 --phases control packed equal

The model is random, and so is which weights change. All versions are made before anything is measured. To publish one
is then to link its objects into the bucket, data first, manifest and head last: the publisher takes no part of the
machine.

Phases, one after the other, against one server:
    control      versions are published to another run, which nobody follows: the same load without a sync
    packed …     (an encoding) versions are published to the run that the server follows, one at a time
    throughput   slots of ten seconds with one sync and with none, in turn, under the same streams
    memory       versions while nothing is generated: what the worker allocates on its device for them
    prefixes     requests with one prefix under every version: none may find what another version computed
    equal        the weights of the server against a fresh load of the last version by the engine's own loader
    trainer      a real trainer on cores of its own (AdamW over constant gradients, fp32 masters) publishes to the run
                 as it goes: windows in which a version is served, and those between them
    rivals       other ways to new weights, driven as trainers do, with generation paused around them: vLLM's
                 `reload_weights`; its sparse loader (`load_checkpoint_weight_patches`), which is given what changed,
                 decoded, in the worker's memory; and ModelExpress (where it is installed), from its delta in host
                 memory: XOR on the checkpoint of the host, then its installer

For each version the longest gap between two tokens of any stream is taken, from when it is published until a moment
after it is served. The control phase is cut into windows of the same lengths; with `--alone`, where one lasts seconds,
each is followed by one of its length in which a version is published that nobody follows. In milliseconds:
    gap        longest gap of a window: p50, p99, max over all syncs; of the control run beside it
    excess     gap of the syncs less gap of the control run, at p99 and max
    step       median time between two tokens of a stream
    served     from the commit of a version until it is served and proven, the wait for the next poll included
    total      the same from when the server has noticed it; fetch, decode, pause, stop, apply, prove: parts of it
A phase with `preemptions` above 0 measured a server with too little memory for the streams: clients wait for it.
`--view fp8-block` publishes the same steps as fp8 (docs/fp8.md), to a server that was started from an fp8 checkpoint.
With `--engine sglang`, memory and rivals are not measured.
`--alone FOLDER` is for a model of which the machine has no room for two: its checkpoint is made in this folder, which
should be in memory, and all versions before the server starts. At the end the server is stopped, the last version is
computed again and written over the checkpoint, and a fresh load of it must have the weights that the server had.
`--chart RESULT.json CHART.svg` draws tokens around a sync.
`--make FOLDER` only makes the versions of these phases; `--made FOLDER` measures with what that has made, or is making.
`--turns FOLDER` is for measuring several servers that are started at once: before each phase it waits for a file of its
name there, and writes NAME.done after it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / "engines" / engine) for engine in ("vllm", "sglang"))]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True},
    "tiny-moe": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": False,
                 "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "30B-A3B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip
ENCODINGS = ("packed", "context", "raw")
PHASES = ("control", *ENCODINGS, "throughput", "memory", "prefixes", "equal", "rivals", "trainer")
PROMPT = 32
EVERY_S = 10.0
"""Time between two syncs of the throughput phase."""
SLOT_S = 1.2
"""Time between two syncs of the other phases, at least."""
AFTER_S = 0.25
"""How long a window goes on once the version is served."""
_SHARD = 1 << 31
"""Bytes of a file of a checkpoint that is written in several."""
_AT_ONCE = 1 << 26
"""Weights that are changed at a time, when versions are made."""
FEW = 1e-4
"""Share of the weights that change where only the number of versions matters."""


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sizes(shape: str, layers: int) -> dict[str, Any]:
    return SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})


def make_model(folder: Path, sizes: dict[str, Any], device: str) -> Path:
    """A random bf16 checkpoint with config and tokenizer, made on the device: seconds for 16 GB."""
    from safetensors.torch import save_file

    weights, _ = random_weights(sizes, device)
    _write_config(folder, sizes)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_config(folder: Path, sizes: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    experts = sizes.get("num_experts", 0)
    more = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []} if experts else {}
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3", **sizes, **more, max_position_embeddings=4096, dtype="bfloat16",
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(sizes["vocab_size"])}, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3"
    ).save_pretrained(folder)


def random_weights(sizes: dict[str, Any], device: str) -> tuple[dict[str, Any], Any]:
    """Random weights, and the memory that they lie in one after the other."""
    import torch

    shapes = dict(_tensors(sizes))
    memory = torch.empty(sum(map(math.prod, shapes.values())), dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    tensors, at = {}, 0
    for name, shape in shapes.items():
        made = tensors[name] = memory[at : at + math.prod(shape)].view(shape)
        made.fill_(1.0) if len(shape) == 1 else made.normal_(0, 0.02, generator=generator)
        at += made.numel()
    return tensors, memory


def write_alone(folder: Path, sizes: dict[str, Any], weights: dict[str, Any], view: str | None) -> None:
    """Write weights, or the view of them, as a checkpoint: several files at once, and no copy of all in between."""
    from deltawire.core.full import INDEX_NAME
    from deltawire.models import ModelView
    from deltawire.views.blocks import Blocks, with_config
    from deltawire.views.device import BlockModel

    _write_config(folder, sizes)
    tensors = weights
    if view:
        source = ModelView(weights)
        viewed = BlockModel(source, Blocks(source.schema, view))
        tensors, config = viewed.tensors, folder / "config.json"
        config.write_bytes(with_config(config.read_bytes(), viewed.schema, view))
    shards: list[dict[str, Any]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > _SHARD:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_write_shard, [folder / name for name in names], shards))
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(t.nbytes for t in tensors.values())
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))


def _write_shard(path: Path, tensors: dict[str, Any]) -> None:
    import torch

    from deltawire.core import container

    names = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    head = container.build(((n, names[t.dtype], tuple(t.shape)) for n, t in tensors.items()), {"format": "pt"})
    with path.open("wb") as out:
        out.write(head)
        for tensor in tensors.values():
            out.write(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)


def write_last(folder: Path, sizes: dict[str, Any], device: str, order: list[Any], view: str | None) -> None:
    """Compute the last version from nothing but the seeds, and write it over the checkpoint in a folder."""
    import torch

    weights, memory = random_weights(sizes, device)
    generator = torch.Generator(device).manual_seed(1)
    for _, density in order:
        _move(memory, density, generator)
    write_alone(folder, sizes, weights, view)


def _tensors(sizes: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Qwen3, or of Qwen3-MoE where there are experts, as in a published checkpoint."""
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not sizes["tie_word_embeddings"]:
        yield "lm_head.weight", (sizes["vocab_size"], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.self_attn.k_norm.weight", (head,)
        yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        if experts := sizes.get("num_experts", 0):
            yield f"{at}.mlp.gate.weight", (experts, hidden)
        inner = sizes["moe_intermediate_size"] if experts else sizes["intermediate_size"]
        for mlp in [f"{at}.mlp.experts.{i}" for i in range(experts)] or [f"{at}.mlp"]:
            yield f"{mlp}.gate_proj.weight", (inner, hidden)
            yield f"{mlp}.up_proj.weight", (inner, hidden)
            yield f"{mlp}.down_proj.weight", (hidden, inner)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def read_streams(port: int, streams: int, tokens: int, out: Path) -> None:
    """Read completions until standard input ends; write when each token arrived, per stream and request."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    rows: list[tuple[float, int]] = []

    async def stream(number: int) -> None:
        rng, request = random.Random(os.getpid() * 1000 + number), number << 20
        while not stop.is_set():
            # lengths from the first one on are spread, so that streams do not end together
            shortest = tokens // 2 if request & 0xFFFFF else 16
            request += 1
            body = json.dumps({
                "model": "m", "prompt": [rng.randrange(5, 200) for _ in range(PROMPT)],
                "max_tokens": rng.randrange(shortest, tokens * 3 // 2), "ignore_eos": True, "stream": True,
            })  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            while data := await reader.read(1 << 16):
                now = time.monotonic()
                rows.extend([(now, request)] * data.count(b"data: {"))
                if stop.is_set():
                    break
            writer.close()

    await asyncio.gather(*(stream(number) for number in range(streams)))
    np.save(out, np.array(rows, np.float64))


class Clients:
    """Processes that read streams; `stop` returns when each token came, an array per request."""

    def __init__(self, port: int, streams: int, cores: list[int], folder: Path, tokens: int) -> None:
        self._files, self._processes = [], []
        for number, core in enumerate(cores[:streams]):
            share = len(range(number, streams, len(cores)))
            self._files.append(folder / f"tokens-{core}-{time.monotonic_ns()}.npy")
            command = [sys.executable, __file__, "--as", "clients", str(port), str(share), str(tokens),
                       str(self._files[-1])]  # fmt: skip
            # a session of its own: Linux shares cores between sessions, and one that is busy elsewhere may wait long
            self._processes.append(_pinned(command, [core], stdin=subprocess.PIPE, start_new_session=True))

    def stop(self) -> list[np.ndarray]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"x")
            process.stdin.close()
        for process in self._processes:
            process.wait(120)
        requests = []
        for file in self._files:
            rows = np.load(file)
            rows = rows[np.lexsort((rows[:, 0], rows[:, 1]))]
            requests += np.split(rows[:, 0], np.flatnonzero(np.diff(rows[:, 1])) + 1)
            file.unlink()
        return requests


def _pinned(command: list[str], cores: list[int], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores), **options)


def _pin_session(session: int, cores: list[int]) -> None:
    """Tie all threads of a server's processes to cores; those that they start later inherit it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # after the name, which may contain anything: state, parent, group, session
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                for task in (stat.parent / "task").iterdir():
                    os.sched_setaffinity(int(task.name), cores)


# ── the versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_versions(
    model: Path,
    folder: Path,
    device: str,
    order: list[tuple[str, float]],
    last: bool,
    view: str | None = None,
    sizes: dict[str, Any] | None = None,
) -> None:
    """Publish version 0, a reference to the model, version 1, which is the same, and one for each (encoding, density).
    With a view, version 0 is the view of the model's weights, written to folder/served too. With `sizes`, the model is
    made first and its checkpoint, of the view if there is one, is what version 0 points to.

    What each adds to the bucket is kept as folder/VERSION, as links (that of 0 with 1), and a line about it in
    folder/made.jsonl. With `last`, the newest version is written as a checkpoint, and what one more step would change
    as the rivals need it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from deltawire.engines.live.launch import write_version
    from deltawire.trainer import Publisher

    def note(line: dict[str, Any]) -> None:
        with open(folder / "made.jsonl", "a") as out:
            out.write(json.dumps(line) + "\n")

    folder.mkdir(parents=True, exist_ok=True)
    clock = time.monotonic()
    if sizes:
        weights, memory = random_weights(sizes, device)
        write_alone(model, sizes, weights, view)
        changing = [memory]
    else:
        weights = load_file(model / "model.safetensors", device=device)
        changing = [*weights.values()]
    if sizes:
        print(f"{model} is written after {time.monotonic() - clock:.0f} s", flush=True)
    generator = torch.Generator(device).manual_seed(1)
    bucket, seen = folder / "made", {}
    publisher, current = None, ""
    for version, (encoding, density) in enumerate([(order[0][0], 0.0), *order], 1):
        if encoding != current:
            if publisher is not None:
                publisher.close()
                # its copy of the model is freed with it, not after the next one is made
                publisher = None
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
            source: dict[str, Any] = {"view": view, "files": model} if view else {"reference": model}
            source |= {"reference": model} if sizes else {}
            publisher, current = Publisher(bucket, encoding=encoding, anchor_ratio=100.0, **source), encoding
            if version > 1:
                publisher.resume(weights)
            elif view and not sizes:
                publisher.publish(weights).result(600)
                write_version(str(bucket), 0, folder / "served")
        if density:
            for tensor in changing:
                _move(tensor, density, generator)
        assert publisher is not None
        result = publisher.publish(weights).result(600)
        assert result.version == version, f"version {result.version} where {version} was expected"
        seen |= _keep_new(bucket, seen, folder / str(version))
        note({
            "version": version, "encoding": encoding, "changed": result.changed, "bytes": result.bytes,
            "timings": result.timings, "at": time.time(),
        })  # fmt: skip
        if sizes:
            print(f"version {version} is made after {time.monotonic() - clock:.0f} s", flush=True)
    assert publisher is not None
    publisher.close()
    if last and view:
        write_version(str(bucket), version, folder / "last")
    elif last:
        full = folder / "last"
        shutil.copytree(model, full, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(weights, full / "model.safetensors", metadata={"format": "pt"})
        patches = {}
        for name, tensor in weights.items():
            before = tensor.reshape(-1).clone()
            where = _move(tensor, order[0][1], generator)
            patches |= {f"{name}.shape": torch.tensor(tensor.shape), f"{name}.indices": where,
                        f"{name}.old": before[where], f"{name}.new": tensor.reshape(-1)[where]}  # fmt: skip
        save_file(patches, folder / "patches.safetensors")
    note({"done": True})


def _move(tensor: Any, density: float, generator: Any) -> Any:
    """Change about so many of the weights by the smallest step, up or down. Returns which.

    Small weights change more often, as in training: a step of one size is more of their smallest step.
    """
    import torch

    moved = []
    for number, bits in enumerate(tensor.reshape(-1).view(torch.int16).split(_AT_ONCE)):
        scaled = torch.exp2(((bits >> 7) & 255).float() - 134)
        scaled *= torch.rand(bits.shape, device=bits.device, generator=generator)
        # of a sample, the step that moves so many
        found = scaled[:: max(1, bits.numel() >> 20)].sort().values
        where = (scaled <= found[round(density * (found.numel() - 1))]).nonzero().reshape(-1)
        signs = torch.randint(0, 2, where.shape, device=bits.device, generator=generator)
        # a zero only away from zero: what lies before it is a NaN
        signs |= bits[where] & 0x7FFF == 0
        bits[where] += (2 * signs - 1).to(torch.int16)
        moved.append(where + number * _AT_ONCE)
    return torch.cat(moved)


def _keep_new(bucket: Path, seen: dict[str, tuple[int, int]], kept: Path) -> dict[str, tuple[int, int]]:
    """Link what is new in a bucket, or was replaced, to a folder of its own."""
    new = {}
    for path in bucket.rglob("*"):
        key, found = str(path.relative_to(bucket)), path.stat()
        if path.is_file() and not path.name.startswith(".") and seen.get(key) != (found.st_ino, found.st_mtime_ns):
            new[key] = (found.st_ino, found.st_mtime_ns)
            (kept / key).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, kept / key)
    return new


class Versions:
    """Versions that were made before, to be published one by one."""

    def __init__(self, folder: Path, made: list[dict[str, Any]]) -> None:
        self._folder, self._made, self._next = folder, made, 1

    def publish(self, run: Path, version: int | None = None) -> dict[str, Any]:
        """The next version; `at` is when it was committed. With `version`, that one, out of turn."""
        number = self._next if version is None else version
        self._next += version is None
        kept = self._folder / str(number)
        keys = [str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()]
        for key in sorted(keys, key=lambda key: (key.startswith("versions/"), key == "head.json")):
            (run / key).parent.mkdir(parents=True, exist_ok=True)
            temp = run / f"{key}.link"
            os.link(kept / key, temp)
            os.replace(temp, run / key)
            # where it is the same file already, nothing was renamed
            temp.unlink(missing_ok=True)
        return {**self._made[number - 1], "at": time.monotonic()}


# ── a trainer ────────────────────────────────────────────────────────────────────────────────────────────────────────

LEARNING_RATE = 2.5e-7
"""Constant gradients make every step of Adam a whole one: this much of it changes about 1 % of the weights."""
STEP_S = 5.0
"""Time from one publish of the trainer to the next."""


def train(run: Path, publishes: int, every_s: float, out: Path) -> None:
    """Continue the run with steps of AdamW on the CPU, and publish every so many seconds; a line for each publish."""
    import torch

    import deltawire as dw

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    version = dw.Run.open(run).newest()
    live = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in dw.Run.open(run).schema.tensors}
    dw.Replica(run, heartbeat=0).sync(live, version)
    masters = {name: tensor.float().requires_grad_() for name, tensor in live.items()}
    for tensor in masters.values():
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE, weight_decay=0.0)
    with dw.Publisher(run, wire_dtype="bf16", anchor_ratio=100.0, takeover=True) as publisher, out.open("a") as lines:
        publisher.resume(masters)
        for _ in range(publishes):
            began = time.monotonic()
            optimizer.step()
            stepped = time.monotonic()
            published = publisher.publish(masters)
            held = time.monotonic() - stepped
            result = published.result(600)
            line = {"version": result.version, "step_s": stepped - began, "held_s": held, "changed": result.changed,
                    "bytes": result.bytes}  # fmt: skip
            print(json.dumps(line), file=lines, flush=True)
            # the rest of the step: on a real machine, forward and backward on another device
            time.sleep(max(0.0, began + every_s - time.monotonic()))


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill the report phase by phase: what is there when a later one fails was measured."""
    from tests.engines.live.live_server import ON_GPU

    cores = sorted(os.sched_getaffinity(0))
    half, quarter = max(1, len(cores) // 2), max(1, len(cores) // 4)
    server_cores, client_cores = cores[:half], cores[half + quarter :] or cores
    sizes = _sizes(options.shape, options.layers)
    report |= {
        "engine": options.engine, "shape": options.shape, "sizes": sizes, "density": options.density,
        "streams": options.streams, "poll_s": options.poll, "view": options.view,
        "weights": sum(int(np.prod(shape)) for _, shape in _tensors(sizes)),
    }  # fmt: skip
    with ExitStack() as opened:
        temporary = tempfile.TemporaryDirectory(prefix="deltawire-pause-", dir=options.scratch)
        folder, clock = Path(opened.enter_context(temporary)), time.monotonic()
        followed, other = folder / "run", folder / "other"
        device = "cuda" if ON_GPU else "cpu"
        if options.alone:
            place = tempfile.TemporaryDirectory(prefix="deltawire-alone-", dir=options.alone)
            model = Path(opened.enter_context(place))
        else:
            model = options.model or make_model(folder / "model", sizes, device)
        making = _Making(options, model, folder, device)
        making.wait(None if options.alone else 1)
        if options.alone:
            making.end()
            report["start"] = {"made_s": time.monotonic() - clock, "made": _host_memory()}
            print(f"all versions are made: {report['start']}", flush=True)
        versions = Versions(making.folder, making.made)
        versions.publish(followed)
        versions.publish(other, 1)
        made = importlib.import_module(f"{options.engine}_live").Server
        served = making.folder / "served" if options.view and not options.alone else model
        clock = time.monotonic()
        server = made(served, folder / "log", run=followed, flags=_flags(options), DELTAWIRE_POLL=str(options.poll),
                      DELTAWIRE_HEARTBEAT=None)  # fmt: skip
        try:
            server.wait(limit=500)
            print(f"server is up: {server.status()}", flush=True)
            if options.alone:
                report["start"] |= {"server_s": time.monotonic() - clock, "served": _host_memory(server.process.pid)}
            making.wait()
            # not before: what is compiled at the start may use all cores
            _pin_session(server.process.pid, server_cores)
            print(f"{len(making.made)} versions are made", flush=True)
            cores_left = cores[half : half + quarter] or cores
            phases = _Phases(
                options, report, server, versions, followed, other, client_cores, cores_left, making.folder, save
            )
            phases.run()
            report["status"] = server.status()
            if options.alone and "equal" in options.phases:
                phases.compare_alone(lambda: write_last_elsewhere(model, sizes, device, options), model)
        except BaseException:
            print(server.tail())
            raise
        finally:
            making.stop()
            server.stop()
            if options.log:
                options.log.write_bytes((folder / "log").read_bytes())


def write_last_elsewhere(model: Path, sizes: dict[str, Any], device: str, options: argparse.Namespace) -> None:
    """In a process of its own, whose memory on the device is free again at its end."""
    given = json.dumps([str(model), sizes, device, [*_order(options)], options.view])
    subprocess.run([sys.executable, __file__, "--as", "last", given], check=True)


def _host_memory(session: int | None = None) -> dict[str, float]:
    """GB of host memory: in use and in shared memory, of the machine; private to the processes of a session."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {line.partition(":")[0]: int(line.split()[1]) / 1e6 for line in lines}
    result = {"total": found["MemTotal"], "used": found["MemTotal"] - found["MemAvailable"], "shared": found["Shmem"]}
    if session is not None:
        result["private"] = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                    said = dict(line.split(":", 1) for line in (stat.parent / "status").read_text().splitlines())
                    result["private"] += int(said.get("RssAnon", "0").split()[0]) / 1e6
    return {name: round(size, 2) for name, size in result.items()}


def _flags(options: argparse.Namespace) -> list[str]:
    requests = str(max(64, options.streams))
    if options.engine == "sglang":
        own = ["--context-length", "4096", "--max-running-requests", requests, "--cuda-graph-max-bs-decode", requests,
               "--max-total-tokens", str(2048 * options.streams), "--mem-fraction-static", "0.4"]  # fmt: skip
    else:
        own = ["--no-enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", "4096", "--max-num-seqs",
               requests, "--worker-extension-cls", "vllm_test_plugin.Probe"]  # fmt: skip
    return [*own, *shlex.split(options.flags)]


def _order(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Encoding and density of all versions, in the order in which the phases publish them."""
    encodings = _encodings(options)
    # two of each, to compile what is compiled on first use
    for encoding in encodings:
        yield from [(encoding, options.density)] * 2
    for phase in options.phases:
        if phase in ENCODINGS:
            yield from [(phase, options.density)] * _count(options, phase)
        elif phase == "throughput":
            yield from [(encodings[0], options.density)] * sum(_slots(options))
        elif phase == "memory":
            for encoding in encodings:
                yield from [(encoding, options.density)] * _of_memory(options)
        elif phase == "prefixes":
            yield from [(encodings[0], FEW)] * options.syncs[0]


def _of_memory(options: argparse.Namespace) -> int:
    """Versions of the memory phase."""
    return 1 if options.alone else 3


def _slots(options: argparse.Namespace) -> list[bool]:
    """Whether each slot of the throughput phase has a sync."""
    return [number % 4 in (1, 2) for number in range(2 * round(options.seconds / EVERY_S / 2))]


def _encodings(options: argparse.Namespace) -> list[str]:
    return [phase for phase in options.phases if phase in ENCODINGS] or ["packed"]


def _count(options: argparse.Namespace, encoding: str) -> int:
    return int(options.syncs[: _encodings(options).index(encoding) + 1][-1])


class _Making:
    """The process that makes all versions, or the folder where another has made them."""

    def __init__(self, options: argparse.Namespace, model: Path, folder: Path, device: str) -> None:
        self.folder, self.made, self._done = options.made or folder, list[dict[str, Any]](), False
        self._process = None
        if not options.made:
            last = {"equal", "rivals"} & {*options.phases} != set() and not options.alone
            sizes = _sizes(options.shape, options.layers) if options.alone else None
            given = json.dumps([str(model), str(folder), device, [*_order(options)], last, options.view, sizes])
            self._process = subprocess.Popen([sys.executable, __file__, "--as", "publisher", given])

    def wait(self, version: int | None = None) -> None:
        """Until a version is made; without one, until all are."""
        lines = self.folder / "made.jsonl"
        while not self._done and (version is None or len(self.made) < version):
            failed = self._process is not None and self._process.poll()
            # what follows the last line break is still being written
            text = lines.read_text().split("\n")[:-1] if lines.exists() else []
            found = [json.loads(line) for line in text]
            self.made[:] = [line for line in found if "version" in line]
            self._done = len(found) > len(self.made)
            if failed:
                raise SystemExit("the process that makes versions has failed")
            time.sleep(0.2)

    def end(self) -> None:
        """Wait until the process has ended by itself."""
        if self._process is not None and self._process.wait(120):
            raise SystemExit("the process that makes versions has failed")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)


def wait_for_turn(folder: Path | None, phase: str) -> None:
    """Say that a phase may begin, and wait until there is a file of its name in the folder (`--turns`)."""
    if folder:
        (folder / f"{phase}.ready").touch()
        while not (folder / phase).exists():
            time.sleep(0.2)


def end_turn(folder: Path | None, phase: str) -> None:
    if folder:
        (folder / f"{phase}.done").touch()


class _Phases:
    def __init__(
        self, options: argparse.Namespace, report: dict[str, Any], server: Any, versions: Versions, followed: Path,
        other: Path, cores: list[int], cores_left: list[int], folder: Path, save: Callable[[], None],
    ) -> None:  # fmt: skip
        self.options, self.report, self.server, self.versions = options, report, server, versions
        self.cores_left = cores_left
        self.followed, self.other, self.cores, self.folder, self.save = followed, other, cores, folder, save
        self.quiet: tuple[Gaps, Window] | None = None
        """Of the control phase, and when it was measured."""
        self.device: dict[str, int] = {}
        """Memory of the device before the first version."""

    def run(self) -> None:
        if "memory" in self.options.phases:
            self.device = self._rpc("device_memory")[0]
        # what an engine compiles for its first requests is no part of a phase
        self._clients().stop()
        for _ in range(2 * len(_encodings(self.options))):
            self._sync()
        for phase in self.options.phases:
            if phase == "equal" and self.options.alone:
                # last of all, without the server
                continue
            wait_for_turn(self.options.turns, phase)
            clock, preempted = time.monotonic(), self._preemptions()
            if phase in ENCODINGS:
                found = self._syncs(phase)
            else:
                found = getattr(self, f"_{phase}")()
            found |= {"preemptions": self._preemptions() - preempted}
            self.report[phase] = {**found, "seconds": round(time.monotonic() - clock, 1)}
            shown = {key: value for key, value in self.report[phase].items() if key != "timeline"}
            print(f"{phase}: {json.dumps(shown)}", flush=True)
            self.save()
            end_turn(self.options.turns, phase)

    def _preemptions(self) -> int:
        """Requests that the server has interrupted for want of memory for keys and values: their clients wait."""
        lines = self.server.http.get("/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_preemptions_total"))

    def _clients(self) -> Clients:
        found = Clients(self.server.port, self.options.streams, self.cores, self.folder, self.options.tokens)
        # until requests have begun at many different times
        time.sleep(self.options.settle)
        return found

    def _sync(self) -> tuple[dict[str, Any], dict[str, Any]]:
        made = self.versions.publish(self.followed)
        return made, self.server.until(version=made["version"], limit=120)

    def _command(self) -> dict[str, Any]:
        """The next version, now: without waiting for a poll."""
        made = self.versions.publish(self.followed)
        self.server.http.post("/deltawire/sync", json={"version": made["version"]}).raise_for_status()
        return made

    def _control(self) -> dict[str, Any]:
        reading, began = self._clients(), time.monotonic()
        for _ in range(self.options.control or self.options.syncs[0]):
            step = time.monotonic()
            self.versions.publish(self.other, 2)
            self.server.status()
            time.sleep(max(0.0, step + SLOT_S - time.monotonic()))
        gaps, span = Gaps(reading.stop()), (began, time.monotonic())
        self.quiet = gaps, span
        return gaps.figures(_cut(span, [SLOT_S])) | {"timeline": gaps.timeline(began + 5)}

    def _syncs(self, encoding: str) -> dict[str, Any]:
        reading, windows, served, timings, size = self._clients(), [], [], [], []
        after: list[Window] = []
        if self.options.profile:
            self._rpc("note_staging", on=True)
        for _ in range(_count(self.options, encoding)):
            began = time.monotonic()
            made, status = self._sync()
            done = time.monotonic()
            time.sleep(AFTER_S)
            windows.append((began, end := time.monotonic()))
            served.append(done - made["at"])
            timings.append(status["timings"])
            size.append(made["bytes"])
            if self.options.alone:
                self.versions.publish(self.other, 2)
                time.sleep(end - began)
                after.append((end, time.monotonic()))
            time.sleep(max(0.0, began + SLOT_S - time.monotonic()))
        noted = self._rpc("note_staging", on=False)[0] if self.options.profile else None
        gaps = Gaps(reading.stop())
        found = {
            **gaps.figures(windows),
            **({"profile": _explained(gaps, windows, noted)} if noted else {}),
            "bytes": int(np.median(size)),
            "changed": made["changed"],
            "served_ms": _spread(served),
            **{f"{name}_ms": _spread([t[name] for t in timings if name in t]) for name in timings[-1]},
        }
        if same := gaps.longest(after) if after else self._quiet_gaps(windows):
            ours = gaps.longest(windows)
            found["control_gap_ms"] = _spread(same)
            found["excess_gap_ms"] = {
                name: 1e3 * float(np.percentile(ours, q) - np.percentile(same, q)) for name, q in PERCENTILES.items()
            }
        typical = windows[int(np.argsort(gaps.longest(windows))[len(windows) // 2])]
        return found | {"timeline": gaps.timeline(typical[0])}

    def _quiet_gaps(self, windows: Sequence[Window]) -> list[float]:
        """The longest gaps of the control phase in windows of these lengths."""
        if self.quiet is None:
            return []
        gaps, span = self.quiet
        return gaps.longest(_cut(span, [end - start for start, end in windows]))

    def _throughput(self) -> dict[str, Any]:
        """Slots without and with a sync, in the order A B B A: what drifts is the same for both. The error is that of
        the mean over pairs of neighbours."""
        reading, windows = self._clients(), []
        for syncs in _slots(self.options):
            began = time.monotonic()
            if syncs:
                self._sync()
            time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
            windows.append((began, time.monotonic()))
        gaps = Gaps(reading.stop())
        rates = np.array([gaps.rate(window) for window in windows])
        mixed = np.array(_slots(self.options))
        ratios = rates[mixed] / rates[~mixed]
        return {
            "tokens_per_s": rates.tolist(), "with_sync": mixed.tolist(), "slot_s": EVERY_S, "ratios": ratios.tolist(),
            "throughput_ratio": float(rates[mixed].sum() / rates[~mixed].sum()),
            "standard_error": float(ratios.std(ddof=1) / np.sqrt(ratios.size)) if ratios.size > 1 else None,
            "spread_without": float(rates[~mixed].std() / rates[~mixed].mean()),
        }  # fmt: skip

    def _memory(self) -> dict[str, Any]:
        """Bytes on the device beyond those before a sync, at most, while nothing else is computed."""
        found: dict[str, Any] = {}
        time.sleep(2)
        for encoding in _encodings(self.options):
            extra = []
            for _ in range(_of_memory(self.options)):
                before = self._rpc("device_memory")[0]
                made = self._command()
                after = self._rpc("device_memory")[0]
                extra.append(int(after["peak"]) - int(before["now"]))
            found[encoding] = {"changed": made["changed"], "extra_bytes": extra, "device": after}
        return {**found, "start": self.device, "host": _host_memory(self.server.process.pid)}

    def _prefixes(self) -> dict[str, Any]:
        """The first request under each version must find nothing in the cache, and the others what it left there."""
        prompt, across, within = [11 + i % 180 for i in range(600)], 0, 0
        count = self.options.syncs[0]
        each = self.options.requests // count
        for _ in range(count):
            self._command()
            for number in range(each):
                used = self.server.complete([*prompt, 5 + number], 1).json()["usage"]
                hit = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                across, within = (across + (hit > 0), within) if number == 0 else (across, within + (hit > 0))
        return {"requests": each * count, "versions": count, "hits_across": across, "hits_within": within}

    def _trainer(self) -> dict[str, Any]:
        """A window ends a moment after a version is served; it and the one before it, without a sync, are as long."""
        lines, count = self.folder / "trained.jsonl", self.options.syncs[0]
        command = [sys.executable, __file__, "--as", "trainer", str(self.followed), str(count), str(STEP_S), str(lines)]
        process = _pinned(command, self.cores_left)
        reading, windows, quiet, seen = self._clients(), [], [], self.server.status()["version"]
        try:
            while process.poll() is None and len(windows) < count:
                time.sleep(0.05)
                status = self.server.status()
                if status["version"] != seen:
                    # a sync takes less than half of the time between two
                    seen, now = status["version"], time.monotonic()
                    time.sleep(AFTER_S)
                    windows.append((now - 1.0, now + AFTER_S))
                    quiet.append((now - 1.0 - 1.0 - AFTER_S, now - 1.0))
        finally:
            process.kill()
            process.wait(60)
        gaps = Gaps(reading.stop())
        made = [json.loads(line) for line in lines.read_text().splitlines()]
        return gaps.figures(windows) | {
            "versions": len(windows), "changed": made[-1]["changed"], "bytes": made[-1]["bytes"],
            "control_gap_ms": _spread(gaps.longest(quiet)), "held_ms": _spread([line["held_s"] for line in made]),
            "step_of_trainer_ms": _spread([line["step_s"] for line in made]),
            "trainer_cores": len(self.cores_left),
        }  # fmt: skip

    def _equal(self) -> dict[str, Any]:
        # a fresh SGLang is a server too, and needs the same flags to start here
        flags = shlex.split(self.options.flags) if self.options.engine == "sglang" else []
        live, fresh = self.server.checksums(), self.server.fresh_checksums([self.folder / "last"], 1, flags)[0]
        return {
            "tensors": len(live), "equal": live == fresh, "version": self.server.status()["version"],
            "guard": self.server.status()["guard"],
            "different": [name for name in live if live[name] != fresh.get(name)][:5],
        }  # fmt: skip

    def compare_alone(self, write_last: Callable[[], None], model: Path) -> None:
        """The weights of the server, which ends, against a fresh load of the last version, computed anew."""
        from vllm_fresh import fresh_checksums

        clock, status = time.monotonic(), self.server.status()
        live = self._rpc("fingerprints")[0]
        self.server.stop()
        stopped = time.monotonic()
        write_last()
        written = time.monotonic()
        fresh = fresh_checksums([model], 1, ("--gpu-memory-utilization", "0.9"), fingerprints=True)[0]
        fresh = {name.split(":", 4)[-1]: value for name, value in fresh.items()}
        self.report["equal"] = {
            "tensors": len(live), "equal": live == fresh, "version": status["version"], "guard": status["guard"],
            "different": [name for name in live if live[name] != fresh.get(name)][:5],
            "stop_s": stopped - clock, "write_s": written - stopped, "load_s": time.monotonic() - written,
        }  # fmt: skip
        print(f"equal: {json.dumps(self.report['equal'])}", flush=True)
        self.save()

    def _rivals(self) -> dict[str, Any]:
        """There and back again, so that in the end the weights are those that the follower believes to have."""
        full, patches, found = self.folder / "last", self.folder / "patches.safetensors", {}
        before = self.server.checksums()
        ways: dict[str, Any] = {
            "full reload": lambda _: self._rpc("reload_weights", weights_path=str(full)),
            "vLLM's patch loader": lambda turn: self._rpc("load_patches", way=("new", "old")[turn % 2]),
            "ModelExpress": lambda _: self._rpc("load_model_express"),
        }
        self._rpc("read_patches", path=str(patches))
        express = self._rpc(
            "read_model_express", path=str(patches), checkpoint=str(full), copy=str(self.folder / "mx")
        )[0]
        if express:
            found["ModelExpress"] = {"absent": express}
            del ways["ModelExpress"]
        for name, way in ways.items():
            try:
                found[name] = self._rival(way)
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                self.server.http.post("/resume")
            print(f"{name}: { {k: v for k, v in found[name].items() if k != 'timeline'} }", flush=True)
        ours = self.report.get("packed", {}).get("longest_gap_ms")
        for rival in found.values():
            if ours and "longest_gap_ms" in rival:
                rival["ratio"] = {at: rival["longest_gap_ms"][at] / ours[at] for at in PERCENTILES}
        return {"ways": found, "same_weights_after": self.server.checksums() == before}

    def _rival(self, way: Any) -> dict[str, Any]:
        # the first ones compile and read what is new to them
        for turn in range(2):
            self._paused(way, turn)
        reading, windows, pauses = self._clients(), [], []
        for turn in range(self.options.rivals):
            began = time.monotonic()
            self._paused(way, turn)
            pauses.append(time.monotonic() - began)
            time.sleep(AFTER_S)
            windows.append((began, time.monotonic()))
            time.sleep(max(0.0, began + SLOT_S - time.monotonic()))
        gaps = Gaps(reading.stop())
        typical = windows[int(np.argsort(gaps.longest(windows))[len(windows) // 2])]
        return gaps.figures(windows) | {"pause_ms": _spread(pauses), "timeline": gaps.timeline(typical[0])}

    def _paused(self, way: Any, turn: int) -> None:
        self.server.http.post("/pause", params={"mode": "keep", "clear_cache": False}).raise_for_status()
        way(turn)
        self.server.http.post("/resume").raise_for_status()

    def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        answer = self.server.http.post("/collective_rpc", json={"method": method, "kwargs": arguments})
        return answer.raise_for_status().json()["results"]  # type: ignore[no-any-return]


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Window = tuple[float, float]
PERCENTILES = {"p50": 50, "p99": 99, "max": 100}


class Gaps:
    """Times between two tokens of all streams; windows of time are looked at."""

    def __init__(self, requests: Sequence[np.ndarray]) -> None:
        requests = [request for request in requests if request.size > 1]
        starts = np.concatenate([request[:-1] for request in requests])
        ends = np.concatenate([request[1:] for request in requests])
        order = np.argsort(ends)
        self._ends, self._gaps = ends[order], (ends - starts)[order]

    def within(self, window: Window) -> np.ndarray:
        first, last = np.searchsorted(self._ends, window)
        return self._gaps[first:last]

    def longest(self, windows: Sequence[Window]) -> list[float]:
        return [float(self.within(window).max(initial=0.0)) for window in windows]

    def longest_at(self, window: Window) -> Window:
        """When the longest gap of a window was."""
        first, last = np.searchsorted(self._ends, window)
        if first == last:
            return window[0], window[0]
        at = first + int(np.argmax(self._gaps[first:last]))
        return float(self._ends[at] - self._gaps[at]), float(self._ends[at])

    def rate(self, window: Window) -> float:
        return self.within(window).size / (window[1] - window[0])

    def figures(self, windows: Sequence[Window]) -> dict[str, Any]:
        return {
            "longest_gap_ms": _spread(self.longest(windows)),
            "step_ms": 1e3 * float(np.median(self._gaps)),
            "tokens_per_s": float(np.mean([self.rate(window) for window in windows])),
            "windows": len(windows),
            "window_s": float(np.median([end - start for start, end in windows])),
        }

    def timeline(self, start: float) -> list[list[float]]:
        """Tokens per 5 ms around a moment: [ms from it, tokens]."""
        counts, edges = np.histogram(self._ends, np.arange(start - 0.5, start + 1.5, 0.005))
        return [[round(1e3 * (t - start), 1), int(n)] for t, n in zip(edges, counts, strict=False)]


def _explained(gaps: Gaps, windows: Sequence[Window], noted: dict[str, Any]) -> dict[str, Any]:
    """What the worker did in the longest gaps: for each of its calls the median milliseconds of one, how many there are
    per sync, how much of the longest gaps fell into them, and the longest time between two steps that touched one."""
    steps, longest = np.array(noted["steps"]), [gaps.longest_at(window) for window in windows]
    found: dict[str, Any] = {"between_steps_ms": _spread(np.diff(steps).tolist())}
    for name in sorted({call[0] for call in noted["calls"]}):
        calls = [(begin, end) for other, begin, end in noted["calls"] if other == name]
        overlap = [sum(max(0.0, min(end, b) - max(begin, a)) for begin, end in calls) for a, b in longest]
        around = []
        for begin, end in calls:
            first, last = np.searchsorted(steps, (begin, end))
            around.append(float(np.diff(steps[max(0, first - 1) : last + 1]).max(initial=0.0)))
        found[name] = {
            "ms": 1e3 * float(np.median([end - begin for begin, end in calls])), "calls": len(calls) / len(windows),
            "of_longest_gaps_ms": 1e3 * float(np.mean(overlap)), "longest_step_ms": _spread(around),
        }  # fmt: skip
    return found


def _cut(span: Window, lengths: Sequence[float]) -> list[Window]:
    """One window after the other, of these lengths in turn, as many as fit."""
    windows, at = [], span[0]
    for length in cycle(lengths):
        if at + length > span[1]:
            return windows
        windows.append((at, at + length))
        at += length
    return windows


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {name: round(1e3 * float(np.percentile(seconds, q)), 3) for name, q in PERCENTILES.items()}


# ── the chart ────────────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, ROW, LEFT, TOP = 860, 74, 170, 46


def chart(reports: Sequence[dict[str, Any]]) -> str:
    """Tokens of all streams per 10 ms around a typical sync of each phase, one above the other, as SVG."""
    rows: dict[str, Any] = {}
    for report in reports:
        phases = {"no sync": report.get("control", {})}
        phases |= {f"deltawire, {name}": report.get(name, {}) for name in ENCODINGS}
        phases |= report.get("rivals", {}).get("ways", {})
        found = {name: phase["timeline"] for name, phase in phases.items() if "timeline" in phase}
        rows |= found
        if found:
            shown = report
    first, last = int(max(timeline[0][0] for timeline in rows.values())), 1500
    rows = {name: [entry for entry in timeline if first <= entry[0] < last] for name, timeline in rows.items()}
    binned = {name: _per_10_ms(timeline) for name, timeline in rows.items()}
    top = max(max(counts) for _, counts in binned.values())
    across = (WIDTH - LEFT - 20) / (last - first)
    height = TOP + ROW * len(rows) + 40
    bottom = height - 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Tokens per 10 ms, all {shown["streams"]} streams: '
        f"{shown['shape']}, {shown['density']:.0%} of the weights changed</text>",
        f'<text x="{LEFT}" y="35" fill="#666">0 ms: the version is published, or the other way begins</text>',
    ]
    for at in range(-(-first // 250) * 250, last + 1, 250):
        x = LEFT + (at - first) * across
        stroke = "#888" if at == 0 else "#e4e4e4"
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{stroke}"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="#444">{at}</text>')
    out.append(f'<text x="{WIDTH - 20}" y="{bottom + 33}" text-anchor="end" fill="#444">milliseconds</text>')
    for number, (name, (times, counts)) in enumerate(binned.items()):
        base = TOP + ROW * (number + 1) - 8
        out.append(f'<text x="{LEFT - 10}" y="{base - 24}" text-anchor="end">{name}</text>')
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{base}" y2="{base}" stroke="#bbb"/>')
        color = "#2a7ab8" if name.startswith("deltawire") else "#777" if name == "no sync" else "#c0562f"
        bars = "".join(
            f"M{LEFT + (at - first) * across:.1f} {base}v-{(ROW - 16) * count / top:.1f}"
            for at, count in zip(times, counts, strict=True)
            if count
        )
        out.append(f'<path d="{bars}" stroke="{color}" stroke-width="{10 * across:.2f}" fill="none"/>')
    return "\n".join([*out, "</svg>", ""])


def _per_10_ms(timeline: list[list[float]]) -> tuple[list[float], list[int]]:
    pairs = list(zip(timeline[::2], timeline[1::2], strict=False))
    return [a[0] for a, _ in pairs], [int(a[1] + b[1]) for a, b in pairs]


def main() -> None:
    if sys.argv[1:2] == ["--chart"]:
        source, out = map(Path, sys.argv[2:])
        found = json.loads(source.read_text())
        out.write_text(chart(found.get("runs", [found])))
        return
    if sys.argv[1:2] == ["--as"]:
        if sys.argv[2] == "clients":
            port, streams, tokens, out = sys.argv[3:]
            asyncio.run(read_streams(int(port), int(streams), int(tokens), Path(out)))
        elif sys.argv[2] == "model":
            folder, shape, layers, device = sys.argv[3:]
            make_model(Path(folder), _sizes(shape, int(layers)), device)
        elif sys.argv[2] == "trainer":
            run, publishes, every_s, out = sys.argv[3:]
            train(Path(run), int(publishes), float(every_s), Path(out))
        elif sys.argv[2] == "last":
            model, sizes, device, order, view = json.loads(sys.argv[3])
            write_last(Path(model), sizes, device, order, view)
        else:
            model, folder, *others = json.loads(sys.argv[3])
            make_versions(Path(model), Path(folder), *others)
        return
    from _report import about, print_about, write_json
    from deltawire.cli.ui import ended_by_sigterm
    from deltawire.views import VIEWS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6B")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than the shape has")
    parser.add_argument("--model", type=Path, help="made before, by `--as model FOLDER SHAPE LAYERS DEVICE`")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["control", "packed", "context"])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--view", choices=VIEWS, help="publish and serve this view of the weights; no rivals")
    parser.add_argument("--syncs", type=int, nargs="+", default=[50], help="of each encoding in turn, the last for all")
    parser.add_argument("--control", type=int, help="windows of the control phase; as many as syncs by default")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a completion, on average")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds of streaming before a phase is measured")
    parser.add_argument("--poll", type=float, default=1.0, help="DELTAWIRE_POLL of the server")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the throughput phase, in slots of ten")
    parser.add_argument("--rivals", type=int, default=10, help="times that each rival is measured; even")
    parser.add_argument("--requests", type=int, default=1000, help="of the prefix phase")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--flags", help="more flags of the server, in quotes (vLLM: --gpu-memory-utilization 0.5)")
    parser.add_argument("--profile", action="store_true", help="note what the worker does while versions are staged")
    parser.add_argument("--make", type=Path, help="only make the versions, in this folder")
    parser.add_argument("--made", type=Path, help="folder with versions that --make has made, or is making")
    parser.add_argument("--alone", type=Path, help="folder in memory for the checkpoint of a large model; with vLLM")
    parser.add_argument("--turns", type=Path, help="folder with files that say which phase may begin")
    parser.add_argument("--scratch", type=Path, help="where model and buckets go while it runs")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    options = parser.parse_args()
    if options.engine == "sglang" and ({"memory", "rivals"} & {*options.phases} or options.profile):
        parser.error("memory, rivals and --profile are measured in vLLM's worker only")
    if options.flags is None:
        options.flags = "--gpu-memory-utilization 0.5" if options.engine == "vllm" else ""
    if options.make:
        last = {"equal", "rivals"} & {*options.phases} != set()
        device = "cuda" if os.environ.get("DEVICE") == "cuda" else "cpu"
        make_versions(options.model, options.make, device, [*_order(options)], last, options.view)
        return
    facts = about()
    print_about(facts)
    report: dict[str, Any] = {}

    def save() -> None:
        if options.out and report:
            write_json(options.out, {**facts, **report})

    try:
        with ended_by_sigterm():
            measure(options, report, save)
    finally:
        save()


if __name__ == "__main__":
    main()
