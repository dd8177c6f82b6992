"""`deltawire keygen`: make a key that signs versions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter

import deltawire as dw

from . import ui


def command(
    path: Annotated[Path, Argument(metavar="[PATH]", help="File to write the private key to.")] = Path("deltawire.key"),
    json: ui.JsonOption = False,
) -> None:
    """Make a key pair: the private key into a new file, the public key to stdout.

    The trainer signs with the private key; replicas accept only versions signed
    by keys that they trust. Somebody who can write the bucket can then withhold
    versions, but not replace the model. The file is text that only you may read
    (mode 0600). Keep it with the trainer, and keep a copy: its holder can sign,
    and a lost key cannot be made again. The public key is no secret.

    \b
    Examples
      deltawire keygen ~/.ssh/runs.key         prints ed25519:4c1e…

    \b
      # the trainer: Publisher(sign=PATH), publish --sign PATH, or
      export DELTAWIRE_SIGN=~/.ssh/runs.key
      # whatever reads: Replica(trust=KEY), --trust KEY of commands, or
      export DELTAWIRE_TRUST=ed25519:4c1e…

    \b
      # a key for a keeper, which may add anchors and skip deltas but no version;
      # it is trusted with the weights, see deltawire delegate
      deltawire keygen keeper.key
      deltawire delegate s3://runs/chat ed25519:77aa… --sign ~/.ssh/runs.key
    """
    key = dw.SigningKey.generate()
    try:
        key.write(path)
    except FileExistsError:
        raise BadParameter(f"{path} exists, and a key is never overwritten", param_hint="PATH") from None
    except OSError as error:
        raise BadParameter(f"{path} cannot be written: {error.strerror}", param_hint="PATH") from None
    ui.emit({"path": str(path), "public": key.public}, lambda out: out.print(key.public, soft_wrap=True), json)
