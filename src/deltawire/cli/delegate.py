"""`deltawire delegate`: let a keeper's key add links to a signed run."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, BadParameter

import deltawire as dw

from . import ui


def command(
    run: ui.RunArgument,
    keeper: Annotated[str, Argument(metavar="KEEPER_KEY", help="Public key of the keeper, as keygen prints it.")],
    sign: ui.SignOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Let a keeper add anchors and skip deltas to a signed run.

    Replicas that trust the run's key then also accept links that are signed with
    the keeper's key. So that key is trusted with the weights: its holder can sign
    an anchor of any version with other weights, made to have its digest.
    Keep it as safe as the run's own. `deltawire verify` finds such an anchor, and
    servers with --refuse-delegated use none. The key can sign no version, config
    or tokenizer. The statement is written to the run, where the keeper finds it.
    It holds until the run's key is rotated.

    \b
    Examples
      deltawire keygen keeper.key              prints ed25519:77aa…
      deltawire delegate s3://runs/chat ed25519:77aa… --sign runs.key
      deltawire keep s3://runs/chat --sign keeper.key --trust ed25519:4c1e…
    """
    dw.SigningKey.check_public(keeper, "the keeper's key")  # first: the arguments may be in the wrong order
    key = dw.SigningKey.find(sign)
    if key is None:
        raise BadParameter("name the run's private key: --sign PATH, or DELTAWIRE_SIGN")
    opened = dw.Run.open(run, trust=dw.Trust(key.public, remember=False))
    dw.delegate(opened, key, keeper)
    value = {"run": opened.store.url, "by": key.public, "keeper": keeper}
    said = f"{keeper} may add links to {opened.store.url}, and is trusted with its weights"
    ui.emit(value, lambda out: out.print(said, soft_wrap=True), json)
