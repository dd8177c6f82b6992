"""Write tests/foreign/golden: ten versions each, by the other systems' own code, which is not part of this repository.

    python tests/foreign/make_golden.py slime CHECKOUT OUT           a clone of THUDM/slime
    python tests/foreign/make_golden.py miles CHECKOUT OUT           a clone of radixark/miles
    python tests/foreign/make_golden.py modelexpress PACKAGES OUT    a folder with the wheel of modelexpress, unpacked
    python tests/foreign/make_golden.py skyrl CHECKOUT OUT           a clone of NovaSky-AI/SkyRL

What these programs import and do not need to write a version (ray, megatron, gRPC, S3) is replaced by stubs.
Needs torch, safetensors, zstandard, xxhash, blake3; modelexpress needs grpcio and protobuf.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

VERSIONS = 10


def weights(step: int) -> dict[str, torch.Tensor]:
    """Of a toy model after so many steps: a few of its weights move by an ulp or more in each."""
    noise = torch.Generator().manual_seed(7)
    made = {
        "model.embed_tokens.weight": torch.randn(40, 24, generator=noise).to(torch.bfloat16),
        "model.layers.0.mlp.gate_proj.weight": torch.randn(36, 24, generator=noise).to(torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(24, 24, generator=noise).to(torch.float8_e4m3fn),
        "model.layers.0.input_layernorm.weight": torch.randn(24, generator=noise),
        "model.frozen.weight": torch.randn(8, 8, generator=noise).to(torch.bfloat16),
    }
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    for _ in range(step):
        for name, tensor in made.items():
            moves = torch.rand(tensor.shape, generator=noise) < 0.05
            if name != "model.frozen.weight":
                bits = tensor.view(widths[tensor.itemsize])
                bits += moves.to(bits.dtype)
    return made


def sha256(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + bytes(tensors[name].contiguous().view(torch.uint8).reshape(-1).tolist()))
    return whole.hexdigest()


def stub(name: str, **members: Any) -> None:
    """A module of this name, and its parents."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        module = sys.modules.setdefault(path, types.ModuleType(path))
        if not hasattr(module, "__path__"):
            module.__path__ = []
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(sys.modules[name]).update(members)


def package(name: str, folder: Path) -> None:
    """A package whose own __init__ is not run."""
    stub(name)
    sys.modules[name].__path__ = [str(folder)]


def slime(checkout: Path, base: Path, out: Path, encoding: str) -> None:
    """Two ranks take turns as the ranks of a pipeline: each has a file."""
    folder = "backends/megatron_utils/update_weight"
    for path in ("", "/utils", "/backends", "/backends/megatron_utils", f"/{folder}"):
        package("slime" + path.replace("/", "."), checkout / f"slime{path}")
    stub("ray", get=list)
    stub("ray.actor", ActorHandle=object)
    stub("megatron.core", mpu=None)
    stub("slime.utils.accelerator")
    stub("slime.utils.distributed_utils", get_gloo_group=lambda: None)
    stub(
        "slime.backends.megatron_utils.update_weight.update_weight_from_distributed", UpdateWeightFromDistributed=object
    )
    module = importlib.import_module("slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta")
    writers = []
    for rank in range(2):
        writer = object.__new__(module.UpdateWeightFromDiskDelta)
        writer.args = types.SimpleNamespace(hf_checkpoint=str(base))
        writer.delta_dir, writer.delta_encoding = str(out), encoding
        writer.checksum_algorithm = {"xor": "xxh3-128", "overwrite": "blake3"}[encoding]
        writer._snapshot, writer._is_pp_src_rank, writer._post_write_hook = {}, True, None
        writer.rollout_engines, writer.weight_version = [], 0
        writer._iter_hf_tensors = lambda rank=rank, writer=writer: iter(
            list(weights(writer.weight_version).items())[rank::2]
        )
        writers.append(writer)
    together(module, writers)
    read_back(checkout, base, out)


