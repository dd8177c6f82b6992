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


def test_adapters_are_named_and_may_have_several_addresses() -> None:
    text = "policy=s3://us/lora?region=a,s3://eu/lora@41, org/judge = /runs/judge"
    read = settings.read({"DELTAWIRE_ADAPTERS": text, "DELTAWIRE_ADAPTERS_KEEP": "3"})
    assert read.adapters == {"policy": "s3://us/lora?region=a,s3://eu/lora@41", "org/judge": "/runs/judge"}
    assert (read.adapters_keep, settings.read({}).adapters, settings.read({}).adapters_keep) == (3, {}, 1)
    for wrong in ("s3://runs/lora", "policy=", "a@1=s3://runs/lora", "p=/a, p=/b"):
        with pytest.raises(Misconfigured, match="DELTAWIRE_ADAPTERS"):
            settings.read({"DELTAWIRE_ADAPTERS": wrong})
    with pytest.raises(Misconfigured, match="DELTAWIRE_ADAPTERS_KEEP is '-1'"):
        settings.read({"DELTAWIRE_ADAPTERS_KEEP": "-1"})
