"""`deltawire show`: show the contents of a version or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

from . import ui

if TYPE_CHECKING:
    from ..bucket.run import Run
    from ..core.describe import Base, IndexStats, TensorPart
    from ..core.dtypes import Bits
    from ..core.full import Checkpoint
    from ..core.manifest import Link, Origin
    from ..core.schema import TensorSpec
    from ..core.ulps import Histogram

SHOWN = 2000
"""Tensors in a table for people: laying out a million rows would take minutes."""


def command(
    what: Annotated[str, Argument(metavar="RUN[@VERSION]|FILE", help="A version of a run, or a local file.")],
    steps: Annotated[
        bool, Option("--steps", help="Step sizes also where they need the base version; rebuilds that from the run.")
    ] = False,
    base: Annotated[
        Path | None,
        Option(
            metavar="CHECKPOINT_DIR",
            exists=True,
            file_okay=False,
            help="For a FILE: the weights it starts from; gives step sizes and shares.",
        ),
    ] = None,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Show what is in a version or a file: tensor by tensor, and how far weights moved.

    Steps are counted in ulps, that is in representable values: training in small
    steps moves a bf16 weight by one, which is why deltas are small. A `packed`
    delta says so by itself, a `raw` one only beside the weights it starts from.

    Any safetensors file works, also one of another tool with NAME.indices and
    NAME.values.

    \b
    Examples
      deltawire show s3://runs/chat@41
      deltawire show s3://runs/chat@41 --steps
      deltawire show delta.safetensors --base checkpoints/step-40
      deltawire show model.safetensors --json | jq '.tensors[].name'
    """
    if Path(what).is_file():
        value = _file(Path(what), base)
    elif base is not None:
        raise BadParameter("goes with a FILE; a run knows its own base: use --steps", param_hint="--base")
    else:
        value = _version(what, steps, reference, trust)
    ui.emit(value, lambda out: _render(out, value), json)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _file(path: Path, base: Path | None) -> dict[str, Any]:
    from ..core.container import open_file
    from ..core.describe import Contents
    from ..core.full import Checkpoint

    contents = Contents(*open_file(path))
    checkpoint = Checkpoint(base) if base else None
    schema = checkpoint.schema.by_name() if checkpoint else {}
    histogram = contents.steps(_base(checkpoint) if checkpoint else None)
    return {
        "file": str(path),
        "bytes": contents.size,
        **ui.pick(contents, "kind", "encoding", "metadata"),
        **_tensors(contents.parts(), contents.stats(), schema),
        **_steps(contents.kind, contents.encoding, histogram, "--base names the weights it starts from"),
    }


def _base(checkpoint: Checkpoint) -> Base:
    """Whole tensors of a checkpoint folder by name."""
    from ..core.change import whole
    from ..core.errors import SchemaMismatch

    specs = checkpoint.schema.by_name()

    def tensor(name: str) -> tuple[TensorSpec, Bits]:
        if name not in specs:
            raise SchemaMismatch(f"the file changes {name!r}, which {checkpoint.folder} does not have")
        return specs[name], checkpoint.region(whole(specs[name]))

    return tensor


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _version(text: str, steps: bool, reference: Path | None, trust: str | None) -> dict[str, Any]:
    from ..core.manifest import main_link

    run, version = ui.open_version(text, trust)
    manifest = run.manifest(version)
    link = main_link(manifest)
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
    return {**value, **_objects(run, link, steps, reference)}


def _link(link: Link) -> dict[str, Any]:
    return {
        **ui.pick(link, "kind", "base", "bytes", "encoding", "why", "source"),
        "objects": [blob.key for blob in link.objects],
    }


def _objects(run: Run, link: Link, steps: bool, reference: Path | None) -> dict[str, Any]:
    from ..bucket.contents import read, tells_steps

    base: Base | None = None
    readable = tells_steps(link)
    if steps and link.base is not None and not readable:
        with ui.progress() as advance:
            state, _ = ui.fetch_version(run, link.base, reference, advance, "fetch the base version")
        specs, readable = run.schema.by_name(), True
        base = lambda name: (specs[name], state.bits(name))  # noqa: E731
    parts, histogram = read(run.store, link, steps=readable, base=base)
    return {
        **_tensors(parts, {}, run.schema.by_name()),
        **_steps(link.kind, link.encoding, histogram if readable else None, "--steps rebuilds the base version first"),
    }


# ── what is said of both ─────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(parts: list[TensorPart], stats: dict[str, IndexStats], schema: dict[str, TensorSpec]) -> dict[str, Any]:
    rows = []
    for part in parts:
        spec = schema.get(part.name)
        row = {
            "name": part.name,
            "dtype": part.dtype,
            "shape": part.shape if part.shape is not None else spec.shape if spec else None,
            "elements": part.elements if part.elements is not None else spec.elements if spec else None,
            "changed": part.changed,
            "bytes": part.nbytes,
        }
        rows.append({**row, "indices": stats[part.name]} if part.name in stats else row)
    return {"tensors": rows}


def _steps(kind: str, encoding: str, histogram: Histogram | None, hint: str) -> dict[str, Any]:
    if kind != "delta":
        return {"steps": None}
    if histogram is None:
        return {"steps": None, "hint": f"step sizes are not in a {encoding} delta; {hint}"}
    return {"steps": ui.step_rows(histogram)}


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
    origin: Origin | None = value["origin"]
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
    columns = ["tensor", "dtype", "shape", *(["changed", "share"] if sparse else []), "bytes"]
    rows = []
    for row in value["tensors"][:SHOWN]:
        shape = "?" if row["shape"] is None else "×".join(map(str, row["shape"])) or "1"
        cells = [ui.clean(row["name"]), row["dtype"], shape]
        if sparse:
            changed, elements = row["changed"], row["elements"]
            cells += ["–" if changed is None else f"{changed:,}"]
            cells += [ui.percent(changed, elements) if changed is not None and elements else "–"]
        cells.append("–" if row["bytes"] is None else ui.size(row["bytes"]))
        if ranged:
            stats: IndexStats | None = row.get("indices")
            order = "" if stats is None or stats.ascending else " unsorted"
            cells.append("–" if stats is None else f"{stats.first:,} … {stats.last:,}{order}")
            cells.append("–" if stats is None or stats.low is None else f"{stats.low:.3g} … {stats.high:.3g}")
        rows.append(cells)
    if ranged:
        columns += ["indices", "values"]
    ui.print_table(out, columns, rows, left=("tensor", "dtype"), drop=("values", "indices", "dtype"), shorten="tensor")
    if len(value["tensors"]) > SHOWN:
        out.print(f"… and {len(value['tensors']) - SHOWN:,} more; --json has all of them")
    if sparse:
        total = sum(row["changed"] or 0 for row in value["tensors"])
        out.print(f"{total:,} changed, tensors: {len(value['tensors'])}")


def _render_steps(out: ui.Console, value: dict[str, Any]) -> None:
    if "hint" in value:
        out.print(value["hint"])
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
