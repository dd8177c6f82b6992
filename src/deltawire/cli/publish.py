"""`deltawire publish`: publish a checkpoint folder as the next version of a run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

import deltawire as dw

from ..errors import RunExists, RunNotFound, StoreError
from . import ui

_CONFIGS = ("config.json", "adapter_config.json")
_LABELS = {"fetch": "fetch the version before", "detect": "compare", "put": "upload"}


def command(
    checkpoint: Annotated[
        Path,
        Argument(
            metavar="CHECKPOINT_DIR",
            help="Hugging Face folder: *.safetensors, sharded or not, with config and tokenizer files.",
            exists=True,
            file_okay=False,
        ),
    ],
    run: ui.RunArgument,
    encoding: Annotated[
        ui.Encoding,
        Option(
            help="How the delta is coded: packed, context (smaller, slower), auto (whichever arrives sooner), "
            "or raw for any tool to read."
        ),
    ] = "packed",
    anchor: Annotated[bool, Option("--anchor", help="Also upload the full weights.")] = False,
    anchor_every: ui.AnchorEveryOption = None,
    step: Annotated[int | None, Option(help="The trainer's own step count, shown by `log`.")] = None,
    metric: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A figure to keep with the version; repeatable.")
    ] = None,
    reference: Annotated[
        str | None,
        Option(
            metavar="FOLDER|HUB_ID",
            help="Checkpoint that a new run starts from, so that no full upload is needed; or where that is here.",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="A folder that holds a version of the run, such as the one published last, so that it need not be "
            "fetched to compare with. By default the folder that was published last from here.",
        ),
    ] = None,
    sign: ui.SignOption = None,
    next_key: Annotated[str, Option(metavar="KEY", help="Public key that may sign the versions after this one.")] = "",
    trust: ui.TrustOption = None,
    take_over: ui.TakeOverOption = False,
    new: Annotated[bool, Option("--new", help="Make a new run; an error if there is one already.")] = False,
    json: ui.JsonOption = False,
) -> None:
    """Publish the next version of a run from a checkpoint folder.

    Only what changed since the run's newest version is uploaded. The first
    version, and now and then a later one, is an anchor with the full weights.
    config.json, tokenizer and template files are included, code never is; files
    that are left out are listed. Symlinks out of the folder are refused, except
    those of the Hugging Face cache.

    To find what changed, the command needs the weights of the newest version. It
    reads them from the folder that was published last, or from --base, if the
    digest of all weights there is that of a version, and fetches what came after
    that version. Otherwise it says so and fetches the newest version from the
    run, through DELTAWIRE_CACHE if that is set.

    \b
    Examples
      deltawire publish step-100 s3://runs/chat
      deltawire publish step-200 s3://runs/chat --step 200 --metric loss=1.83
      deltawire publish step-300 s3://runs/chat --base step-200
      deltawire publish step-100 s3://runs/chat-2 --new

    \b
      # a fine-tune of a public model: followers get the start from the hub
      deltawire publish step-100 s3://runs/chat --reference Qwen/Qwen3-0.6B
    """
    from ..store import open_store

    metrics = _metrics(metric or [])
    there: dw.Run | None = None
    with suppress(RunNotFound):
        there = dw.Run.open(run)
    url = open_store(run).url
    if new and there is not None:
        newest = there.newest()
        at = "without a version yet" if newest is None else f"at version {newest}"
        raise RunExists(f"there is a run at {url} already, {at}: give the new one another address")
    source = _source(checkpoint, there)
    with dw.Publisher(
        run,
        encoding=encoding,
        anchor_every=1 if anchor else anchor_every,
        # a relative path has no meaning in a run
        reference=str(Path(reference).resolve()) if reference and Path(reference).is_dir() else reference,
        files=checkpoint,
        base=base or _last_published(url, checkpoint),
        continues=True,
        takeover=take_over,
        sign=sign,
        next_key=next_key,
        trust=trust or (),
    ) as publisher:
        fetched = 0
        with ui.progress() as advance:

            def count(phase: str, n: int, total: int) -> None:
                nonlocal fetched
                fetched += n if phase == "fetch" else 0
                advance(_LABELS[phase], n, total)

            handle = publisher.publish(source, step=step, metrics=metrics, wait=True, progress=count)
    _remember(url, checkpoint)
    _report(dw.Run.open(run), handle.result(), fetched, dw.Checkpoint(checkpoint).left_out(), json)


def _metrics(texts: list[str]) -> dict[str, float]:
    metrics = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            metrics[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise BadParameter(f"{text!r} is not NAME=VALUE with a number", param_hint="--metric")
    return metrics


def _source(checkpoint: Path, run: dw.Run | None) -> dw.Source:
    """The weights of the folder, which must fit the run where there is one."""
    if (checkpoint / "run.json").is_file():
        raise BadParameter(f"{checkpoint} is a run: the checkpoint folder comes first, then the run")
    return dw.Checkpoint(checkpoint) if run is None else run.weights_in(checkpoint)


# ── the folder published last ────────────────────────────────────────────────────────────────────────────────────────


def _record(url: str) -> Path:
    """File that records the folder last published to a run. Only a hint: the digest decides what the folder holds."""
    from blake3 import blake3

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "deltawire" / "published" / f"{blake3(url.encode()).hexdigest(length=16)}.json"


def _last_published(url: str, checkpoint: Path) -> Path | None:
    """Return the folder published last from here, if it still exists and is not the one being published."""
    import msgspec

    try:
        folder = Path(msgspec.json.decode(_record(url).read_bytes(), type=dict[str, str])["folder"])
        return folder if folder.is_dir() and not folder.samefile(checkpoint) else None
    except (OSError, ValueError, KeyError):
        return None


def _remember(url: str, checkpoint: Path) -> None:
    import msgspec

    from ..store import LocalStore

    record = _record(url)
    with suppress(StoreError, OSError):  # a machine without a home: the next publish fetches
        data = msgspec.json.encode({"run": url, "folder": str(checkpoint.resolve())})
        LocalStore(record.parent).put(record.name, data)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _report(opened: dw.Run, published: dw.Published, fetched: int, left_out: dict[str, str], json: bool) -> None:
    manifest, full = opened.manifest(published.version), opened.schema.nbytes
    delta = sum(link.bytes for link in manifest.links if link.kind == "delta" and link.base == manifest.parent)
    value = {
        "run": opened.store.url,
        "version": published.version,
        "parent": manifest.parent,
        **ui.pick(published, "kinds", "digest", "changed"),
        "elements": opened.schema.elements,
        "bytes": published.bytes,
        "delta_bytes": delta or None,
        "full_bytes": full,
        "times_smaller": round(full / delta, 2) if delta else None,
        "timings": published.timings,
        "fetched_bytes": fetched,
        "left_out": left_out,
    }

    def render(out: ui.Console) -> None:
        before = opened.manifest(manifest.parent) if manifest.parent is not None else None
        parent = f" ← v{before.version} ({ui.age(before.created)} old)" if before else ""
        share = ui.percent(published.changed, opened.schema.elements)
        kinds = " + ".join(published.kinds)
        sent = f"{share} changed  {ui.size(published.bytes)} uploaded to {opened.store.url}"
        out.print(f"v{published.version}{parent}  {kinds}  {sent}", soft_wrap=True, markup=False)
        if delta:
            out.print(f"  the delta is {ui.times(full, delta)} smaller than the full {ui.size(full)}")
        if fetched and not opened.store.url.startswith("file:"):
            out.print(f"  fetched {ui.size(fetched)} to compare with; --base DIR names a folder that has a version")
        if left_out:
            out.print("  left out: " + ", ".join(f"{name} ({why})" for name, why in left_out.items()), markup=False)
        if not any(file.name in _CONFIGS for file in manifest.files):
            out.print(
                "  no config.json in the folder: `deltawire serve RUN` and from_pretrained of a checkout need one",
                soft_wrap=True,
            )
        out.print("  " + ui.durations(published.timings))

    ui.emit(value, render, json)
