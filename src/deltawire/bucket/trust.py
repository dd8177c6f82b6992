"""What a reader of signed runs accepts: the keys it trusts, and what it has seen of each run before.

What was seen is kept in `seen.json` in `DELTAWIRE_STATE`, by default `~/.local/state/deltawire`: the run at each
address, and the newest version of each run with its digest and the key that signed it. All processes of a host may
share the folder. A reader notes a version before it uses it, so a version that was served is always noted; one that is
noted may never have been served, because its objects were damaged. A publisher notes a version after its commit: one
that was noted and never committed would look like a run that was rolled back.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from ..core.added import AddedIndex, AddedPage
from ..core.errors import (
    DeltawireError,
    Misconfigured,
    NotTheSigner,
    RolledBack,
    RunReplaced,
    SignatureError,
    StoreError,
)
from ..core.keys import DELEGATED
from ..core.manifest import Delegated, Manifest, dump
from ..core.settings import switch
from ..core.signing import (
    KEEPER,
    LINKS,
    MANIFEST,
    NEXT_KEY,
    Endorsement,
    SigningKey,
    check_public,
    check_seal,
    endorsed,
    is_public,
    load,
    public_keys,
)
from ..core.typed_json import decode
from ..store import LocalStore

if TYPE_CHECKING:
    from .run import Run

log = logging.getLogger("deltawire")

LOCK_S = 30.0
"""Seconds to wait for another process that writes what it has seen; that takes milliseconds."""

REFUSE_DELEGATED = "DELTAWIRE_REFUSE_DELEGATED"

KeysLike = str | os.PathLike[str] | Sequence[str]
"""Public keys: as text, a file with one per line, or several of both."""


class Trust:
    """Keys whose signatures are accepted, each in every run or in one.

        dw.Run.open("s3://runs/chat", trust=dw.Trust("ed25519:4c1e…"))

    given      the keys; one may be followed by `@` and the id of the only run in which it is trusted
    remember   whether newer versions than those seen so far are kept on disk, and older ones refused
    refuse_delegated  whether links that were added later are refused unless the run's own key signed them; by default
                      what DELTAWIRE_REFUSE_DELEGATED says
    """

    def __init__(self, given: KeysLike, *, remember: bool = True, refuse_delegated: bool | None = None) -> None:
        # a missing package or a folder that cannot be used is an error now, not with every version
        load()
        if remember:
            Seen.prepare()
        several = [given] if isinstance(given, (str, os.PathLike)) else given
        self.keys = [key for one in several for key in public_keys(one)]
        self.remember = remember
        self.refuse_delegated = switch(REFUSE_DELEGATED) if refuse_delegated is None else refuse_delegated
        if not self.keys:
            raise Misconfigured("no trusted key is given: name the public key that `deltawire keygen` has printed")

    @classmethod
    def of(cls, given: Trust | KeysLike | None, refuse_delegated: bool | None = None) -> Trust | None:
        """Return what was given, or else what DELTAWIRE_TRUST names; None if neither names a key.

        Raises Misconfigured if links are to be refused and no key is trusted: nothing would be refused.
        """
        if isinstance(given, Trust):
            return given
        if given := given or os.environ.get("DELTAWIRE_TRUST", ""):
            return cls(given, refuse_delegated=refuse_delegated)
        if switch(REFUSE_DELEGATED) if refuse_delegated is None else refuse_delegated:
            raise Misconfigured(
                "links that delegated keys signed are to be refused, and no key is trusted: name the run's public key "
                "(--trust, DELTAWIRE_TRUST)"
            )
        return None

    def of_run(self, url: str, run: str) -> RunTrust:
        """Raises RunReplaced if another run was seen at this address before, or the keys are for another run only."""
        keys = {key.partition("@")[0] for key in self.keys if key.partition("@")[2] in ("", run)}
        if not keys:
            raise RunReplaced(
                f"{url} holds the run {run[:32]}, and the trusted keys are for another one; check the address"
            )
        return RunTrust(keys, url, run, Seen.folder() if self.remember else None, self.refuse_delegated)


class RunTrust:
    """Checks the signatures of one run, and that it does not go back."""

    def __init__(self, trusted: Iterable[str], url: str, run: str, folder: Path | None, refuse_delegated: bool) -> None:
        self._keys, self._url, self._run, self._folder = frozenset(trusted), url, run, folder
        self.refuse_delegated = refuse_delegated
        """Whether added links are refused unless the run's own key signed them."""
        self.newest: SeenVersion | None = None
        """The newest version that was seen."""
        self._lock = threading.Lock()
        if folder is not None:
            seen = Seen.read(folder)
            if (there := seen.addresses.get(url, run)) != run:
                raise RunReplaced(
                    f"{url} is for the run {there}, by what was seen from here, and this is the run {run[:32]}. If "
                    f"the new one is meant, remove this address from {folder / Seen.NAME}"
                )
            self.newest = seen.runs.get(run)

    def check_manifest(self, manifest: Manifest, data: bytes) -> None:
        """Raise SignatureError unless the bytes of a manifest are signed by a key that is trusted for its version, and
        RolledBack if it is another one of the newest version that was seen."""
        what = f"version {manifest.version} of {self._url}"
        if not manifest.signer:
            raise SignatureError(f"{what} is not signed, and only signed versions are accepted here")
        if manifest.signer not in self._allowed(self._keys, manifest):
            raise SignatureError(
                f"{what} is signed by {manifest.signer}, which is not trusted here; trusted: "
                f"{', '.join(sorted(self._keys))}"
            )
        seen = self.newest if self.newest is not None and manifest.version > self.newest.version else None
        if seen is not None and manifest.signer not in self._allowed({seen.signer}, manifest):
            raise SignatureError(
                f"{what} is signed by {manifest.signer}; version {seen.version} was signed by {seen.signer}, which "
                "has not passed the run on to that key"
            )
        check_seal(MANIFEST, data, manifest.signer, what)
        self.note(manifest)

    def note(self, manifest: Manifest) -> None:
        """Note a signed version as seen, if none was seen that is as new. Raises RolledBack if the newest one seen has
        the same number and is another one."""
        found = SeenVersion(manifest.version, manifest.signer, manifest.digest)
        with self._lock:
            if self.newest is not None:
                self._check_same(self.newest, found)
            if self.newest is None or found.version > self.newest.version:
                if self._folder is not None:
                    # on disk first: if that fails, the version is not accepted the next time either
                    self._check_same(Seen.note(self._folder, self._url, self._run, found), found)
                self.newest = found

    def _check_same(self, seen: SeenVersion, found: SeenVersion) -> None:
        if seen.version == found.version and seen != found:
            raise RolledBack(
                f"{self._url} has another version {found.version} than was seen before: that one was signed by "
                f"{seen.signer} and has the digest {seen.digest}, this one by {found.signer} and has {found.digest}. "
                f"Older versions were restored, and the run was continued from there. {self._remedy()}"
            )

    def _remedy(self) -> str:
        if self._folder is None:
            return "Restore the newer versions"
        return (
            f"Restore the versions that were there; or, if the run is meant to go on from what it has now, remove "
            f"{self._run[:32]} from `runs` in {self._folder / Seen.NAME}, on every host that has seen more"
        )

    def _allowed(self, trusted: Iterable[str], manifest: Manifest) -> set[str]:
        if manifest.signer in (known := set(trusted)):
            return known
        return endorsed(NEXT_KEY, self._run, known, manifest.rotations)

    def check_newest(self, found: int | None) -> None:
        """Raise RolledBack if the newest version of the run is older than one that was seen."""
        if self.newest is not None and (found is None or found < self.newest.version):
            raise RolledBack(
                f"{self._url} ends with {'no version' if found is None else f'version {found}'}, and version "
                f"{self.newest.version} was seen before: newer ones were removed, or this is an old copy. "
                f"{self._remedy()}"
            )

    def check_links(self, record: AddedIndex | AddedPage, data: bytes, what: str) -> None:
        """Raise SignatureError unless added links are signed by a key that the run's present key has delegated to; with
        `refuse_delegated`, by that key itself."""
        if not is_public(record.signer) or record.delegation is None:
            raise SignatureError(f"{what} is not signed by a keeper, and only signed links are accepted here")
        present = set(self._keys) if self.newest is None else {self.newest.signer}
        if record.signer not in endorsed(KEEPER, self._run, present, [record.delegation]):
            raise SignatureError(
                f"{what} is signed by {record.signer}, which the run's key has not made a keeper: see deltawire "
                "delegate"
            )
        check_seal(LINKS, data, record.signer, what)
        if self.refuse_delegated and record.signer not in present:
            raise SignatureError(
                f"{what} is signed by {record.signer}, to which the run's key has delegated, and links of delegated "
                "keys are refused here"
            )


