"""Numbers from the environment."""

from __future__ import annotations

import pytest

from deltawire.core.errors import Misconfigured
from deltawire.core.parallel import default_threads
from deltawire.core.settings import gigabytes


def test_an_amount_in_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", 2_000_000_000), ("20", 20_000_000_000), ("0.5", 500_000_000)):
        monkeypatch.setenv("DELTAWIRE_TRIED", text)
        assert gigabytes("DELTAWIRE_TRIED", 2) == expected
    for text in ("0", "-1", "many", "inf", "nan"):
        monkeypatch.setenv("DELTAWIRE_TRIED", text)
        with pytest.raises(Misconfigured, match="DELTAWIRE_TRIED"):
            gigabytes("DELTAWIRE_TRIED", 2)


def test_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_THREADS", "3")
    assert default_threads() == 3
    for text in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("DELTAWIRE_THREADS", text)
        with pytest.raises(Misconfigured, match="DELTAWIRE_THREADS"):
            default_threads()
