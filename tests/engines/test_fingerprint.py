"""A SHA-256 of live weights: the trainer's own, and no other bit's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltawire.engines.fingerprint import fingerprint
from tests.engines.server.serving import checkpoint, nudge, publisher, serving, tiny_model


def test_it_sees_a_single_bit_a_name_and_a_shape() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3), "scalar": torch.tensor(1.0)}
    marks = {fingerprint(weights, "bf16")}
    marks.add(fingerprint({**weights, "b": torch.tensor([0.0, -0.0, 0.0])}, "bf16"))  # equal as a number
    marks.add(fingerprint({"a": weights["a"], "c": weights["b"], "scalar": weights["scalar"]}, "bf16"))
    marks.add(fingerprint({**weights, "a": weights["a"].reshape(3, 2)}, "bf16"))
    marks.add(fingerprint(weights, "fp16"))
    assert len(marks) == 5
    assert fingerprint({name: weights[name].clone() for name in reversed(weights)}, "bf16") in marks


def test_what_lies_between_two_values_of_the_wire_is_not_overlooked() -> None:
    between = {"a": torch.tensor([1.0 + 2**-12])}
    assert fingerprint(between, "bf16") == fingerprint({"a": torch.tensor([1.0])}, "bf16")
    with pytest.raises(ValueError, match="a has weights that are no bf16"):
        fingerprint(between, "bf16", exact=True)
    with pytest.raises(ValueError, match="dtype must be one of"):
        fingerprint(between, "int4")


def test_without_a_dtype_every_bit_counts() -> None:
    weights = {"a": torch.tensor([1.0 + 2**-12]), "empty": torch.zeros(0, 2), "view": torch.arange(6)[::2]}
    marks = {fingerprint(weights), fingerprint({**weights, "a": torch.tensor([1.0])})}
    marks.add(fingerprint({**weights, "a": weights["a"].bfloat16()}))
    marks.add(fingerprint({**weights, "empty": torch.zeros(2, 0)}))
    marks.add(fingerprint({**weights, "view": torch.arange(3)}))
    assert len(marks) == 5
    assert fingerprint({**weights, "view": torch.tensor([0, 2, 4])}) in marks


def test_the_server_gives_that_of_its_live_weights(tmp_path: Path) -> None:
    model = tiny_model()
    folder = checkpoint(tmp_path / "checkpoint", model)
    with publisher(tmp_path / "run", folder) as trainer:
        trainer.publish(model, wait=True)
        with serving(tmp_path / "run") as (server, client):
            for version in (0, 1):
                if version:
                    nudge(model, seed=version)
                    trainer.publish(model, wait=True)
                    while server.follower.version != version:
                        pass
                found = client.get("/deltawire/fingerprint").json()
                assert found == {"version": version, "sha256": fingerprint(model.state_dict(), "bf16")}
            with torch.no_grad():
                next(server.loaded.model.parameters()).view(-1)[0] += 1e-6
            assert client.get("/deltawire/fingerprint").status_code == 400
            assert client.get("/deltawire/fingerprint", params={"dtype": "int4"}).status_code == 400
