"""Keys that publishers write are accepted; nothing else is."""

from __future__ import annotations

import pytest

from deltawire.core import keys
from deltawire.core.errors import ForeignObject


def test_keys_of_data_objects() -> None:
    assert keys.anchor(40, "0123abcd") == "anchors/step_000040.0123abcd.safetensors"
    assert keys.delta(40, 41, "0123abcd") == "deltas/step_000041.0123abcd.safetensors"
    assert keys.delta(32, 40, "0123abcd") == "deltas/step_000032-000040.0123abcd.safetensors"
    assert keys.delta(40, 41, "0123abcd", (1, 4)) == "deltas/step_000041.0123abcd-00002-of-00004.safetensors"
    for key in (keys.anchor(40, "0123abcd"), keys.delta(32, 40, "0123abcd"), keys.delta(39, 40, "0123abcd", (0, 2))):
        keys.check_data(key)
        assert keys.data_version(key) == 40


@pytest.mark.parametrize(
    "key",
    ["", "run.json", "anchors/../x.safetensors", "other/anchors/step_000040.0123abcd.safetensors",
     "anchors/step_40.0123abcd.safetensors", "anchors/step_000040.0123ABCD.safetensors",
     "deltas/step_000041.safetensors"],
)  # fmt: skip
def test_other_keys_are_no_data_objects(key: str) -> None:
    assert keys.data_version(key) is None
    with pytest.raises(ForeignObject):
        keys.check_data(key)
    assert not keys.is_file(key)


def test_versions_of_manifests() -> None:
    assert keys.version_of(keys.manifest(41)) == 41
    assert keys.version_of(keys.manifest(keys.MAX_VERSION)) == keys.MAX_VERSION
    assert keys.version_of("versions/41.json") is None


def test_names_of_tags_and_replicas() -> None:
    assert keys.tag_name(keys.tag("best-so.far")) == "best-so.far"
    for name in ("v41", "latest", "newest", "1st", "a/b", ""):
        assert keys.tag_name(f"tags/{name}.json") is None
        with pytest.raises(ValueError, match="a tag is"):
            keys.tag(name)
    assert keys.replica("gpu-1.a") == "replicas/gpu-1.a.json"
    with pytest.raises(ValueError, match="a replica id is"):
        keys.replica("../x")
