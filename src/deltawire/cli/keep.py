"""`deltawire keep`: make anchors and skip deltas beside the bucket, mirror and prune a run."""

from __future__ import annotations

from typing import Annotated

from typer import BadParameter, Exit, Option

import deltawire as dw

from . import ui
from .quantities import seconds


def command(
    run: ui.RunArgument,
    once: Annotated[bool, Option("--once", help="Do what is due, then end.")] = False,
    anchor_every: Annotated[int | None, Option(min=1, help="An anchor at the latest every so many versions.")] = None,
    anchors: Annotated[bool, Option("--anchors/--no-anchors", help="Make anchors.")] = True,
    longest_skip: Annotated[
        int, Option(min=0, help="Longest skip delta, in versions; 0 makes none. Longer ones need more disk.")
    ] = 3072,
    encoding: Annotated[str | None, Option(help="Encoding of skip deltas; the trainer's by default.")] = None,
    since: Annotated[int | None, Option(min=0, help="Version to begin with, in a run that had no keeper.")] = None,
    mirror: Annotated[list[str] | None, Option(metavar="URL", help="Copy the run to this address; repeatable.")] = None,
    view: Annotated[
        list[str] | None, Option(metavar="VIEW=RUN2", help="Keep a derived run, as `derive` does; repeatable.")
    ] = None,
    keep_last: Annotated[int | None, Option(min=1, help="Delete old versions, except so many newest ones.")] = None,
    keep_every: Annotated[int | None, Option(min=1, help="With --keep-last: and versions that divide by this.")] = None,
    grace: Annotated[
        float, Option(parser=seconds, metavar="TIME", help="With --keep-last: time that readers get.")
    ] = "1h",  # type: ignore[assignment]  # parsed like what is typed
    lease: Annotated[
        float, Option(parser=seconds, metavar="TIME", help="Time after which a silent keeper is replaced.")
    ] = "1min",  # type: ignore[assignment]
    poll: ui.PollOption = 1.0,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    sign: ui.SignOption = None,
    id: ui.NameOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Keep a run: anchors, skip deltas, mirrors and pruning, without the trainer.

    Run it close to the bucket. It needs memory for one copy of the model, disk
    for some more, and no GPU. It follows the run, proves every version, and
    reports bad objects: on stderr, in `deltawire log` and `dash`, and with --once
    by exit code 3.

    It writes anchors and skip deltas, so a trainer uploads nothing but deltas,
    and a replica 1,000 versions behind fetches at most 10 objects. Without a
    keeper, or without a new anchor for too long, the trainer writes anchors
    itself.

    Any number of keepers may run: one works, and another replaces it when it
    ends. It may be killed at any time. With --keep-last it also prunes, as
    `deltawire prune --apply` does. A mirror is the same run, byte for byte. A
    view is a derived run (see deltawire derive), and needs memory for its
    weights too.

    A keeper of a signed run needs a key of its own (--sign), to which the run's
    key delegates, and the run's public key (--trust): see deltawire delegate.
    That key is trusted with the weights.

    With --json there is one JSON object per line and version.

    \b
    Examples
      deltawire keep s3://runs/chat
      deltawire keep s3://runs/chat --mirror s3://eu-runs/chat
      deltawire keep s3://runs/chat --keep-last 2000 --keep-every 500
      deltawire keep s3://runs/chat --once           from cron
    """
    if keep_last is None and keep_every is not None:
        raise BadParameter("--keep-every needs --keep-last: without it no version is deleted")
    views = [(name, address) for name, mark, address in (one.partition("=") for one in view or ()) if mark and address]
    if len(views) != len(view or ()):
        raise BadParameter("name the view and its run: --view fp8-block=s3://runs/chat-fp8")
    levels = sum(3 * 4**level <= longest_skip for level in range(dw.KeeperOptions().levels))
    options = dw.KeeperOptions(
        anchors=anchors,
        anchor_every=anchor_every,
        levels=levels,
        encoding=encoding,
        since=since,
        retention=None if keep_last is None else dw.Retention(keep_last, keep_every, grace=grace),
        mirrors=tuple(mirror or ()),
        views=tuple(views),
        lease_s=lease,
    )
    with ui.ended_by_sigterm() as stop, ui.progress() as advance:
        if not once:
            dw.wait_for_run(run, poll, trust=trust)

        def fetched(n: int) -> None:
            advance("fetch the version to begin with", n, keeper.run.schema.nbytes)

        try:
            key = dw.SigningKey.find(sign)
            keeper = dw.Keeper(run, options, id=id, reference=reference, trust=trust, sign=key, progress=fetched)
        except ValueError as error:
            raise BadParameter(str(error), param_hint="--id") from None
        try:
            for kept in keeper.once() if once else keeper.follow(poll=poll, stop=stop):
                _say(kept, json)
            if once and not keeper.working:
                ui.emit_line({"keeper": keeper.holder}, f"another keeper is at work: {keeper.holder}", json)
        finally:
            keeper.close()
    if once and keeper.bad:
        raise Exit(3)


def _say(kept: dw.KeptVersion, json: bool) -> None:
    links = [{"kind": x.link.kind, "base": x.link.base, "bytes": x.link.bytes} for x in kept.added]
    fields = ui.pick(kept, "version", "newest", "working", "bad")
    value = {**fields, "added": links, "seconds": round(kept.seconds, 3)}
    made = ", ".join("anchor" if x["base"] is None else f"skip from {x['base']}" for x in links)
    text = f"v{kept.version}  {ui.duration(kept.seconds)}"
    text += f"  + {made}, {ui.size(kept.bytes)}" if made else ""
    text += "".join(f"  BAD: {bad}" for bad in kept.bad)
    behind = kept.newest - kept.version
    ui.emit_line(value, text + (f"  ({behind} behind)" if behind else ""), json)
