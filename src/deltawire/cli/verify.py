"""`deltawire verify`: check a whole run."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

from typer import BadParameter, Exit, Option

import deltawire as dw

from . import ui


def command(
    run: ui.RunArgument,
    first: Annotated[str | None, Option("--from", metavar="VERSION", help="Start at this version.")] = None,
    last: Annotated[str | None, Option("--to", metavar="VERSION", help="Stop after this one.")] = None,
    quick: Annotated[
        bool, Option("--quick", help="Hash everything, replay nothing: no memory for weights needed.")
    ] = False,
    source: Annotated[
        str | None, Option(metavar="RUN", help="The run that this one is derived from, to compute it again.")
    ] = None,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Check a run: hash every object, replay the chain, compare every way.

    Stops at the first error, says what it is and what to do, and exits with 3.
    Every anchor, delta and skip delta must lead to weights with the digest of its
    version, and all links to a version must lead to the same weights, so that a
    forged one is found. With --trust every signature is checked too, which says
    whose weights they are. Reads the whole run, with memory for one copy of the
    weights. With --source, every version of a derived run is also computed again
    from that run.

    \b
    Examples
      deltawire verify s3://runs/chat
      deltawire verify s3://runs/chat --quick              hashes only
      deltawire verify s3://runs/chat --from 400 --to 450  a part of it
      deltawire verify s3://runs/chat --trust ed25519:4c1e…    who signed what
      deltawire verify s3://runs/chat --json | jq .failure
      deltawire verify s3://runs/chat-fp8 --source s3://runs/chat
    """
    if quick and source is not None:
        raise BadParameter("--source computes weights again, which --quick promises not to do: leave out one")
    # links that readers may refuse are checked all the same
    opened = dw.Run.open(run, trust=dw.Trust.of(trust, refuse_delegated=False))
    # a number may be outside of the run, or pruned
    bounds = {
        name: None if text is None else opened.resolve(text, early=True)
        for name, text in (("first", first), ("last", last))
    }
    with ui.progress() as advance:
        told = partial(advance, "verify")
        result = dw.verify(opened, **bounds, quick=quick, reference=reference, progress=told)
    recomputed = 0
    if source is not None and result.ok:
        with ui.progress() as advance:
            again = dw.verify_derived(
                opened,
                dw.Run.open(source, trust=trust),
                **bounds,
                reference=reference,
                progress=partial(advance, "derive again"),
            )
        recomputed, result.failure = again.proven, again.failure
        result.warnings += [f"{count:,} versions not computed again: {why}" for why, count in again.not_proven.items()]
    url = opened.store.url
    ui.emit(
        {"run": url, "ok": result.ok, "base_model": opened.info.base, **asdict(result), "recomputed": recomputed},
        lambda out: _render(out, opened, result, recomputed),
        json,
    )
    if not result.ok:
        raise Exit(3)


def _render(out: ui.Console, run: dw.Run, result: dw.Verification, recomputed: int) -> None:
    def line(word: str, style: str, text: str) -> None:
        from rich.text import Text

        out.print(Text.assemble((f"{word:<6}", style), text), soft_wrap=True)

    if run.info.base is not None:
        line("note", "yellow", f"adapters of {ui.clean(str(run.info.base), 2000)}")
    for warning in result.warnings:
        line("note", "yellow", warning)
    for reason, count in result.not_proven.items():
        line("note", "yellow", f"{count:,} objects only hashed: {reason}")
    for signer in result.signers:
        spans = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in signer.versions)
        said = f"{signer.signed} of version {spans} signed by {ui.clean(signer.key)}"
        if result.signatures_checked:
            line("good", "green", said)
        else:
            line("note", "yellow", f"{said}; nobody checked it: give the key with --trust")
    read = f"{result.versions:,} versions, {result.objects:,} objects, {ui.size(result.bytes)}"
    problem = result.failure
    if problem is None:
        again = f", {recomputed:,} versions computed again" if recomputed else ""
        line("good", "green", f"{run.store.url}: {read} read, {result.proven:,} anchors and deltas proven{again}")
        return
    line("bad", "red", problem.object if problem.version is None else f"version {problem.version}: {problem.object}")
    line("", "", f"{problem.message} ({problem.error})")
    line("", "", f"what to do: {problem.advice}")
    line("", "", f"good up to there: {read}")
