"""`deltawire show`: show what is in a version or a file, or how two versions differ."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

import deltawire as dw

from ..errors import DeltawireError
from . import ui

SHOWN = 2000
"""Tensors in a table for people: laying out a million rows would take minutes."""

_DIFFERENCE = (
    "name", "dtype", "shape", "elements", "changed", "max_ulps", "mean_ulps", "norm", "relative", "not_finite",
)  # fmt: skip
"""What JSON says of a tensor in two versions, beside its steps."""


def command(
    what: Annotated[
        str, Argument(metavar="RUN[@VERSION]|FILE", help="A version of a run, or a local safetensors file.")
    ],
    new: Annotated[
        str | None,
        Argument(
            metavar="[RUN[@VERSION]]",
            help="Compare with this version; @41 alone is one of the same run. Either may be a checkpoint folder.",
        ),
    ] = None,
    all: Annotated[bool, Option("--all", help="Of two versions: also tensors that did not change.")] = False,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Show what is in a version or a file, or how two versions differ, per tensor.

    One version: its links, its record, and how many weights of each tensor it
    changed. Steps are counted in ulps, that is in representable values: training
    in small steps moves a bf16 weight by one, which is why deltas are small. A
    `packed` delta stores them; for any other encoding compare two versions.

    Two versions: how many weights have other bits, the largest and the mean step,
    the norm of the difference, and that norm as a share of the old weights'. They
    may be of different runs, if tensors have the same names and shapes. One is
    held in memory and the other in a temporary folder (TMPDIR). Exit code 0, also
    when they differ.

    A file: any safetensors file, also one of another tool with NAME.indices and
    NAME.values.

    \b
    Examples
      deltawire show s3://runs/chat@41
      deltawire show s3://runs/chat@40 @41
      deltawire show checkpoints/base s3://runs/chat@best
      deltawire show s3://runs/chat@40 @41 --json | jq '.tensors[].norm'
      deltawire show model.safetensors --json | jq '.tensors[].name'
    """
    if new is not None:
        value = _two(what, new, reference, trust)
        ui.emit(value, lambda out: _render_two(out, value, all), json)
        return
    value = _file(Path(what)) if Path(what).is_file() else _version(what, trust)
    ui.emit(value, lambda out: _render(out, value), json)


# ── a file ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _file(path: Path) -> dict[str, Any]:
    contents = dw.FileContents.open(path)
    return {
        "file": str(path),
        "bytes": contents.size,
        **ui.pick(contents, "kind", "encoding", "metadata"),
        "tensors": _tensors(contents.parts(), contents.stats()),
        "steps": _steps(contents.kind, contents.steps()),
    }


# ── a version ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _version(text: str, trust: str | None) -> dict[str, Any]:
    run, version = dw.Run.at(text, trust=trust)
    manifest = run.manifest(version)
    link = manifest.main
    value: dict[str, Any] = {
        "run": run.store.url,
        **ui.pick(manifest, "version", "parent", "digest", "created", "step", "changed"),
        "elements": run.schema.elements,
        "full_bytes": run.schema.nbytes,
        **ui.pick(manifest, "metrics", "timings"),
        "links": [*map(_link, manifest.links)],
        "added": [_link(added.link) for added in run.added.between(version - 1, version)],
        "files": [{"name": file.name, "bytes": file.size} for file in manifest.files],
        "signer": manifest.signer or None,
        "signature_checked": run.trust is not None,
        "origin": manifest.origin,
        "base_model": run.info.base,
        "kind": link.kind,
        "encoding": link.encoding,
    }
    if not link.objects:
        tensors = [{**ui.pick(x, "name", "dtype", "shape"), "bytes": x.nbytes} for x in run.schema.tensors]
        return {**value, "tensors": tensors, "steps": None}
    ((_, parts),) = dw.tensor_changes(run, [version], anchors=True)
    if isinstance(parts, DeltawireError):
        raise parts
    _, steps = dw.step_sizes(run, version, stored=True)
    return {**value, "tensors": _tensors(parts, {}, run.schema), "steps": _steps(link.kind, steps)}


def _link(link: dw.Link) -> dict[str, Any]:
    return {
        **ui.pick(link, "kind", "base", "bytes", "encoding", "why", "source"),
        "objects": [blob.key for blob in link.objects],
    }


def _tensors(
    parts: list[dw.TensorPart], stats: Mapping[str, Any], schema: dw.Schema | None = None
) -> list[dict[str, Any]]:
    rows, known = [], {} if schema is None else schema.by_name()
    for part in parts:
        spec = known.get(part.name)
        row = {
            "name": part.name,
            "dtype": part.dtype,
            "shape": part.shape if part.shape is not None else spec.shape if spec else None,
            "elements": part.elements if part.elements is not None else spec.elements if spec else None,
            "changed": part.changed,
            "bytes": part.nbytes,
        }
        rows.append({**row, "indices": stats[part.name]} if part.name in stats else row)
    return rows


def _steps(kind: str, histogram: dw.Histogram | None) -> list[dict[str, Any]] | None:
    return None if kind != "delta" or histogram is None else ui.step_rows(histogram)


