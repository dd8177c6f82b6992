"""Load a model and its tokenizer: from a folder, from the hub, or from nothing but a run."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

from ... import Run, Schema, wait_for_run
from ...errors import DeltawireError, SchemaMismatch
from ...store import Store
from ..live import ServerOptions, lacks_tokenizer, launch
from .batch import require_batchable
from .template import ChatTemplate

log = logging.getLogger("deltawire")

_COMPUTED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PLAIN_LAYERS = {"full_attention", "sliding_attention"}


class UntrustedCode(DeltawireError):
    """A checkpoint needs code of its own, which is never run."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can be served."""

    model: Any
    tokenizer: Any
    """None where the folder has none: then requests are made of token ids."""
    template: ChatTemplate | None
    eos: frozenset[int]
    max_model_len: int


def load_options(options: ServerOptions, address: str | Store) -> LoadedModel:
    """Load the model that the options name; without one, that of the run, once the run has a version.

    address    of the run, or its store
    """
    run = cache(lambda: wait_for_run(address, options.poll))
    dtype = compute_dtype(options, run)
    load_from = partial(load, dtype=dtype, device=options.device, max_model_len=options.max_model_len)
    if options.model is not None:
        return load_from(options.model)
    with tempfile.TemporaryDirectory(prefix="deltawire-serve-") as made:
        folder = Path(made, "m")
        launch.write_version(run(), options.pin, folder, reference=options.reference)
        return load_from(str(folder))


def compute_dtype(options: ServerOptions, run: Callable[[], Run]) -> torch.dtype:
    """The dtype to compute in. On a CPU, which has no fast 16-bit product, weights may be wider than the run's."""
    if options.dtype != "auto":
        return getattr(torch, options.dtype)  # type: ignore[no-any-return]
    if torch.device(options.device).type == "cpu":
        return torch.float32
    return dtype_of(run().schema)


def load(source: str, *, dtype: torch.dtype, device: str = "cpu", max_model_len: int | None = None) -> LoadedModel:
    """`source` is a checkpoint folder (the weights may be missing: the run has them) or a hub id."""
    disable_progress_bar()
    config = _config(source)
    if getattr(config, "quantization_config", None) is not None:
        # transformers would load it as bf16, under other names than the run has
        raise SchemaMismatch(
            "config.json has a quantization_config, and the built-in server computes with 16 or 32 bits: serve the run "
            "that these weights are derived from, or use --engine vllm"
        )
    place = Path(source)
    if place.is_dir() and not any(place.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, trust_remote_code=False)
        except FileNotFoundError as error:
            raise SchemaMismatch(f"{source} is not a whole checkpoint folder: {error}") from error
    model = model.to(device).eval().requires_grad_(False)
    require_batchable(model, source)
    tokenizer = _tokenizer(source)
    eos, length = _eos(source, config, tokenizer), _length(config, max_model_len)
    template = None
    if getattr(tokenizer, "chat_template", None):
        template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
    return LoadedModel(model, tokenizer, template, eos, length)


def dtype_of(schema: Schema) -> torch.dtype:
    """Return the dtype of most weights of a run. Its config.json may have that of the checkpoint it began with."""
    weights = Counter[str]()
    for tensor in schema.tensors:
        weights[tensor.dtype] += tensor.elements
    found = next((name for name, _ in weights.most_common() if name in _COMPUTED), "BF16")
    return _COMPUTED[found]


def _config(source: str) -> Any:
    """The configuration of a model that transformers itself knows: code that comes with a checkpoint is never run."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ValueError:
        said, _ = PreTrainedConfig.get_config_dict(source)
        _refuse_code(source, "config.json", said.get("auto_map"))
        raise
    wanted = getattr(config, "auto_map", None)
    if wanted:
        log.warning("%s asks for code of its own (%s); transformers' class is used instead", source, _named(wanted))
    attention = config.get_text_config()._attn_implementation
    if isinstance(attention, str) and "/" in attention:
        _refuse_code(source, "config.json", {"attn_implementation": attention})
    return config


def _refuse_code(source: str, file: str, wanted: Any) -> None:
    if wanted:
        raise UntrustedCode(
            f"{file} of {source} asks for code of its own ({_named(wanted)}), which is never run: "
            "serve a model that transformers knows by itself"
        )


def _named(wanted: Any) -> str:
    named = wanted.values() if isinstance(wanted, dict) else [wanted]
    return ", ".join(str(name) for name in named)[:200]


def _length(config: Any, wanted: int | None) -> int:
    text = config.get_text_config()
    odd = set(getattr(text, "layer_types", None) or ()) - PLAIN_LAYERS
    if odd:
        raise SchemaMismatch(f"layers of type {min(odd)} are unknown to the built-in server; use --engine vllm")
    length = getattr(text, "max_position_embeddings", None) or 2048
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()) and text.sliding_window:
        # within one window, sliding attention is plain attention
        length = min(length, text.sliding_window)
    if wanted is not None and wanted > length:
        raise SchemaMismatch(f"this model is made for at most {length} positions, not {wanted}")
    return wanted or length


def _tokenizer(source: str) -> Any:
    if lacks_tokenizer(source):
        # transformers would create one without a vocabulary
        log.warning("no tokenizer in %s, so requests must be token ids", source)
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ValueError):
            _refuse_code(source, "tokenizer_config.json", get_tokenizer_config(source).get("auto_map"))
        log.warning("no tokenizer in %s, so requests must be token ids: %s", source, str(error).splitlines()[0])
        return None


def _eos(source: str, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: by the generation config, the config and the tokenizer."""
    try:
        said = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        said = None
    found: set[int] = set()
    for value in (
        said,
        getattr(config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    count = config.get_text_config().vocab_size
    return frozenset(token for token in found if 0 <= token < count)
