"""Fixtures every room's tests share."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import HealthCheck, settings

from deltawire.store import ObjectStore, Store

# no deadline: the first call of a kernel may compile it
settings.register_profile("deltawire", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deltawire")


@pytest.fixture
def store() -> Store:
    """A fresh bucket in this process's memory."""
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")