# ── two versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Side:
    """A version of a run, or a checkpoint folder."""

    def __init__(self, text: str, trust: str | None) -> None:
        self.run: dw.Run | None = None
        self.version: int | None = None
        self.folder = Path(text)
        if self.folder.is_file():
            raise BadParameter(f"{text} is a file, which is shown alone: name a version or a checkpoint folder")
        if not self.folder.is_dir() or (self.folder / "run.json").exists():
            self.run, self.version = dw.Run.at(text, trust=trust)

    @property
    def name(self) -> str:
        return f"{self.run.store.url} v{self.version}" if self.run is not None else str(self.folder)


def _two(old: str, new: str, reference: Path | None, trust: str | None) -> dict[str, Any]:
    with contextlib.ExitStack() as stack, ui.progress() as advance:
        first, second = _Side(old, trust), _Side(dw.split_version(old)[0] + new if new.startswith("@") else new, trust)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-show-")))
        before, after = _open(first, second, scratch, reference, advance)
        mine, theirs = before.schema.by_name(), after.schema.by_name()
        both = [tensor for tensor in after.schema.tensors if mine.get(tensor.name) == tensor]
        total = sum(tensor.nbytes for tensor in both)
        found = []
        for tensor in both:
            found.append(dw.difference(tensor, before, after))
            advance("compare", tensor.nbytes, total)
    apart = {
        "only_old": sorted(mine.keys() - theirs.keys()),
        "only_new": sorted(theirs.keys() - mine.keys()),
        "other_shape": sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]),
    }
    return _differences(first, second, found, apart)


def _open(
    first: _Side, second: _Side, scratch: Path, reference: Path | None, advance: ui.Advance
) -> tuple[dw.Source, dw.Source]:
    def fetched(side: _Side, state: dw.State | None = None) -> dw.State:
        assert side.run is not None
        assert side.version is not None
        told = partial(advance, f"fetch v{side.version}")
        return dw.checkout(side.run, side.version, state, reference=reference, progress=told)

    if second.run is None:
        return fetched(first) if first.run else dw.Checkpoint(first.folder), dw.Checkpoint(second.folder)
    if first.run is None:
        return dw.Checkpoint(first.folder), fetched(second)
    # one of the two in memory is enough
    state = fetched(first)
    total = state.schema.nbytes
    state.write(scratch, progress=lambda n: advance("set aside", n, total))
    same_run = first.run.info.run == second.run.info.run
    return dw.Checkpoint(scratch), fetched(second, state if same_run else None)


def _differences(
    first: _Side, second: _Side, found: list[dw.TensorDifference], apart: dict[str, list[str]]
) -> dict[str, Any]:
    total = dw.Histogram()
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
            {**ui.pick(difference, *_DIFFERENCE), "steps": ui.step_rows(difference.histogram)} for difference in found
        ],
        **apart,
    }


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _render(out: ui.Console, value: dict[str, Any]) -> None:
    if "version" in value:
        _render_version(out, value)
    else:
        coded = f" {value['encoding']}" if value["encoding"] else ""
        out.print(f"{value['file']}  {value['kind']}{coded}  {ui.size(value['bytes'])}", soft_wrap=True)
        for name, text in value["metadata"].items():
            out.print(f"  {ui.clean(name)}: {ui.clean(text)}", soft_wrap=True)
    _render_tensors(out, value)
    if value["kind"] == "delta" and value["steps"] is None:
        two = f": deltawire show {value['run']}@{value['parent']} @{value['version']}" if "version" in value else ""
        out.print(f"a {value['encoding']} delta stores no step sizes; compare two versions{two}", soft_wrap=True)
    _render_steps(out, value)


def _render_version(out: ui.Console, value: dict[str, Any]) -> None:
    parent = "" if value["parent"] is None else f" ← v{value['parent']}"
    share = ui.percent(value["changed"], value["elements"])
    out.print(
        f"{value['run']} v{value['version']}{parent}  {share} changed  {ui.age(value['created'])} old", soft_wrap=True
    )
    for link in (*value["links"], *value["added"]):
        base = "" if link["base"] is None else f" from v{link['base']}"
        smaller = (
            f", {ui.times(value['full_bytes'], link['bytes'])} smaller than full" if link["kind"] == "delta" else ""
        )
        where = " ".join(link["objects"]) or ui.clean(link["source"])
        coded = f" {ui.clean(link['encoding'])}" if link["encoding"] else ""
        later = "  added later" if link in value["added"] else ""
        out.print(f"  {link['kind']}{coded}{base}  {ui.size(link['bytes'])}{smaller}  {where}{later}", soft_wrap=True)
        if link["why"]:
            out.print(f"    chosen by auto: {ui.clean(link['why'])}", soft_wrap=True)
    out.print(f"  state digest {value['digest']}")
    if value["signer"]:
        checked = "checked" if value["signature_checked"] else "not checked: no trusted key was given (--trust)"
        out.print(f"  signed by {ui.clean(value['signer'])}, {checked}", soft_wrap=True)
    origin = value["origin"]
    derived = origin and f"version {origin.version} of the run {origin.run}, {origin.view} of {origin.digest}"
    for name, shown in (
        ("adapter of", value["base_model"]),
        ("derived from", derived),
        ("step", value["step"]),
        ("metrics", "  ".join(f"{k} {v:g}" for k, v in value["metrics"].items())),
        ("seconds", "  ".join(f"{k} {v:.3f}" for k, v in value["timings"].items())),
        ("files", "  ".join(f"{f['name']} ({ui.size(f['bytes'])})" for f in value["files"])),
    ):
        if shown not in (None, ""):
            out.print(f"  {name}: {ui.clean(str(shown), 2000)}", soft_wrap=True)


