"""Config and tokenizer files that are published with the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from ..core import full, keys
from ..core.errors import ObjectTooLarge, UnsafeName
from ..core.manifest import MAX_FILE, File
from ..core.schema import Schema
from ..huggingface import checkpoint_folder, tokenizer_files
from ..models import Model, checkpoint_of, class_name, files_of
from ..store import Store
from ..views.blocks import with_config
from .adapters import Adapter
from .pairs import Pairs

log = logging.getLogger("deltawire")


class _Config(msgspec.Struct):
    """The part of a model's config.json that is read."""

    architectures: tuple[str, ...] = ()


class _AdapterConfig(msgspec.Struct):
    """The part of an adapter's adapter_config.json that is read."""

    base_model_name_or_path: str | None = None


class Companions:
    """Files that are published with the weights: those that the user gave, those of the model and its tokenizer."""

    def __init__(
        self,
        given: Mapping[str, bytes] | Path | None = None,
        tokenizer: Any = None,
        wire_dtype: str | None = None,
        view: str | None = None,
    ) -> None:
        """`given` are contents by name, or a checkpoint folder. They replace all files of the version before; None
        keeps those. Files of model and tokenizer replace the ones with the same names, unless the user gave one. The
        tokenizer beside the checkpoint that the model was loaded from is published where there would be none. With a
        view, config.json says so."""
        self._given = _read(given) if isinstance(given, Path) else given
        self._tokenizer, self._wire_dtype, self._view = tokenizer, wire_dtype, view
        self._found: Mapping[str, bytes] | None = None
        """Of model and tokenizer, from the first publish on."""
        self._class = ""
        self._origin: Path | None = None
        """Where the model was loaded from."""
        self._found_tokenizer: Mapping[str, bytes] | None = None
        """The tokenizer that is there, once it was looked for."""

    def find(self, model: Model | Pairs) -> None:
        """Collect the files of the model and its tokenizer, at the first call."""
        if self._found is not None:
            return
        found = model.files if isinstance(model, Adapter) else files_of(model, self._wire_dtype)
        if self._tokenizer is not None:
            found = {**found, **tokenizer_files(self._tokenizer)}
        self._found, self._class, self._origin = found, class_name(model), checkpoint_folder(checkpoint_of(model))

    @property
    def model_name(self) -> str:
        """The class of the model, by its config.json or as it is in memory; empty where neither is known."""
        config = self._all().get("config.json", b"")
        try:
            return msgspec.json.decode(config, type=_Config).architectures[0]
        except (msgspec.MsgspecError, IndexError):
            return self._class

    @property
    def base_name(self) -> str | None:
        """Name of the model that an adapter belongs to, by its adapter_config.json; None if there is none."""
        config = self._all().get(full.ADAPTER_CONFIG)
        if config is None:
            return None
        try:
            return msgspec.json.decode(config, type=_AdapterConfig).base_model_name_or_path or ""
        except msgspec.MsgspecError:
            return ""

    def put(self, store: Store, before: tuple[File, ...], schema: Schema) -> tuple[File, ...]:
        """Upload the files that the version before does not have. Returns all files of the next version,
        whose weights have this schema."""
        known = {file.key for file in before}
        result = {file.name: file for file in before} if self._given is None else {}
        files = self._all()
        if "config.json" in (names := {*result, *files}) and not full.has_tokenizer(names):
            files = {**self._tokenizer_of_checkpoint(store.url), **files}
        for name, data in sorted(files.items()):
            full.check_companion(name)
            if self._view is not None and name == "config.json":
                data = with_config(data, schema, self._view)
            if len(data) > MAX_FILE:
                raise ObjectTooLarge(
                    f"{name!r} has {len(data):,} bytes; what goes with the weights has at most {MAX_FILE:,}"
                )
            hash = blake3(data).hexdigest(length=16)
            key = keys.file(hash)
            if key not in known:
                store.put(key, data)
            result[name] = File(name, key, len(data), hash)
        return tuple(result[name] for name in sorted(result))

    def _tokenizer_of_checkpoint(self, run: str) -> Mapping[str, bytes]:
        """The tokenizer of the checkpoint that the model was loaded from. Logs once which that is, or that there is
        none."""
        if self._found_tokenizer is None:
            self._found_tokenizer = {}
            try:
                self._found_tokenizer = full.tokenizer_in(self._origin) if self._origin is not None else {}
            except (OSError, UnsafeName) as error:
                log.warning("the tokenizer of %s is not published: %s", self._origin, error)
            if self._found_tokenizer and self._origin is not None:
                _warn_of_code(self._origin, self._found_tokenizer)
                log.info("the tokenizer of %s is published with the weights", self._origin)
            else:
                log.warning(
                    "%s has no tokenizer, so its servers take and give token ids only: pass tokenizer= to Publisher, "
                    "or files= with a folder that has its files",
                    run,
                )
        return self._found_tokenizer

    def _all(self) -> dict[str, bytes]:
        # merged anew: a deriver or an import puts files into what it has given
        return {**(self._found or {}), **(self._given or {})}


def _read(folder: Path) -> dict[str, bytes]:
    """The small files of a checkpoint folder. What is not published is logged."""
    files = full.companion_files(folder)
    _warn_of_code(folder, files)
    left_out = full.left_out(folder)
    if left_out:
        code = any(name.endswith(full.CODE_SUFFIXES) for name in left_out)
        listed = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        log.log(logging.WARNING if code else logging.INFO, "not published from %s: %s", folder, listed)
    return files


def _warn_of_code(folder: Path, files: Mapping[str, bytes]) -> None:
    for name in full.asks_for_code(files):
        log.warning(
            "%s asks for code of its own (auto_map): code is never published, and no follower runs any", folder / name
        )
