"""Chat templates out of a bucket: seconds and megabytes, and nothing of this process."""

from __future__ import annotations

from typing import Any

import pytest
from test_server_requests import SAID

from deltawire.engines.server import template
from deltawire.engines.server.template import ChatTemplate, TemplateFailed


def test_a_template_out_of_a_bucket_gets_seconds_and_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = {
        "memory": ("{{ 'a' * 4000000000 }}", "MiB"),
        "length": ("{{ 'a' * 2000 }}", "comes to 2002 bytes; 1000"),
        "error": ("{{ raise_exception('no') }}", "no"),
        "escape": ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        "time": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took more than"),
    }
    cases = "".join(f"{{% if how == '{name}' %}}{code}{{% endif %}}" for name, (code, _) in hostile.items())
    kept = ChatTemplate(cases + "hi", {})

    def render(**variables: Any) -> str:
        return kept.render(SAID, variables, prompt=True, resume=False, most=1000)

    try:
        assert render() == "hi"
        for name, (_, said) in hostile.items():
            monkeypatch.setattr(template, "RENDER_S", 0.5 if name == "time" else 30.0)
            with pytest.raises(TemplateFailed, match=said):
                render(how=name)
        monkeypatch.setattr(template, "RENDER_S", 30.0)
        assert render() == "hi", "in a new process, after one that was killed"
    finally:
        kept.close()
    with pytest.raises(TemplateFailed, match="shutting down"):
        render()