def _render_tensors(out: ui.Console, value: dict[str, Any]) -> None:
    sparse = value["kind"] == "delta"
    ranged = any("indices" in row for row in value["tensors"])
    # the blocks of a delta may hold several small tensors each
    sized = any(row["bytes"] is not None for row in value["tensors"])
    columns = ["tensor", "dtype", "shape", *(["changed", "share"] if sparse else []), *(["bytes"] if sized else [])]
    rows = []
    for row in value["tensors"][:SHOWN]:
        shape = "?" if row["shape"] is None else "×".join(map(str, row["shape"])) or "1"
        cells = [ui.clean(row["name"]), row["dtype"], shape]
        if sparse:
            changed, elements = row["changed"], row["elements"]
            cells += ["–" if changed is None else f"{changed:,}"]
            cells += [ui.percent(changed, elements) if changed is not None and elements else "–"]
        if sized:
            cells.append("–" if row["bytes"] is None else ui.size(row["bytes"]))
        if ranged:
            stats = row.get("indices")
            order = "" if stats is None or stats.ascending else " unsorted"
            cells.append("–" if stats is None else f"{stats.first:,} … {stats.last:,}{order}")
            cells.append("–" if stats is None or stats.low is None else f"{stats.low:.3g} … {stats.high:.3g}")
        rows.append(cells)
    if ranged:
        columns += ["indices", "values"]
    ui.print_table(out, columns, rows, left=("tensor", "dtype"), drop=("values", "indices", "dtype"), shorten="tensor")
    _render_rest(out, value["tensors"])
    if sparse:
        total = sum(row["changed"] or 0 for row in value["tensors"])
        out.print(f"{total:,} changed, tensors: {len(value['tensors'])}")


def _render_rest(out: ui.Console, rows: list[Any]) -> None:
    if len(rows) > SHOWN:
        out.print(f"… and {len(rows) - SHOWN:,} more; --json has all of them")


def _render_steps(out: ui.Console, value: dict[str, Any]) -> None:
    if not value["steps"]:
        return
    total = sum(row["up"] + row["down"] for row in value["steps"])
    rows = []
    for row in value["steps"]:
        both = row["up"] + row["down"]
        bar = "█" * round(30 * both / total)
        rows.append([row["ulps"], f"{row['up']:,}", f"{row['down']:,}", ui.percent(both, total), bar])
    out.print("\nsteps")
    ui.print_table(out, ("ulps", "up", "down", "share", ""), rows, left=("",))


def _remarks(value: dict[str, Any]) -> Iterator[str]:
    apart = {"only_old": "only in the old one", "only_new": "only in the new one", "other_shape": "of another shape"}
    for key, what in apart.items():
        if names := value[key]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"{len(names)} tensors {what}: {', '.join(ui.clean(name, 80) for name in names[:3])}{more}"
    lost = sum(row["not_finite"] for row in value["tensors"])
    if lost:
        yield f"{lost:,} changed weights are NaN or infinite on one side and in no norm"


def _render_two(out: ui.Console, value: dict[str, Any], all: bool) -> None:
    out.print(f"{ui.clean(value['old'])} → {ui.clean(value['new'])}", soft_wrap=True)
    shown = [row for row in value["tensors"] if all or row["changed"]]
    if shown:
        columns = ["tensor", "changed", "share", "max ulps", "mean ulps", "‖Δ‖", "‖Δ‖/‖old‖"]
        rows = [_cells(row) for row in shown[:SHOWN]]
        ui.print_table(out, columns, rows, left=("tensor",), drop=("mean ulps", "changed"), shorten="tensor")
        _render_rest(out, shown)
    for line in _remarks(value):
        out.print(line, soft_wrap=True)
    if value["same"]:
        out.print(f"the same, bit for bit: {value['elements']:,} weights in {len(value['tensors'])} tensors")
        return
    norm = f"‖Δ‖ {value['norm']:.4g}" + (f", {value['relative']:.2g} of ‖old‖" if value["relative"] else "")
    share = ui.percent(value["changed"], value["elements"])
    same = sum(not row["changed"] for row in value["tensors"])
    still = f"; {same} tensors did not change" if same and not all else ""
    out.print(f"{value['changed']:,} of {value['elements']:,} weights changed ({share}), {norm}{still}", soft_wrap=True)
    _render_steps(out, value)


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
