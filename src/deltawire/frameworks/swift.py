"""ms-swift's callback `deltawire`: the model of a training becomes a version of a run after every step."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import deltawire as dw
from deltawire.errors import Misconfigured
from deltawire.trl import DeltaSyncCallback

try:
    from swift.callbacks import TrainerCallback, callbacks_map
    from swift.version import __version__
except ImportError as error:
    raise Misconfigured(f"this is no ms-swift with callbacks in swift.callbacks ({error}); 4.6.0 was tested") from error

NAME, TESTED = "deltawire", "4.6.0"
HOOK = ["self", "args", "trainer"]
"""What ms-swift makes a callback with."""


def publish_to(run: str, **options: Any) -> None:
    """Make `--callbacks deltawire` publish to a run. Call it in the file that `--external_plugins` names.

    run       address of the run, one per training: s3://runs/policy
    options   of `deltawire.trl.DeltaSyncCallback` and `Publisher`: every, peft, anchor_every, …
    """
    found = [*inspect.signature(TrainerCallback.__init__).parameters]
    if found != HOOK or not isinstance(callbacks_map, dict):
        raise Misconfigured(
            f"ms-swift {__version__} makes callbacks in another way than ms-swift {TESTED}, with which deltawire "
            f"{dw.__version__} was tested: install ms-swift=={TESTED}, or a deltawire that was tested with yours"
        )
    if not run:
        raise Misconfigured("publish_to(run) needs the address of the run: s3://runs/policy")
    callbacks_map[NAME] = partial(SwiftCallback, run, options)


class SwiftCallback(DeltaSyncCallback):
    """`DeltaSyncCallback`, made as ms-swift makes callbacks."""

    def __init__(self, run: str, options: dict[str, Any], args: Any, trainer: Any) -> None:
        super().__init__(run, **options)
        self._trainer = trainer

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Move before the trainer's reporters, so that they have our metrics."""
        self._trainer.remove_callback(self)
        self.attach(self._trainer)
