"""The store protocol as tests. A store that passes them can hold a run.

class TestMyStore(StoreTests):
    @pytest.fixture
    def store(self):
        return MyStore(...)      # a new, empty one for each test
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltawire.core.errors import AlreadyExists, ObjectNotFound, ObjectTooLarge, TruncatedFile, UnsafeName
from deltawire.store.base import Chunks, Fetched, Store

ODD_KEYS = [
    "plain",
    "deep/er/and/deeper/still.json",
    "with space/and  two",
    "per%cent/%20/100%25",
    "hash#question?amp&equals=plus+",
    "quotes'\"`/{braces}[brackets]<angles>",
    "punctuation!$(),;:@^|~*",
    ".hidden/.file",
    "..almost/...dots",
    "trailing.",
    "tmp-not-a-temp",
    "ünï/cödé/日本語/😀",
    "long/" + "x" * 200,
]
UNSAFE_KEYS = [
    "", "/", "/absolute", "folder/", "a//b", ".", "..", "../up", "a/../b", "a/..", "./a", "a/./b", "back\\slash",
    "nul\x00", "line\nfeed", "del\x7f", "lone\ud800surrogate", "x" * 256, "long/" * 200 + "x", ".tmp-1", "a/.tmp-1/b",
]  # fmt: skip

# In key order, which is not the order of folders: ' ', '-' and '.' sort before '/', '0' after it.
ORDERED_KEYS = [
    "A", "a b", "a-b", "a.b/c", "a/a", "a/b c", "a/b/x", "a/b0", "a0", "aa/b", "b/000001.json", "b/000002.json",
    "b/000010.json", "z", "~", "é", "日本", "😀",
]  # fmt: skip


class StoreTests:
    """Tests of the store protocol. Subclass it and define a `store` fixture that returns an empty store."""

    page_size = 1000
    """Listings are tested with a few more objects than this; S3 returns 1000 at a time."""

    big_size = 20 << 20
    """Bytes of a streamed object: more than one part of a multipart upload."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("define a `store` fixture that returns an empty store")

    # ── what was put is what is got ──────────────────────────────────────────────────────────────────────────────────

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert "://" in store.url
        assert "@" not in store.url, "credentials do not belong in a URL"

    @pytest.mark.parametrize("data", [b"", b"\x00", b"hello", bytes(range(256)) * 1000])
    def test_get_returns_what_was_put(self, store: Store, data: bytes) -> None:
        store.put("key", data)
        fetched = store.get("key")
        assert fetched.data == data
        assert type(fetched.data) is bytes
        assert store.head("key").size == len(data)

    def test_a_limit_on_what_is_read(self, store: Store) -> None:
        store.put("key", bytes(1000))
        assert store.get("key", limit=1000).data == bytes(1000)
        changed = store.get_if_changed("key", None, limit=1000)
        assert changed is not None
        if changed.etag is not None:
            assert store.get_if_changed("key", changed.etag, limit=1) is None
        with pytest.raises(ObjectTooLarge, match="1,000 bytes"):
            store.get("key", limit=999)
        with pytest.raises(ObjectTooLarge, match="1,000 bytes"):
            store.get_if_changed("key", "other", limit=999)

    def test_put_replaces(self, store: Store) -> None:
        for data in (b"first", b"the second is longer", b"3rd", b""):
            store.put("key", data)
            assert store.get("key").data == data
            assert store.head("key").size == len(data)

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys(self, store: Store, key: str) -> None:
        store.put(key, key.encode())
        assert store.get(key).data == key.encode()
        assert store.get_range(key, 1, 2) == key.encode()[1:3]
        assert store.head(key).key == key
        assert _keys(store) == [key]
        assert _keys(store, key) == [key]
        with pytest.raises(AlreadyExists):
            store.put_if_absent(key, b"")
        store.delete(key)
        assert _keys(store) == []

    @pytest.mark.parametrize("key", UNSAFE_KEYS)
    def test_unsafe_keys(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get(key),
            lambda: store.get_if_changed(key, "etag"),
            lambda: store.get_range(key, 0, 1),
            lambda: store.head(key),
            lambda: store.put(key, b"x"),
            lambda: store.put(key, lambda: [b"x"]),
            lambda: store.put_if_absent(key, b"x"),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(UnsafeName):
                call()
        assert _keys(store) == []

    def test_missing_objects(self, store: Store) -> None:
        store.put("folder/key", b"x")
        for key in ("absent", "no/such/folder", "folder", "folder/key/below", "folder/ke"):
            for call in (
                lambda key=key: store.get(key),
                lambda key=key: store.get_if_changed(key, None),
                lambda key=key: store.get_if_changed(key, store.head("folder/key").etag),
                lambda key=key: store.get_range(key, 0, 1),
                lambda key=key: store.get_range(key, 0, 0),
                lambda key=key: store.head(key),
            ):
                with pytest.raises(ObjectNotFound):
                    call()

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        "chunks", [[], [b""], [b"one"], [b"one", b"", memoryview(b"two"), memoryview(b"-three-")[1:-1]]], ids=len
    )
    def test_put_streams_chunks(self, store: Store, chunks: list[bytes | memoryview]) -> None:
        store.put("key", lambda: chunks)
        assert store.get("key").data == b"".join(chunks)
        store.put("key", lambda: iter(chunks))
        assert store.get("key").data == b"".join(chunks)

    def test_large_stream(self, store: Store) -> None:
        store.put("big", _noise(self.big_size))
        expected = hashlib.sha256(b"".join(_noise(self.big_size)())).digest()
        assert store.head("big").size == self.big_size
        assert hashlib.sha256(store.get("big").data).digest() == expected
        middle = self.big_size // 2 + 1
        assert store.get_range("big", middle, 1000) == b"".join(_noise(self.big_size)())[middle : middle + 1000]

    def test_a_producer_may_reuse_its_buffer(self, store: Store) -> None:
        size = self.big_size // 5
        buffer = bytearray(size)

        def refill() -> Iterator[memoryview]:
            for number in range(5):
                buffer[:] = bytes([number]) * size
                yield memoryview(buffer)

        store.put("key", refill)
        assert store.get("key").data == b"".join(bytes([number]) * size for number in range(5))

    @pytest.mark.parametrize(
        "error, size",
        [
            (RuntimeError, 0),
            *((error, 100) for error in (RuntimeError, FileNotFoundError, PermissionError, ValueError, KeyError)),
            (RuntimeError, 20 << 20),
        ],
    )
    def test_a_failing_producer_changes_nothing(self, store: Store, error: type[Exception], size: int) -> None:
        def broken() -> Iterator[bytes | memoryview]:
            if size:
                yield from _noise(size)()
            raise error("from the producer")

        store.put("old", b"old")
        for key in ("old", "new"):
            with pytest.raises(error, match="from the producer"):
                store.put(key, broken)
        assert store.get("old").data == b"old"
        assert _keys(store) == ["old"]

    # ── ranges ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_ranges_are_exact(self, store: Store) -> None:
        data = bytes(range(200))
        store.put("key", data)
        for start, length in ((0, 200), (0, 1), (199, 1), (7, 64), (0, 0), (100, 0), (200, 0)):
            assert store.get_range("key", start, length) == data[start : start + length]

    def test_ranges_past_the_end(self, store: Store) -> None:
        store.put("key", bytes(200))
        store.put("empty", b"")
        for key, start, length in (
            ("key", 0, 201), ("key", 199, 2), ("key", 200, 1), ("key", 5000, 1), ("key", 201, 0), ("empty", 0, 1),
            ("key", 0, 1 << 62), ("key", 1 << 62, 1), ("key", 1 << 64, 1 << 64),
        ):  # fmt: skip
            with pytest.raises(TruncatedFile):
                store.get_range(key, start, length)

    def test_ranges_must_not_be_negative(self, store: Store) -> None:
        store.put("key", b"0123")
        for start, length in ((-1, 1), (0, -1), (-2, 2)):
            with pytest.raises(ValueError):
                store.get_range("key", start, length)

    # ── etags ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_etags_agree(self, store: Store) -> None:
        store.put("key", b"content")
        etag = store.get("key").etag
        changed = store.get_if_changed("key", None)
        assert changed == Fetched(b"content", etag)
        assert store.head("key").etag == etag
        assert [info.etag for info in store.list()] == [etag]

    def test_get_if_changed(self, store: Store) -> None:
        store.put("key", b"1")
        etag = store.get("key").etag
        if etag is None:
            pytest.skip("this store has no etags")
        for _ in range(3):
            assert store.get_if_changed("key", etag) is None
        store.put("key", b"2")
        changed = store.get_if_changed("key", etag)
        assert changed is not None
        assert changed.data == b"2"
        assert changed.etag != etag
        assert store.get_if_changed("key", changed.etag) is None
        assert store.get_if_changed("key", "no-such-etag") == changed

    def test_quick_overwrites_change_the_etag(self, store: Store) -> None:
        """Also when name, size and second of writing stay the same: a head pointer that counts up looks like that."""
        content: dict[str, bytes] = {}
        for number in range(30):
            data = b"%04d" % number
            store.put("key", data)
            etag = store.get("key").etag
            if etag is None:
                pytest.skip("this store has no etags")
            assert content.setdefault(etag, data) == data

    def test_modified_is_a_time(self, store: Store) -> None:
        store.put("key", b"x")
        assert store.head("key").modified > 1_700_000_000
        assert [info.modified for info in store.list()] == [store.head("key").modified]

    # ── creating ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("data", [b"", b"mine"])
    def test_put_if_absent(self, store: Store, data: bytes) -> None:
        store.put_if_absent("folder/key", data)
        for other in (data, b"other"):
            with pytest.raises(AlreadyExists):
                store.put_if_absent("folder/key", other)
        assert store.get("folder/key").data == data
        store.delete("folder/key")
        store.put_if_absent("folder/key", b"again")
        assert store.get("folder/key").data == b"again"

    def test_put_if_absent_respects_a_put(self, store: Store) -> None:
        store.put("key", b"old")
        with pytest.raises(AlreadyExists):
            store.put_if_absent("key", b"new")
        assert store.get("key").data == b"old"

    def test_one_of_sixteen_threads_wins(self, store: Store) -> None:
        rounds, threads = 5, 16
        barrier = threading.Barrier(threads)

        def create(number: int) -> list[bool]:
            won = []
            for turn in range(rounds):
                barrier.wait()
                try:
                    store.put_if_absent(f"versions/{turn}", b"%d" % number * 1000)
                    won.append(True)
                except AlreadyExists:
                    won.append(False)
            return won

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(create, range(threads)))
        for turn in range(rounds):
            winners = [number for number in range(threads) if results[number][turn]]
            assert len(winners) == 1, f"round {turn} was won by {winners}"
            assert store.get(f"versions/{turn}").data == b"%d" % winners[0] * 1000

    # ── no torn reads ────────────────────────────────────────────────────────────────────────────────────────────────

    def test_readers_never_see_a_mix(self, store: Store) -> None:
        contents = [b"a" * 300_000, b"b" * 200_001, b"c" * 300_000]
        sizes = {len(content) for content in contents}
        store.put("key", contents[0])
        done = threading.Event()

        def write() -> int:
            for number in range(12):
                content = contents[number % 3]
                store.put("key", content if number % 2 else _in_parts(content, 70_000))
            return 12

        def read() -> int:
            etags: dict[str | None, bytes] = {}
            reads = 0
            while not done.is_set() or reads == 0:
                fetched = store.get("key")
                assert fetched.data in contents
                if fetched.etag is not None:
                    assert etags.setdefault(fetched.etag, fetched.data) == fetched.data
                assert len(set(store.get_range("key", 100, 200_000 - 100))) == 1
                assert store.head("key").size in sizes
                assert [info.size in sizes for info in store.list()] == [True]
                reads += 1
            return reads

        with ThreadPoolExecutor(5) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            writers = [pool.submit(write) for _ in range(2)]
            try:
                assert [writer.result() for writer in writers] == [12, 12]
            finally:
                done.set()
            assert all(reader.result() for reader in readers)
        assert store.get("key").data in contents

    def test_threads_do_not_disturb_each_other(self, store: Store) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                key, data = f"t/{number}/{turn}", b"%d-%d" % (number, turn)
                store.put(key, data)
                assert store.get(key).data == data
            store.delete(f"t/{number}/0")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert _keys(store) == [f"t/{number}/{turn}" for number in range(8) for turn in range(1, 5)]

    # ── listing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_list_of_nothing(self, store: Store) -> None:
        assert _keys(store) == _keys(store, "versions/") == _keys(store, "a/b/c", after="a") == []

    def test_list_describes_the_objects(self, store: Store) -> None:
        for size, key in enumerate(("a", "b/c", "d")):
            store.put(key, bytes(size))
        assert list(store.list()) == [store.head(key) for key in ("a", "b/c", "d")]

    def test_list_is_in_key_order_and_starts_after(self, store: Store) -> None:
        assert sorted(ORDERED_KEYS) == ORDERED_KEYS
        for key in reversed(ORDERED_KEYS):
            store.put(key, b"x")
        assert _keys(store) == ORDERED_KEYS
        between = ["", "a", "a/", "a/b", "a/b/", "a ", "a!", "b/000005.json", "b/000002", "c", "\U0010ffff"]
        for after in ORDERED_KEYS + between:
            assert _keys(store, after=after) == [key for key in ORDERED_KEYS if key > after], after

    def test_list_prefix_is_text(self, store: Store) -> None:
        for key in ORDERED_KEYS:
            store.put(key, b"x")
        afters = [None, "", "a", "a/b", "a/b c", "a/b/x", "b/000001.json", "zz"]
        prefixes = ["a", "a/", "a/b", "a/b/", "a/b/x", "a/b/x/", "a ", "a.", ".", "b/00000", "b/000001.json", "c"]
        for prefix, after in itertools.product(prefixes, afters):
            expected = [key for key in ORDERED_KEYS if key.startswith(prefix) and key > (after or "")]
            assert _keys(store, prefix, after) == expected, (prefix, after)

    def test_list_refuses_to_climb(self, store: Store) -> None:
        for prefix in ("../", "/", "/etc/", "a/../../b", "a//b", "a\\b/"):
            with pytest.raises(UnsafeName):
                list(store.list(prefix))

    def test_list_goes_on_over_pages(self, store: Store) -> None:
        keys = [f"versions/{number:06}.json" for number in range(self.page_size + 20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        assert _keys(store, "versions/") == keys
        assert _keys(store, "versions/", after=keys[-3]) == keys[-2:]
        assert _keys(store, after=keys[10]) == keys[11:]

    # ── deleting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_delete(self, store: Store) -> None:
        for key in ("a/b", "a/c"):
            store.put(key, b"x")
        for _ in range(3):
            store.delete("a/b")
            with pytest.raises(ObjectNotFound):
                store.get("a/b")
            assert _keys(store) == ["a/c"]

    def test_delete_of_nothing(self, store: Store) -> None:
        store.put("a/b", b"x")
        for key in ("never", "never/was", "a", "a/b/c"):
            store.delete(key)
        assert _keys(store) == ["a/b"]


def _keys(store: Store, prefix: str = "", after: str | None = None) -> list[str]:
    return [info.key for info in store.list(prefix, after)]


def _in_parts(content: bytes, size: int) -> Chunks:
    return lambda: [content[at : at + size] for at in range(0, len(content), size)]


def _noise(size: int) -> Chunks:
    """Chunks of uneven length, the same each time, none of which looks like another."""

    def chunks() -> Iterator[bytes]:
        left = size
        for number in itertools.count():
            length = min(left, 700_001 + 1000 * number)
            if not length:
                return
            yield (hashlib.sha256(b"%d" % number).digest() * (length // 32 + 1))[:length]
            left -= length

    return chunks
