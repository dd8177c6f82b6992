"""`deltawire derive`: keep a run that is a view of another one, such as its fp8 weights."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option, echo

import deltawire as dw

from . import ui


def command(
    run: ui.RunArgument,
    derived: Annotated[str, Argument(metavar="RUN2", help="Address of the derived run.")],
    view: Annotated[str, Option("--as", metavar="VIEW", help="What to make of the weights.")] = "fp8-block-ue8m0",
    once: Annotated[bool, Option("--once", help="Derive the versions that are there, then end.")] = False,
    first: Annotated[
        str | None, Option("--from", metavar="VERSION", help="First version of a new RUN2; by default the oldest.")
    ] = None,
    encoding: Annotated[ui.Encoding, Option(help="How deltas are coded: packed, context, auto or raw.")] = "packed",
    anchor_every: ui.AnchorEveryOption = None,
    poll: ui.PollOption = 1.0,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    sign: ui.SignOption = None,
    take_over: ui.TakeOverOption = False,
    json: ui.JsonOption = False,
) -> None:
    """Follow a run and publish a view of it as another run.

    Each version of RUN becomes a version of RUN2, an ordinary run that engines
    follow: e4m3 weights in blocks of 128 × 128 with their scales, and config.json
    says so. Scales of fp8-block-ue8m0 are powers of two, for DeepGEMM (vLLM's
    default on Hopper); those of fp8-block are any numbers, for CUTLASS and
    Triton. Only what changed is converted. A version names the one it was
    derived from and its digest, and `verify RUN2 --source RUN` computes all of
    them again.

    The command may be killed at any time; the next one continues where RUN2 ends.
    It needs memory for the weights of both runs, and no GPU. --trust is for RUN;
    RUN2 is signed if DELTAWIRE_SIGN names a key.

    \b
    Examples
      deltawire derive s3://runs/chat s3://runs/chat-fp8
      deltawire derive s3://runs/chat s3://runs/chat-fp8 --once --as fp8-block
      deltawire derive s3://runs/chat s3://runs/chat-fp8 --from latest
      deltawire verify s3://runs/chat-fp8 --source s3://runs/chat
    """
    with ui.ended_by_sigterm() as stop:
        if not once:
            dw.wait_for_run(run, poll, trust=trust)
        source = dw.Run.open(run, trust=trust)
        start = 0 if first is None else source.resolve(first)
        options = {"encoding": encoding, "anchor_every": anchor_every, "sign": sign, "takeover": take_over}
        with dw.Deriver(source, derived, view, reference=reference, **options) as deriver:
            before = deriver.reached
            for published in deriver.follow(start, once=once, poll=poll, stop=stop):
                _say(published, deriver.reached, json)
            if once and deriver.reached == before and not json:
                there = "has no version" if before is None else f"has no version after {before}, which {derived} has"
                echo(f"nothing to derive: {run} {there}", err=True)


def _say(published: dw.Published, source: int | None, json: bool) -> None:
    fields = ui.pick(published, "digest", "changed", "elements", "bytes", "kinds", "timings")
    value = {"version": published.version, "source_version": source, **fields}
    share, kinds = ui.percent(published.changed, published.elements), " + ".join(published.kinds)
    took = ui.durations(published.timings)
    text = f"v{published.version} of v{source}  {kinds}  {share} changed  {ui.size(published.bytes)}  {took}"
    ui.emit_line(value, text, json)
