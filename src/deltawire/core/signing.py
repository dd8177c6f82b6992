"""Ed25519 keys and signatures. The curve is that of the `cryptography` package, imported on first use.

A public key is the text `ed25519:` and 64 hex digits, a private key `ed25519-private:` and 64 hex digits. A signed JSON
object ends with the member `"signature"`, 128 hex digits. The signature covers the object's bytes as they are without
that member, after a line that names the kind of object: a signature of one kind is none of another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import Misconfigured, MissingExtra, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MANIFEST, NEXT_KEY, KEEPER, LINKS = "manifest", "next key", "keeper", "links"
"""Kinds of statements that are signed."""

MAX_KEY_FILE = 64 << 10
"""Bytes of a file with keys."""

_PUBLIC = re.compile(r"ed25519:[0-9a-f]{64}")
_PRIVATE = re.compile(r"ed25519-private:[0-9a-f]{64}")
_SEAL = re.compile(rb',"signature":"([0-9a-f]{128})"\}')
_SEAL_SIZE = len(b',"signature":""}') + 128


class SigningKey:
    """A private key. Nothing that prints it shows more than its public key.

    key = dw.SigningKey.find("runs.key")        # or SigningKey.generate().write("runs.key")
    dw.Publisher("s3://runs/chat", sign=key)
    """

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = f"ed25519:{key.public_key().public_bytes_raw().hex()}"
        """Its public key, as text."""

    @staticmethod
    def check_public(text: str, what: str) -> str:
        """Return a public key. Raises Misconfigured for anything else, which `what` names; quotes no secret."""
        return check_public(text, what)

    @classmethod
    def generate(cls) -> SigningKey:
        """Make a new key, in memory only: `write` it. Raises MissingExtra without the `sign` extra."""
        return cls(load().Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, given: str | os.PathLike[str]) -> SigningKey:
        """Read a private key from a file, or from the text that is in such a file.

        Raises Misconfigured where it is none, or where other users may read the file, as ssh does.
        """
        text = os.fspath(given).strip()
        if not _PRIVATE.fullmatch(text):
            text = _lines(Path(given).expanduser(), private=True)
        if not _PRIVATE.fullmatch(text):
            wrong = "a public key: signing needs the private one" if _PUBLIC.fullmatch(text) else "no private key"
            raise Misconfigured(f"{_shown(given)} holds {wrong}, as `deltawire keygen PATH` writes it")
        return cls(load().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text.partition(":")[2])))

    @classmethod
    def find(cls, given: SigningKey | str | os.PathLike[str] | None) -> SigningKey | None:
        """Return the private key that is given, or else that of DELTAWIRE_SIGN; None if neither names one."""
        if isinstance(given, SigningKey):
            return given
        given = given or os.environ.get("DELTAWIRE_SIGN", "")
        return cls.read(given) if given else None

    def write(self, path: Path) -> None:
        """Write a new file that only this user may read. FileExistsError if there is one."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"# private key of {self.public}: whoever has it can sign versions\n")
            file.write(f"ed25519-private:{self._key.private_bytes_raw().hex()}\n")

    def sign(self, kind: str, message: bytes) -> str:
        """Return the signature of a message, as hex digits. It holds for this `kind` of message only."""
        return self._key.sign(_statement(kind, message)).hex()

    def seal(self, kind: str, body: bytes) -> bytes:
        """Return a JSON object with its signature as the last member."""
        return body[:-1] + f',"signature":"{self.sign(kind, body)}"}}'.encode()

    def endorse(self, kind: str, run: str, key: str) -> Endorsement:
        """Return the statement that another public key may act in a run, as its next key or as a keeper's."""
        return Endorsement(self.public, key, self.sign(kind, f"{run}\n{key}".encode()))

    def __repr__(self) -> str:
        return f"<SigningKey of {self.public}>"

    def __reduce__(self) -> Any:
        raise TypeError("a private key is not pickled")


class Endorsement(msgspec.Struct, frozen=True, array_like=True):
    """Statement of one key about another in one run: that it is the run's next key, or a keeper's."""

    by: str
    key: str
    signature: str


def is_public(text: str) -> bool:
    return _PUBLIC.fullmatch(text) is not None


def check_public(text: str, what: str) -> str:
    """Return a public key. Raises Misconfigured for anything else, and quotes no secret."""
    if is_public(text):
        return text
    if _PRIVATE.fullmatch(text):
        raise Misconfigured(f"{what} is a private key; give its public key, and keep this one with the trainer")
    raise Misconfigured(
        f"{what} is {_shown(text)!r}; a public key is `ed25519:` and 64 hex digits, see deltawire keygen"
    )


def public_keys(given: str | os.PathLike[str]) -> list[str]:
    """Public keys from text (separated by commas or spaces), or from a file with one per line and # comments.

    A key may be followed by `@` and the id of the only run in which it is trusted.
    """
    text = os.fspath(given)
    if not text.lstrip().startswith("ed25519"):
        text = _lines(Path(given).expanduser())
    found = [part for part in re.split(r"[\s,]+", text) if part]
    for part in found:
        check_public(part.partition("@")[0], "a trusted key")
    return found


def endorsed(kind: str, run: str, keys: Iterable[str], endorsements: Iterable[Endorsement]) -> set[str]:
    """Return `keys` and all keys that they endorse, directly or through each other, in the order of the statements."""
    found = set(keys)
    for one in endorsements:
        said = f"{run}\n{one.key}".encode()
        if one.by in found and is_public(one.key) and _is_signed(kind, said, one.by, one.signature):
            found.add(one.key)
    return found


def check_seal(kind: str, data: bytes, signer: str, what: str) -> None:
    """Raise SignatureError unless a JSON object ends with this key's signature of it."""
    seal = _SEAL.fullmatch(data[-_SEAL_SIZE:])
    if seal is None:
        raise SignatureError(f"{what} names the key {signer} and has no signature")
    if not _is_signed(kind, data[:-_SEAL_SIZE] + b"}", signer, seal[1].decode()):
        raise SignatureError(f"{what} does not have a valid signature of {signer}: it was changed after it was signed")


def _is_signed(kind: str, message: bytes, signer: str, signature: str) -> bool:
    curve = load()
    from cryptography.exceptions import InvalidSignature

    try:
        public = curve.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.partition(":")[2]))
        public.verify(bytes.fromhex(signature), _statement(kind, message))
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement(kind: str, message: bytes) -> bytes:
    return f"deltawire {kind}\n".encode() + message


def load() -> Any:
    """Import the curve. Raises MissingExtra where `cryptography` is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("signatures need the cryptography package", "sign") from None
    return ed25519


def _lines(path: Path, *, private: bool = False) -> str:
    """Return a key file without comments."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            data = file.read(MAX_KEY_FILE)
    except OSError as error:
        raise Misconfigured(f"the key file {_shown(path)} cannot be read: {error.strerror}") from None
    if private and b"private:" in data and state.st_uid == os.getuid() and state.st_mode & 0o077:
        raise Misconfigured(f"others may read the private key {_shown(path)}: chmod 600 it")
    lines = (line.partition("#")[0].strip() for line in data.decode(errors="replace").splitlines())
    return "\n".join(line for line in lines if line)


def _shown(given: str | os.PathLike[str]) -> str:
    """The given text, for a message; not if it may be a mistyped key."""
    return re.sub(r"[0-9A-Fa-f]{16,}", "…", os.fspath(given))[:200]