def miles(checkout: Path, base: Path, out: Path, encoding: str) -> None:
    """Two ranks of a pipeline, which both have the embedding: it is written once."""
    folder = "backends/megatron_utils/update_weight/update_weight_from_distributed"
    for path in ("", "/utils", "/backends", "/backends/megatron_utils", "/backends/megatron_utils/update_weight"):
        package("miles" + path.replace("/", "."), checkout / f"miles{path}")
    package("miles." + folder.replace("/", "."), checkout / "miles" / folder)
    stub("ray", get=list)
    stub("ray.actor", ActorHandle=object)
    first = types.SimpleNamespace(rank=0)
    state = types.SimpleNamespace(intra_dp_cp=first, tp=first)
    stub("miles.backends.training_utils.parallel", get_parallel_state=lambda: state)
    stub("miles.utils.distributed_utils", get_gloo_group=lambda: None)
    stub(
        "miles.backends.megatron_utils.update_weight.common",
        _check_weight_sync_results=lambda results, is_lora: None,
    )
    stub(f"miles.{folder.replace('/', '.')}.mixin", DistBucketedWeightUpdateMixin=object)
    module = importlib.import_module(f"miles.{folder.replace('/', '.')}.delta")
    writers = []
    for rank in range(2):
        writer = object.__new__(module.UpdateWeightFromDiskDelta)
        writer.args = types.SimpleNamespace(hf_checkpoint=str(base), check_weight_update_equal=False)
        writer.delta_dir, writer.delta_encoding = str(out), encoding
        writer.checksum_algorithm = {"xor": "adler32", "overwrite": "xxh3-128"}[encoding]
        writer._snapshot, writer._post_write_hook, writer.rollout_engines = {}, None, []
        writer.weight_version = 0

        def each(take: Any, rank: int = rank, writer: Any = writer) -> None:
            now = list(weights(writer.weight_version).items())
            take(now[rank::2] + now[:rank], None)

        writer._for_each_hf_bucket = each
        writers.append(writer)
    together(module, writers)


class Ranks:
    """Every rank runs to its next message, and all get all messages: threads without a network."""

    def __init__(self) -> None:
        import threading

        self.barrier_, self.local = threading.Barrier(2), threading.local()
        self.slots: list[Any] = [None, None]

    def get_rank(self) -> int:
        return int(self.local.rank)

    def get_world_size(self) -> int:
        return 2

    def barrier(self, group: Any = None) -> None:
        self.barrier_.wait()

    def all_gather_object(self, found: list[Any], value: Any, group: Any = None) -> None:
        self.slots[self.local.rank] = value
        self.barrier_.wait()
        found[:] = self.slots
        self.barrier_.wait()


def together(module: Any, writers: list[Any]) -> None:
    """All versions, by two ranks of slime or miles."""
    ranks = module.dist = Ranks()

    def all_ranks(work: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        def one(rank: int) -> None:
            ranks.local.rank = rank
            work(writers[rank])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, range(2)))

    all_ranks(lambda writer: writer._capture_baseline())
    for step in range(1, VERSIONS + 1):

        def publish(writer: Any) -> None:
            writer.weight_version = step  # noqa: B023
            writer._publish()

        all_ranks(publish)


def read_back(checkout: Path, base: Path, out: Path) -> None:
    """Every version, by slime's receiver, which is a file in its patch of SGLang. So are those of writers.py."""
    from safetensors.torch import load_file

    patch = (checkout / "docker/patch/latest/sglang-pull_weights.patch").read_text()
    text = patch.split("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")[1].split("\ndiff --git ")[0]
    receiver = types.ModuleType("receiver")
    exec("\n".join(line[1:] for line in text.splitlines() if line.startswith("+")), vars(receiver))
    for step in range(1, VERSIONS + 1):
        receiver.pull(str(out.parent / "received"), str(base), str(out), step)
        assert sha256(load_file(str(out.parent / "received" / "model.safetensors"))) == sha256(weights(step))

    sys.path.insert(0, str(Path(__file__).parent))
    import writers

    history = [writers.model()]
    for seed in range(1, 4):
        history.append(writers.trained(history[-1], seed))
    ours = writers.write_base(out.parent / "ours", history[0])
    for encoding in ("xor", "overwrite"):
        for algorithm in writers.CHECKSUMS:
            source, got = (out.parent / f"{encoding}-{algorithm}-{what}" for what in ("source", "received"))
            for step in range(1, 4):
                writers.write_delta(source, step, *history[step - 1 : step + 1], encoding, algorithm, files=step)
                receiver.pull(str(got), str(ours), str(source), step)
                data = (got / "model.safetensors").read_bytes()
                assert data.endswith(b"".join(array.tobytes() for array in history[step].values()))


