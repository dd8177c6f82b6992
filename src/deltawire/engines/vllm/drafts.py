"""The draft model of speculative decoding: a second model in each worker, with a loader of its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .guard import pack_again


def draft_config(config: Any) -> Any | None:
    """The configuration of a server's draft model; None if tokens are proposed without a model, or not at all."""
    speculative: Any = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return None if draft is None or draft is speculative.target_model_config else draft


def draft_has_own(config: Any) -> bool:
    """Whether the draft model is loaded from a checkpoint of its own, and not from that of the model, as layers that
    predict the tokens after the next one are (MTP). Asked before a reload changes the names of checkpoints."""
    draft = draft_config(config)
    return draft is not None and draft.model != config.model_config.model


def draft_model(worker: Any) -> nn.Module | None:
    """The draft model of a worker. Of a pipeline, the last stage has it."""
    found = getattr(worker, "get_draft_model", None)
    return found() if found is not None else None


def reload_draft(worker: Any, folder: str) -> None:
    """Have vLLM load a checkpoint folder into the draft model, as its `reload_weights` does into the model."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    draft: Any = draft_model(worker)
    pack_again(draft)
    config = copy.copy(worker.vllm_config)
    config.model_config = draft_config(config)
    with set_current_vllm_config(config):
        reload_weights(config, draft, weights_iterator=None, weights_path=folder, is_checkpoint_format=True)
