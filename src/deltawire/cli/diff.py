"""`deltawire diff`: compare two versions tensor by tensor."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

from . import ui

if TYPE_CHECKING:
    from ..bucket.compare import TensorDifference
    from ..bucket.replay import State
    from ..bucket.run import Run
    from ..core.full import Source

_SIDE = "RUN[@VERSION]|FOLDER"
_FIELDS = (
    "name", "dtype", "shape", "elements", "changed", "max_ulps", "mean_ulps", "norm", "relative", "not_finite",
)  # fmt: skip
"""What is said of a tensor in JSON, beside its steps."""


def command(
    old: Annotated[str, Argument(metavar=_SIDE, help="The version to start from.")],
    new: Annotated[
        str | None,
        Argument(
            metavar=f"[{_SIDE}]",
            help="The version it became; @41 alone is one of the same run. Without it: the version before OLD and OLD.",
        ),
    ] = None,
    all: Annotated[bool, Option("--all", help="Also tensors that did not change.")] = False,
    reference: ui.ReferenceOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Compare two versions tensor by tensor: what changed, how far, how much.

    For each tensor: how many weights have other bits, the largest and the mean
    step in ulps (representable values), the norm of the difference, and that norm
    as a share of the old weights'. Either side may be a version of any run or a
    checkpoint folder, as long as tensors have the same names and shapes.

    One version is held in memory and the other in a temporary folder (TMPDIR), so
    it takes the memory of one copy of the weights. Exit code 0, also when they
    differ.

    \b
    Examples
      deltawire diff s3://runs/chat@40 @41
      deltawire diff s3://runs/chat@best s3://runs/chat@latest
      deltawire diff s3://runs/chat@41              what version 41 changed
      deltawire diff checkpoints/base s3://runs/chat@best
      deltawire diff s3://runs/chat@40 @41 --json | jq '.tensors[].norm'
    """
    from ..bucket.compare import differences

    with contextlib.ExitStack() as stack, ui.progress() as advance:
        first, second = _sides(old, new)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-diff-")))
        before, after = _open(first, second, scratch, reference, advance)
        mine, theirs = before.schema.by_name(), after.schema.by_name()
        both = [tensor for tensor in after.schema.tensors if mine.get(tensor.name) == tensor]
        total = sum(tensor.nbytes for tensor in both)
        found = []
        for difference, tensor in zip(differences(before, after, both), both, strict=True):
            found.append(difference)
            advance("compare", tensor.nbytes, total)
    apart = {
        "only_old": sorted(mine.keys() - theirs.keys()),
        "only_new": sorted(theirs.keys() - mine.keys()),
        "other_shape": sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]),
    }
    value = _value(first, second, found, apart)
    ui.emit(value, lambda out: _render(out, value, all), json)


# ── the two sides ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Side:
    """A version of a run, or a checkpoint folder."""

    def __init__(self, text: str) -> None:
        self.run: Run | None = None
        self.version: int | None = None
        self.folder = Path(text)
        if not self.folder.is_dir() or (self.folder / "run.json").exists():
            self.run, self.version = ui.open_version(text)

    @property
    def name(self) -> str:
        return f"{self.run.store.url} v{self.version}" if self.run is not None else str(self.folder)


def _sides(old: str, new: str | None) -> tuple[_Side, _Side]:
    from ..bucket.versions import split
    from ..core.errors import VersionNotFound

    if new is not None:
        return _Side(old), _Side(split(old)[0] + new if new.startswith("@") else new)
    second = _Side(old)
    if second.run is None or second.version is None:
        raise BadParameter("name two: a folder has no version before it")
    parent = second.run.manifest(second.version).parent
    if parent is None:
        raise VersionNotFound(f"version {second.version} of {second.run.store.url} is the first: name two versions")
    return _Side(f"{split(old)[0]}@{parent}"), second


