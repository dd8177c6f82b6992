"""How a server is told what to follow, and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deltawire.core.errors import Misconfigured
from deltawire.engines.options import ServerOptions, settings


def test_without_variables_all_is_as_usual() -> None:
    assert ServerOptions.read({}) == ServerOptions()
    assert ServerOptions.read({setting.variable: " " for setting in settings() if setting.variable}) == ServerOptions()
    assert (ServerOptions().plugin_kv, ServerOptions(kv="keep").plugin_kv) == ("version", "keep")


def test_variables_carry_every_option_that_has_one() -> None:
    given = ServerOptions(
        run="s3://runs/chat", pin="-2", adapters={"policy": "s3://us/lora,s3://eu/lora", "judge": "/runs/judge@3"},
        adapters_keep=0, reference=Path("/models/chat"), address="203.0.113.7:8000", token="t", poll=0.5, follow=False,
        heartbeat=0.0, heartbeats="s3://runs/chat", kv="clear", pause="abort", staging_memory=0.5,
        version_wait=0.0,
    )  # fmt: skip
    carried = [setting for setting in settings() if setting.variable]
    assert [setting.name for setting in carried if getattr(given, setting.name) == setting.default] == []
    assert ServerOptions.read(given.variables()) == given
    # a variable that the environment has for another value is overwritten
    assert ServerOptions.read({**given.variables(), **ServerOptions().variables()}) == ServerOptions()
    # the others are flags of the engine
    assert replace(given, port=9, dtype="bfloat16").variables() == given.variables()
    assert "203.0.113.7" in repr(given)
    assert "token" not in repr(given)


@pytest.mark.parametrize(
    "variable, texts, right",
    [
        ("DELTAWIRE_POLL", ("nonsense", "0", "-1", "nan", "inf"), "at least 0.01"),
        ("DELTAWIRE_HEARTBEAT", ("ten", "-1"), "at least 0"),
        ("DELTAWIRE_VERSION_WAIT", ("-0.1",), "at least 0"),
        ("DELTAWIRE_ADAPTERS_KEEP", ("-1", "0.5"), "at least 0"),
        ("DELTAWIRE_STAGING_MEMORY", ("half", "-1"), "at least 0"),
        ("DELTAWIRE_PAUSE", ("nonsense",), "keep or wait or abort"),
        ("DELTAWIRE_KV", ("nonsense",), "version or clear or keep"),
        ("DELTAWIRE_FOLLOW", ("yes", "01"), "1 .on. or 0"),
    ],
)
def test_nonsense_is_refused_by_name(variable: str, texts: tuple[str, ...], right: str) -> None:
    for text in texts:
        with pytest.raises(Misconfigured, match=f"{variable} is '{text}'; it can be .*{right}"):
            ServerOptions.read({variable: text})


def test_adapters_are_named_and_may_have_several_addresses() -> None:
    found = ServerOptions.read(
        {"DELTAWIRE_ADAPTERS": "policy=s3://us/lora?region=a,s3://eu/lora@41, org/judge = /runs/judge"}
    )
    assert found.adapters == {"policy": "s3://us/lora?region=a,s3://eu/lora@41", "org/judge": "/runs/judge"}
    for wrong in ("s3://runs/lora", "policy=", "a@1=s3://runs/lora", "p=/a, p=/b"):
        with pytest.raises(Misconfigured, match="DELTAWIRE_ADAPTERS"):
            ServerOptions.read({"DELTAWIRE_ADAPTERS": wrong})
