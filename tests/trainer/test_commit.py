"""The commit: what happens when nobody knows whether it happened."""

from __future__ import annotations

import pytest

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys
from deltawire.core.errors import PublishFailed, StoreUnavailable
from deltawire.store import Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import history


class LosesAnswer(CountingStore):
    """Creates version 3, but says that it could not be reached."""

    lost = False

    def put_if_absent(self, key: str, data: bytes) -> None:
        super().put_if_absent(key, data)
        if key == keys.manifest(3) and not self.lost:
            self.lost = True
            raise StoreUnavailable("the answer was lost")


def test_a_version_committed_unawares_is_taken_up_and_never_written_over(store: Store) -> None:
    models = history(8)
    publisher = Publisher(LosesAnswer(store), anchor_ratio=1e6)
    for weights in models[:3]:
        publisher.publish(weights).result(60)
    with pytest.raises(StoreUnavailable):
        publisher.publish(models[3]).result(60)
    with pytest.raises(PublishFailed):
        publisher.publish(models[4])
    assert [publisher.publish(weights).result(60).version for weights in models[4:]] == [4, 5, 6, 7]
    result = verify(Run.open(store))
    assert (result.failure, result.versions, result.warnings) == (None, 8, [])