class LinkSigner:
    """Signs the links that a keeper adds to a signed run."""

    def __init__(self, run: Run, key: SigningKey) -> None:
        """Raises Misconfigured where the run is read without a trusted key, since what it signs must have been checked;
        and where links of keys such as this one are refused."""
        if run.trust is None:
            raise Misconfigured(
                f"a keeper that signs links to {run.store.url} must check what it reads: name the run's public key "
                "(--trust, DELTAWIRE_TRUST)"
            )
        if run.trust.refuse_delegated:
            raise Misconfigured(
                f"links of delegated keys are refused here, and this keeper would add such links to {run.store.url}: "
                f"unset {REFUSE_DELEGATED} for it, or let it add none (deltawire keep without --sign)"
            )
        self._run, self._key, self._trust = run, key, run.trust
        self._delegation: Endorsement | None = None

    def delegation(self) -> Endorsement:
        """Return the statement of the run's present key that this one is a keeper's. Raises NotTheSigner."""
        present = self._trust.newest.signer if self._trust.newest else ""
        if self._delegation is None or self._delegation.by != present:
            self._delegation = delegation(self._run, self._key.public)
        if self._delegation is None:
            raise NotTheSigner(
                f"the key of {self._run.store.url} has not made {self._key.public} a keeper: deltawire delegate "
                f"RUN {self._key.public} --sign KEY, with the key that signs its versions"
            )
        return self._delegation

    def seal(self, record: msgspec.Struct) -> bytes:
        """Return the bytes of a record with its signature. Raises NotTheSigner if the run's key has not delegated."""
        signed = msgspec.structs.replace(record, signer=self._key.public, delegation=self.delegation())
        return self._key.seal(LINKS, dump(signed))


