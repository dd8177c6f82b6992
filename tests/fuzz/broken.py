"""A target with every fault the fuzzer must find, for its own tests."""

from __future__ import annotations

import os
from random import Random

from targets import Case, Wrong

from deltawire.core.errors import ManifestError


class Broken:
    kinds = ("broken",)
    faults = ("none", "typed", "foreign", "wrong", "grow", "too large", "die", "hang")

    def make(self, rng: Random, kind: str) -> Case:
        return Case(kind, rng.choice(self.faults), {"noise": rng.randbytes(8)})

    def run(self, case: Case) -> None:
        match case.action:
            case "typed":
                raise ManifestError("as it should be")
            case "foreign":
                raise KeyError("version")
            case "wrong":
                raise Wrong("other bits")
            case "grow":
                len(bytearray(b"x") * (1500 << 20))
            case "too large":
                bytearray(1 << 40)
            case "die":
                os.abort()
            case "hang":
                while True:
                    pass
