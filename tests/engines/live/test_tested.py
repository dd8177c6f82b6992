"""Versions of engines that were run: servers, documents and extras name the same ones."""

from __future__ import annotations

import re
import sys
from importlib import metadata

import pytest

from deltawire.engines.live import tested
from tests.docs.documents import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.parametrize(
    "engine, installed, known",
    [
        ("vllm", "0.32.0", True), ("vllm", "0.29.0+cpu", True), ("vllm", "0.32.1", True), ("vllm", "0.34.0", False),
        ("vllm", "0.33.0", True), ("vllm", "0.3.2", False), ("vllm", "0.320.0", False), ("sglang", "0.5.23", True),
        ("sglang", "0.5.23.post1", True), ("sglang", "0.5.24", False), ("sglang", "0.5.2", False),
    ],
)  # fmt: skip
def test_a_version_that_was_not_run_is_named(
    engine: str, installed: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {engine: installed}[name])
    said = tested.untested(engine)
    assert (said == "") == known
    assert known or said.startswith(f"{engine} {installed} was not tested")


def test_an_engine_of_no_known_version_is_not_judged() -> None:
    assert tested.untested("vllm") == ""


def test_the_documents_and_the_extras_name_these_versions() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        assert re.search(rf"{name} {re.escape(tested.listed(engine))} \[\d+\]", text)
        *series, last = map(int, tested.VERSIONS[engine][-1].split("."))
        above = ".".join(map(str, (*series, last + 1)))
        assert extras[engine] == [f"{engine}>={tested.VERSIONS[engine][0]},<{above}"]