def link_signer(run: Run, key: SigningKey | None) -> LinkSigner | None:
    """Return what signs the links of a keeper with this key. Without one, warn if the run is signed."""
    if key is not None:
        return LinkSigner(run, key)
    with suppress(DeltawireError):
        newest = run.newest()
        if newest is not None and run.manifest(newest).signer:
            log.warning(
                "%s is signed, and this keeper has no key: readers with trusted keys will not use the links it adds "
                "(deltawire keep --sign, deltawire delegate)",
                run.store.url,
            )
    return None


def delegate(run: Run, key: SigningKey, keeper: str) -> None:
    """Let a keeper's key sign links that are added to the run, and so trust it with the weights.

        dw.delegate(run, dw.SigningKey.find("runs.key"), "ed25519:77aa…")

    Raises NotTheSigner if `key` is not the run's.
    """
    check_public(keeper, "the keeper's key")
    newest = run.newest()
    if newest is None or run.manifest(newest).signer != key.public:
        raise NotTheSigner(
            f"{run.store.url} is not signed by {key.public}: delegate with the key that signs its versions"
        )
    kept = tuple(one for one in _delegated(run) if one.by == key.public and one.key != keeper)
    statement = key.endorse(KEEPER, run.info.run, keeper)
    run.store.put(DELEGATED, dump(Delegated(run.info.run, (*kept, statement))))


def delegation(run: Run, keeper: str) -> Endorsement | None:
    """Return the statement of the run's present key that this key is a keeper's; None if there is none."""
    newest = run.newest()
    signer = "" if newest is None else run.manifest(newest).signer
    found = (one for one in _delegated(run) if (one.by, one.key) == (signer, keeper))
    return next((one for one in found if keeper in endorsed(KEEPER, run.info.run, {signer}, [one])), None)


def _delegated(run: Run) -> tuple[Endorsement, ...]:
    found = run.hint(DELEGATED, Delegated)
    return found.keepers if found else ()


class SeenVersion(msgspec.Struct, frozen=True, array_like=True):
    """A version of a run as it was seen: another one with this number is a second history."""

    version: int
    signer: str
    digest: str
    """State digest that its manifest names."""


class Seen(msgspec.Struct, frozen=True):
    """seen.json: what this host has seen of signed runs."""

    addresses: dict[str, str] = {}
    """Id of the run at each address."""
    runs: dict[str, SeenVersion] = {}
    """The newest version of each run."""

    NAME = "seen.json"

    @staticmethod
    def folder() -> Path:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(os.environ.get("DELTAWIRE_STATE") or f"{state}/deltawire").expanduser()

    @classmethod
    def prepare(cls) -> None:
        """Make the folder. Raises Misconfigured where nothing can be kept in it, or what is there is damaged."""
        folder = cls.folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / f"{cls.NAME}.lock").touch()
        except OSError as error:
            raise _unusable(folder, error) from None
        cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Seen:
        path = folder / cls.NAME
        try:
            return decode(path.read_bytes(), cls, str(path), Misconfigured)
        except Misconfigured as error:
            raise Misconfigured(
                f"{error}. It says what this host has seen of signed runs: restore it, or remove it, and the host "
                "accepts the version of each run that it sees first"
            ) from None
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise _unusable(folder, error) from None

    @classmethod
    def note(cls, folder: Path, url: str, run: str, found: SeenVersion) -> SeenVersion:
        """Keep a version of a run as the newest, unless another process has kept one that is as new. Returns what is
        kept.

        The file is replaced whole, under a lock that ends with the process: an interrupt leaves the old one or the new.
        """
        try:
            with (folder / f"{cls.NAME}.lock").open("wb") as lock:
                _lock(lock, folder)
                seen = cls.read(folder)
                there = seen.runs.get(run, found)
                newest = found if found.version > there.version else there
                after = cls({**seen.addresses, url: run}, {**seen.runs, run: newest})
                if after != seen:
                    # durable: else a power cut may leave an empty file, or forget the version
                    LocalStore(folder).put(cls.NAME, msgspec.json.encode(after))
                return newest
        except (OSError, StoreError) as error:
            raise _unusable(folder, error) from None


def _lock(file: IO[bytes], folder: Path) -> None:
    """Wait for the lock, but not for a process that is stopped while it holds it."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise Misconfigured(
                    f"another process has held {folder / Seen.NAME}.lock for {LOCK_S:.0f} s, perhaps one that is "
                    "stopped: continue or end it, or set DELTAWIRE_STATE to another folder"
                ) from None
            time.sleep(0.01)


def _unusable(folder: Path, error: OSError | StoreError) -> Misconfigured:
    return Misconfigured(
        f"{folder} cannot be used ({getattr(error, 'strerror', error)}), where the newest version seen of signed runs "
        "is kept: set DELTAWIRE_STATE to a folder that is kept"
    )
