"""Keys as files and text, and signatures that cover every byte."""

from __future__ import annotations

import builtins
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.core import signing
from deltawire.core.errors import Misconfigured, MissingExtra, SignatureError
from deltawire.core.signing import (
    KEEPER,
    MANIFEST,
    NEXT_KEY,
    Endorsement,
    SigningKey,
    check_seal,
    endorsed,
    public_keys,
)

A, B, C = (SigningKey.generate() for _ in range(3))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    A.write(tmp_path / "a.key")
    return tmp_path / "a.key"


def secret(path: Path) -> str:
    return path.read_text().splitlines()[1]


def test_a_key_file_is_for_its_owner_alone_and_never_overwritten(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert SigningKey.read(key_file).public == A.public
    assert SigningKey.read(secret(key_file)).public == A.public, "the text of a file does as well"
    with pytest.raises(FileExistsError):
        B.write(key_file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_private_key_that_others_may_read_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(Misconfigured, match="chmod 600"):
        SigningKey.read(key_file)


@pytest.mark.parametrize("content", ["", "hello", "ed25519-private:12", "\0\xff", "ed25519-private:" + "g" * 64])
def test_a_file_that_holds_no_private_key(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(Misconfigured, match="no private key"):
        SigningKey.read(path)


def test_keys_of_the_wrong_kind_and_none(key_file: Path, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="cannot be read: No such file"):
        SigningKey.read(tmp_path / "missing.key")
    (tmp_path / "public").write_text(A.public)
    (tmp_path / "public").chmod(0o644)
    with pytest.raises(Misconfigured, match="holds a public key: signing needs the private one"):
        SigningKey.read(tmp_path / "public")
    with pytest.raises(Misconfigured, match="private key; give its public key"):
        public_keys(secret(key_file))
    with pytest.raises(Misconfigured, match="private key; give its public key"):
        public_keys(key_file)


def test_no_message_and_no_form_of_a_key_shows_the_secret(key_file: Path) -> None:
    digits = secret(key_file).partition(":")[2]
    mistyped = [digits, f"ed25519-private:{digits[:-1]}", f"private:{digits}", f"/keys/{digits}"]
    for text in mistyped:
        for read in (SigningKey.read, public_keys):
            with pytest.raises(Misconfigured) as error:
                read(text)
            assert digits[:16] not in f"{error.value!r}{error.value.__cause__!r}"
    assert digits not in repr(SigningKey.read(key_file)) + str(SigningKey.read(key_file))
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(A)


def test_trusted_keys_as_text_a_list_and_a_file(tmp_path: Path) -> None:
    assert public_keys(f"{A.public}, {B.public}\n{C.public}@abc") == [A.public, B.public, f"{C.public}@abc"]
    (tmp_path / "trusted").write_text(f"# the fleet's\n{A.public}  # trainer\n\n{B.public}\n")
    assert public_keys(tmp_path / "trusted") == [A.public, B.public]
    with pytest.raises(Misconfigured, match="64 hex digits"):
        public_keys("ed25519:1234")


@given(
    body=st.dictionaries(st.text(max_size=3), st.text(max_size=5), min_size=1), at=st.integers(0), bit=st.integers(0, 7)
)
def test_every_bit_of_a_sealed_object_counts(body: dict[str, str], at: int, bit: int) -> None:
    import msgspec

    data = A.seal(MANIFEST, msgspec.json.encode(body))
    assert {**body, "signature": msgspec.json.decode(data)["signature"]} == msgspec.json.decode(data)
    check_seal(MANIFEST, data, A.public, "it")
    spoilt = bytearray(data)
    spoilt[at % len(data)] ^= 1 << bit
    with pytest.raises(SignatureError):
        check_seal(MANIFEST, bytes(spoilt), A.public, "it")


def test_a_signature_is_of_one_key_and_one_kind() -> None:
    data = A.seal(MANIFEST, b'{"a":1}')
    for kind, key in ((MANIFEST, B.public), (KEEPER, A.public), (MANIFEST, "ed25519:"), (MANIFEST, "x")):
        with pytest.raises(SignatureError):
            check_seal(kind, data, key, "it")
    for cut in (b'{"a":1}', data[:-1], data + b" ", b"", data[-147:]):
        with pytest.raises(SignatureError):
            check_seal(MANIFEST, cut, A.public, "it")


def test_endorsements_form_a_chain_within_one_run_and_kind() -> None:
    ab, bc = A.endorse(NEXT_KEY, "run", B.public), B.endorse(NEXT_KEY, "run", C.public)
    assert endorsed(NEXT_KEY, "run", {A.public}, [ab, bc]) == {A.public, B.public, C.public}
    assert endorsed(NEXT_KEY, "run", {A.public}, [bc]) == {A.public}, "a link is missing"
    assert endorsed(NEXT_KEY, "other", {A.public}, [ab]) == {A.public}, "of another run"
    assert endorsed(KEEPER, "run", {A.public}, [ab]) == {A.public}, "of another kind"
    forged = Endorsement(A.public, C.public, ab.signature)
    assert endorsed(NEXT_KEY, "run", {A.public}, [forged]) == {A.public}
    assert endorsed(NEXT_KEY, "run", {A.public}, [Endorsement(A.public, C.public, "no hex")]) == {A.public}


def test_without_the_library_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"\[sign\]"):
        signing.load()


def test_a_key_of_another_owner_is_read_whatever_its_mode(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ssh does: mounted secrets often belong to root."""
    key_file.chmod(0o644)
    monkeypatch.setattr(os, "getuid", lambda: key_file.stat().st_uid + 1)
    assert SigningKey.read(key_file).public == A.public
