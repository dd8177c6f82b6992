"""`Publisher.weights`: what was published last, read without a copy."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire import Publisher, Region, digest_of
from deltawire.core.errors import Misconfigured, VersionNotFound
from deltawire.models import ModelView
from deltawire.store import Store
from support import history


def test_the_weights_published_last_are_read_without_a_copy(store: Store) -> None:
    first, second = history(2)
    publisher = Publisher(store)
    with pytest.raises(VersionNotFound, match="no version yet"):
        publisher.weights()
    publisher.publish(first).result(60)
    weights = publisher.weights()
    assert str(digest_of(weights)) == str(digest_of(ModelView(first)))
    publisher.publish(second)
    # perhaps not in the bucket yet
    assert str(digest_of(publisher.weights())) == str(digest_of(ModelView(second)))
    publisher.close()
    with Publisher(store) as later:
        weights = later.weights()
        assert str(digest_of(weights)) == str(digest_of(ModelView(second)))
        assert later.version == 1
        tensor = weights.schema.tensors[0]
        part = Region(tensor, 0, tensor.rows, 0, tensor.columns)
        assert np.shares_memory(weights.region(part), later.weights().region(part))
        # what follows is a delta from there
        published = later.publish(first).result(60)
        assert (published.version, published.kinds) == (2, ("delta",))


def test_weights_that_are_computed_from_others_are_not_read(store: Store) -> None:
    with Publisher(store, view="fp8-block") as publisher, pytest.raises(Misconfigured, match="a view"):
        publisher.weights()