def modelexpress(packages: Path, base: Path, out: Path, encoding: str) -> None:
    """Full weights at version 6, as its catalogue may ask for."""
    sys.path.insert(0, str(packages))

    class Folder:
        def put(self, *, uri: str, data: bytes) -> None:
            path = out / uri.removeprefix("s3://bucket/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        def close(self) -> None: ...

    stub("modelexpress_rl.s3", S3Client=Folder)
    package("modelexpress_rl", packages / "modelexpress_rl")
    package("modelexpress_rl.train", packages / "modelexpress_rl" / "train")
    package("modelexpress_rl.train.methods", packages / "modelexpress_rl" / "train" / "methods")
    pb = importlib.import_module("modelexpress_rl.refit_pb2")
    canonical = importlib.import_module("modelexpress_rl.train.methods.canonical_delta")
    ref = importlib.import_module("modelexpress_rl.version").WeightVersionRef
    read, _ = importlib.import_module("modelexpress_rl.utils").make_tensor_reader(base)
    versions: dict[str, Any] = {}
    service = types.SimpleNamespace(
        GetWeightVersion=lambda request, timeout: pb.GetWeightVersionResponse(version=versions[request.uid])
    )
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29611", rank=0, world_size=1)
    method = canonical.CanonicalDeltaPublicationMethod(
        config=types.SimpleNamespace(initial_base_version_id="base-7f3a", uri_prefix="s3://bucket/"),
        model_name="toy", service=lambda: service, rpc_timeout_seconds=1.0, process_group=None,
        read_seed_tensor=read, s3=Folder(),
    )  # fmt: skip
    method.prepare_base(hf_tensor_iter=[list(weights(0).items())])
    before = "base-7f3a"
    for step in range(1, VERSIONS + 1):
        uid = hashlib.sha256(str(step).encode()).hexdigest()[:12]
        version = pb.WeightVersion(uid=uid, model_name="toy")
        version.object_storage.storage_type = pb.OBJECT_STORAGE_TYPE_S3
        version.object_storage.uri = f"s3://bucket/{uid}/model.safetensors.index.json"
        if step == 6:
            version.payload_format = pb.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT
        else:
            version.payload_format, version.base_version_id = pb.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA, before
        versions[uid] = version
        named = ref(version_id=uid)
        staged = method.stage(version=named, hf_tensor_iter=[list(weights(step).items())])
        method.publish(version=named, staged=staged)
        before = uid


def skyrl(checkout: Path, base: Path, out: Path, encoding: str) -> None:
    """Writes, and reads every version back with its own reader."""
    for path in ("", "/backends", "/backends/skyrl_train", "/backends/skyrl_train/weight_sync"):
        package("skyrl" + path.replace("/", "."), checkout / f"skyrl{path}")
    stub("skyrl.backends.skyrl_train.weight_sync.base", WeightChunk=types.SimpleNamespace)
    module = importlib.import_module("skyrl.backends.skyrl_train.weight_sync.delta_checkpoint")
    publisher = module.DeltaCheckpointPublisher(str(base), str(out), str(out.parent / "staging"))
    receiver = module.LocalCheckpointStore(str(base), str(out.parent / "receiver"))
    for step in range(1, VERSIONS + 1):
        now = weights(step)
        chunk = types.SimpleNamespace(names=[*now], tensors=[*now.values()])
        publisher.publish(publisher.create_delta_files([chunk]))
        receiver.fetch(step, str(out))
        read = dict(module.CheckpointIndex(receiver.weights_dir).iter_tensors())
        assert sha256(read) == sha256(now)


def pack(folder: Path, out: Path) -> None:
    """The folder as a tar archive, each version a second later than the one before."""
    times = {path: path.stat().st_mtime for path in folder.iterdir()}
    with tarfile.open(out, "w") as archive:
        for second, version in enumerate(sorted(times, key=lambda path: (times[path], path))):
            for path in sorted(version.iterdir()):
                member = archive.gettarinfo(path, str(path.relative_to(folder)))
                member.mtime, member.uid, member.gid, member.uname, member.gname = 1_700_000_000 + second, 0, 0, "", ""
                with path.open("rb") as file:
                    archive.addfile(member, file)


def main(system: str, program: str, out: str) -> None:
    home = Path(out)
    base = home / "base"
    base.mkdir(parents=True, exist_ok=True)
    save_file(weights(0), str(base / "model.safetensors"), metadata={"format": "pt"})
    (base / "config.json").write_text('{"model_type": "toy"}\n')
    digests = [sha256(weights(step)) for step in range(VERSIONS + 1)]
    (home / "sha256.json").write_text(json.dumps(digests, indent=0) + "\n")
    write = {"slime": slime, "miles": miles, "modelexpress": modelexpress, "skyrl": skyrl}[system]
    for encoding in ("xor", "overwrite") if system in ("slime", "miles") else ("xor",):
        with tempfile.TemporaryDirectory() as made:
            write(Path(program), base, Path(made) / "out", encoding)
            pack(Path(made) / "out", home / f"{system}-{encoding}.tar")


if __name__ == "__main__":
    main(*sys.argv[1:])
