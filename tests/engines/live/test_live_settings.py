"""How a server reads what to follow."""

from __future__ import annotations

import pytest

from deltawire.core.errors import Misconfigured
from deltawire.engines.live import settings


def test_settings_have_defaults_and_refuse_nonsense() -> None:
    read = settings.read({})
    assert (read.run, read.poll, read.follow, read.pin, read.policy.kv) == ("", 1.0, True, "", "version")
    for name in ("DELTAWIRE_POLL", "DELTAWIRE_PAUSE", "DELTAWIRE_KV", "DELTAWIRE_FOLLOW"):
        with pytest.raises(Misconfigured, match=name):
            settings.read({name: "nonsense"})
