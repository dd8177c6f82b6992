"""No launch of a served model is of a kind that a rehearsal before it does not make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deltawire import kernels
from deltawire.core.change import Region, whole
from deltawire.core.codecs import ENCODINGS
from deltawire.core.schema import Schema, TensorSpec
from deltawire.kernels import ahead, torch_ops, triton_ops
from deltawire.replica import device, portions
from deltawire.replica.device import DeviceWeights
from deltawire.replica.shard import Piece
from support import Bag, diff, encoded, opened
from tiled import always_tiles, moved, weights

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
SHAPES = [
    (16, 512),  # read wide
    (33, 65),  # none is, nor are the levels of its columns
    (1, 777),
    (60, 40),  # walked as one row
    (16, 968),  # read wide where it is cut, but for the levels of its columns
]
LARGE = (3, 40001)
"""A tile of more than 65,536 weights."""


ANCHOR = 25


class Recorder:
    """Stands for the kernels of a device: torch computes, and what Triton would launch is noted."""

    def __init__(self) -> None:
        self.kinds: set[Hashable] = set()

    def __getattr__(self, name: str) -> Any:
        twin = getattr(torch_ops, name, None)

        def call(*arguments: Any, **options: Any) -> Any:
            self.note(getattr(triton_ops, name), *_copies(arguments), **options)
            return twin(*arguments, **options) if twin is not None else None

        return call

    def detect(self, plan: Any, old: Any, new: Any, **options: Any) -> Any:
        found = torch_ops.detect(plan, old, new, **options)
        cast = options.get("cast", False)
        self.note(triton_ops.detect, plan, old, new, cast=cast)
        if found.count:
            self.note(triton_ops.extract, plan, plan.launches(old, new), found.starts, found.count, cast=cast)
        return found

    def prepare_apply(self, *arguments: Any) -> Callable[[], None]:
        self.note(lambda: triton_ops.prepare_apply(*arguments)())
        return torch_ops.prepare_apply(*arguments)  # type: ignore[no-any-return]

    def prepare_digest(self, *arguments: Any) -> Callable[[Tensor], None]:
        prepared = torch_ops.prepare_digest(*arguments)

        def run(out: Tensor) -> None:
            self.note(triton_ops.prepare_digest(*arguments), out)
            prepared(out)

        return run

    def note(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        def one(kernel: Any, grid: object, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
            names = kernel.arg_names
            for name, argument in zip(names, given, strict=False):
                # what `ahead.kind` takes for granted
                assert isinstance(argument, Tensor) or name == "count" or (argument % 16 == 0 and argument > 1)
            self.kinds.add(ahead.kind(kernel, given, constants))

        token = triton_ops.starting.set(one)
        try:
            function(*arguments, **options)
        finally:
            triton_ops.starting.reset(token)


def _copies(arguments: tuple[Any, ...]) -> list[Any]:
    return [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(kernels, "operations", lambda device: made)
    return made


def views(bag: Bag, regions: list[Region]) -> list[Piece]:
    """Pieces of a model in memory of their own, as a device has them."""
    made = []
    for region in regions:
        bits = bag.region(region).reshape(region.rows, region.columns).copy()
        signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
        made.append(Piece(region, signed.view(DTYPES[region.tensor.dtype])))
    return made


def pieces_of(schema: Schema, *, cut: bool) -> list[Region]:
    """Whole tensors, or the left half of those whose tiles end there."""
    regions = [whole(tensor) for tensor in schema.tensors]
    if not cut:
        return regions
    return [Region(r.tensor, 0, r.rows, 0, r.columns // 2) if r.columns % 256 == 0 else r for r in regions]


@pytest.fixture
def portions_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "_LEAST_CHANGES", 5000)
    monkeypatch.setattr(device, "Room", lambda total, unit: portions.Room(1 << 20, unit))


@pytest.mark.usefixtures("portions_are_small")
@pytest.mark.parametrize(
    "dtypes, cut",
    [
        (("BF16",), True),
        pytest.param(("BF16", "F32"), False, marks=pytest.mark.slow),
        (("U8", "BF16", "F32"), False),
        pytest.param(("U8", "BF16", "F32"), True, marks=pytest.mark.slow),
    ],
)
def test_fifty_versions_and_an_anchor_launch_nothing_new(
    recorder: Recorder, dtypes: tuple[str, ...], cut: bool
) -> None:
    rng = np.random.default_rng(1)
    specs = [TensorSpec(f"{dtype}.{number}", dtype, shape) for dtype in dtypes for number, shape in enumerate(SHAPES)]
    schema = Schema.build([*specs, TensorSpec("large", "BF16", LARGE)])
    state = Bag(schema, {spec.name: weights(rng, spec.dtype, spec.shape) for spec in schema.tensors})
    regions = pieces_of(schema, cut=cut)
    model = DeviceWeights(schema, views(state, regions))
    shard, groups = model.shard, [n % 2 for n in range(len(model.shard.pieces))]
    names = [spec.name for spec in schema.tensors]
    for version in range(50):
        density = 10.0 ** -rng.uniform(0.3 if version != ANCHOR else 2, 5)
        # of some tensors only, and of all of them in every fifth version
        some = {*(names if version % 5 == 0 else rng.choice(names, rng.integers(1, len(names)), replace=False))}
        new = {name: bits.copy() for name, bits in state.tensors.items()}
        for name in some:
            chance = density * rng.choice([0, 1, 6], new[name].size if version % 3 else 1)
            new[name] = moved(rng, new[name], chance)
        now = Bag(schema, new)
        if version == ANCHOR:
            patch = shard.compare(now)
        else:
            with always_tiles(levels=version % 2 == 0):
                blob = encoded(state, diff(state, now), ENCODINGS[version % len(ENCODINGS)])
            patch = model.prepare(model.decode([opened(blob, schema)]))
        shard.shifts(patch, groups)
        shard.write(patch)
        shard.digests(groups)
        if version % 7 == 0:
            shard.undo(patch)
            shard.write(patch)
        state = now
    for piece, region in zip(shard.pieces, regions, strict=False):
        assert np.array_equal(shard.read(shard.pieces.index(piece)).reshape(-1), state.region(region).reshape(-1))

    made = {ahead.kind(*launch) for launch in ahead.launches({spec.unit_size for spec in schema.tensors})}
    assert recorder.kinds <= made, recorder.kinds - made
    # the versions are of all kinds: most of what is compiled is used
    assert {kind[0] for kind in recorder.kinds} >= {"place_kernel", "resolve_kernel", "extract_kernel", "digest_kernel"}


def test_a_rehearsal_compiles_a_kernel_once_and_few_of_them() -> None:
    """Each takes half a second of a core: 26 for a model of bf16, 72 where there are weights of all widths."""
    for units, count in (((2,), 26), ((1, 2, 4), 72)):
        made = ahead.launches(units)
        assert len(made) == count
        assert len({ahead.kind(*launch) for launch in made}) == count


def test_a_rehearsal_changes_no_weight_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes old bits over themselves: with real kernels, in the interpreter, on a device with few processors."""
    zeros: list[Tensor] = []
    real = ahead._zeros

    def kept(*arguments: Any) -> Tensor:
        zeros.append(real(*arguments))
        return zeros[-1]

    monkeypatch.setattr(ahead, "_zeros", kept)
    monkeypatch.setattr(ahead, "_LARGE", (2, 128))
    ahead.rehearse((1,), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert zeros
    assert not any(tensor.any() for tensor in zeros)


COMPILE = """
import sys
from deltawire.kernels import ahead
capability, part, parts = map(int, sys.argv[1:])
ahead.compile_for(capability or max(ahead.capabilities()), {2, 4}, part, parts)
import torch
assert not torch.cuda.is_initialized()
"""
REHEARSE = """
import time, torch
from triton import knobs
hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
from deltawire.kernels import rehearse
torch.zeros(1, device="cuda")
clock = time.perf_counter()
rehearse({2, 4}, torch.device("cuda"))
torch.cuda.synchronize()
print(len(hits), sum(hits), round(time.perf_counter() - clock, 2))
"""


def compile_part(cache: Path, part: int, parts: int, capability: int = 0) -> set[str]:
    """In a process of its own; returns the names of what the cache holds then."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    # names are those of what is compiled
    environment.pop("TRITON_INTERPRET", None)
    numbers = map(str, (capability, part, parts))
    subprocess.run([sys.executable, "-c", COMPILE, *numbers], env=environment, check=True)
    return {path.parent.name for path in cache.glob("*/*.cubin")}


def test_a_kernel_has_one_name_on_disk_whatever_was_compiled_before_it(tmp_path: Path) -> None:
    names = [kernel.__name__ for kernel, _, _ in ahead.launches({2, 4})]
    half = len(names) // 2
    # alone, and after one that calls the same functions; with Triton 3.6 it would be another name
    part = next(n for n in range(half) if names[n::half][:2] == ["class_counts_kernel", "place_kernel"])
    alone = compile_part(tmp_path / "alone", part + half, len(names), 90)
    assert len(alone) == 1
    assert alone < compile_part(tmp_path / "later", part, half, 90)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU compiles")
def test_a_device_finds_what_was_compiled_without_it(tmp_path: Path) -> None:
    for part in (2, 0, 1):
        compile_part(tmp_path, part, 3)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", REHEARSE], env=environment, check=True, stdout=subprocess.PIPE)
    print(out.stdout.decode())
    kernels_, hits, _ = out.stdout.split()
    assert kernels_ == hits == str(len(ahead.launches({2, 4}))).encode()