def _open(
    first: _Side, second: _Side, scratch: Path, reference: Path | None, advance: ui.Advance
) -> tuple[Source, Source]:
    from ..core.full import Checkpoint, write_checkpoint

    def fetched(side: _Side, state: State | None = None) -> State:
        assert side.run is not None
        assert side.version is not None
        return ui.fetch_version(side.run, side.version, reference, advance, f"fetch v{side.version}", state)[0]

    if first.run is None:
        state, before = None, Checkpoint(first.folder)
    else:
        state = fetched(first)
        if second.run is None:
            return state, Checkpoint(second.folder)
        # one of the two in memory is enough
        total = state.schema.nbytes
        write_checkpoint(scratch, state, progress=lambda n: advance("set aside", n, total))
        before = Checkpoint(scratch)
        if first.run.info.run != second.run.info.run:
            state = None
    if second.run is None:
        return before, Checkpoint(second.folder)
    return before, fetched(second, state)


# ── the result ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _value(first: _Side, second: _Side, found: list[TensorDifference], apart: dict[str, list[str]]) -> dict[str, Any]:
    from ..core.ulps import Histogram

    total = Histogram()
    for difference in found:
        total.add_all(difference.histogram)
    changed, elements = sum(d.changed for d in found), sum(d.elements for d in found)
    old_norm = sum(d.old_norm**2 for d in found) ** 0.5
    norm = sum(d.norm**2 for d in found) ** 0.5
    return {
        "old": first.name,
        "new": second.name,
        "same": not changed and not any(apart.values()),
        "changed": changed,
        "elements": elements,
        "norm": norm,
        "relative": norm / old_norm if old_norm else None,
        "steps": ui.step_rows(total),
        "tensors": [
            {**ui.pick(difference, *_FIELDS), "steps": ui.step_rows(difference.histogram)} for difference in found
        ],
        **apart,
    }


def _lines(value: dict[str, Any]) -> Iterator[str]:
    apart = {"only_old": "only in the old one", "only_new": "only in the new one", "other_shape": "of another shape"}
    for key, what in apart.items():
        if names := value[key]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"{len(names)} tensors {what}: {', '.join(ui.clean(name, 80) for name in names[:3])}{more}"
    lost = sum(row["not_finite"] for row in value["tensors"])
    if lost:
        yield f"{lost:,} changed weights are NaN or infinite on one side and in no norm"


def _render(out: ui.Console, value: dict[str, Any], all: bool) -> None:
    out.print(f"{ui.clean(value['old'])} → {ui.clean(value['new'])}", soft_wrap=True)
    shown = [row for row in value["tensors"] if all or row["changed"]]
    if shown:
        columns = ["tensor", "changed", "share", "max ulps", "mean ulps", "‖Δ‖", "‖Δ‖/‖old‖"]
        rows = [_cells(row) for row in shown]
        ui.print_table(out, columns, rows, left=("tensor",), drop=("mean ulps", "changed"), shorten="tensor")
    for line in _lines(value):
        out.print(line, soft_wrap=True)
    if value["same"]:
        out.print(f"the same, bit for bit: {value['elements']:,} weights in {len(value['tensors'])} tensors")
        return
    norm = f"‖Δ‖ {value['norm']:.4g}" + (f", {value['relative']:.2g} of ‖old‖" if value["relative"] else "")
    share = ui.percent(value["changed"], value["elements"])
    same = sum(not row["changed"] for row in value["tensors"])
    still = f"; {same} tensors did not change" if same and not all else ""
    out.print(f"{value['changed']:,} of {value['elements']:,} weights changed ({share}), {norm}{still}", soft_wrap=True)
    total = sum(row["up"] + row["down"] for row in value["steps"])
    parts = [f"{row['ulps']}: {ui.percent(row['up'] + row['down'], total)}" for row in value["steps"]]
    if parts:
        out.print(f"steps in ulps  {'  '.join(parts)}", soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        ui.clean(row["name"]),
        f"{row['changed']:,}",
        ui.percent(row["changed"], row["elements"]),
        "–" if row["max_ulps"] is None else f"{row['max_ulps']:,}",
        "–" if row["mean_ulps"] is None else f"{row['mean_ulps']:.3g}",
        f"{row['norm']:.3g}",
        "–" if row["relative"] is None else f"{row['relative']:.2g}",
    ]
