"""One environment server and one loaded policy for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from env_support import wordle_thread

if TYPE_CHECKING:
    from deltawire_wordle.sampling import ModelSampler


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Address of an environment server."""
    with wordle_thread() as address:
        yield address


@pytest.fixture(scope="session")
def shipped() -> ModelSampler:
    """The policy that ships."""
    import torch

    from deltawire_wordle.sampling import ModelSampler

    torch.set_num_threads(1)  # so small a model gains nothing from more, and tests share the cores
    return ModelSampler.load()
