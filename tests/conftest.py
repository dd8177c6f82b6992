"""Fixtures every room's tests share."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import certifi
import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from deltawire.store import ObjectStore, Store
from deltawire_wordle.seaweed import SeaweedFS
from tests import forks, jobs, precompile
from tests.hub_stand_in import HubStandIn

_COMPILING = pytest.StashKey[list[subprocess.Popen[bytes]]]()

# `make test-all` takes the second; no deadline: the first call of a kernel may compile it
for profile, examples in (("everyday", 20), ("thorough", 200)):
    settings.register_profile(
        profile, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("everyday")

# Files of tests lie in memory where there is room for them: a run in a folder waits for the disk at every object.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Typer builds all commands anew for each call of one, which takes longer than most of them
typer.testing._get_command = functools.cache(typer.testing._get_command)


def _interpret_triton() -> None:
    """Without a GPU, let Triton interpret kernels. It decides that when a kernel is defined, its own ones included, so
    this comes before anything else imports it. Of this process alone: programs under test must not inherit it."""
    import torch

    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.knobs

    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=1, help="processes that run tests")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
        _interpret_triton()


def _keep_freed_memory() -> None:
    """Let malloc reuse large blocks: by default it gives them back, and the kernel clears the pages of each new one."""
    with suppress(AttributeError):  # a C library without this
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((_M_TRIM_THRESHOLD, 256 << 20), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, size)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts what it runs in the background deaf to Ctrl-C, and the programs under test would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Kernels are compiled while the tests are collected."""
    if session.config.option.jobs > 1 and not session.config.option.collectonly:
        session.stash[_COMPILING] = precompile.precompile()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.option.jobs
    if number < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    for process in session.stash[_COMPILING]:
        process.wait()
    precompile.load()
    _keep_freed_memory()
    with forks.started():
        jobs.Run(session, number)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int, int]:
    status = yield
    if config.option.jobs > 1:
        jobs.leave(status)
    return status


# nothing that is imported or collected is ever garbage; to look through all of it takes half a second each time
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    # Python takes what is frozen for gone, so it would look through all other objects far too often
    gc.set_threshold(50_000)
    gc.enable()
    # some libraries complain of objects that are left at the end
    if session.config.option.jobs < 2:
        atexit.register(gc.unfreeze)
    # pytest listens at each logger that passes nothing on, six times in each test: 48 of libraries
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


LONGEST = (
    "store/test_store_hub.py",
    "trainer/test_shards.py",
    "test_soak.py",
    "abuse/test_abuse_context.py",
    "engines/live/test_learn.py",
    "core/codecs/test_codecs_base.py",
    "keeper/test_keeper.py",
    "cli/test_cli_follow.py",
    "docs/test_documents.py",
    "abuse/test_abuse_limits.py",
    "abuse/test_abuse_files.py",
    "trainer/test_publisher_killed.py",
    "trainer/test_writers.py",
    "kernels/test_kernels_adamw.py",
    "kernels/test_kernels_classes.py",
    "trainer/test_detectors.py",
    "engines/server/test_app.py",
    "engines/server/test_server_follower.py",
    "engines/live/test_follower.py",
    "engines/live/test_decoder.py",
    "store/test_run_in_hub.py",
    "wordle/test_games.py",
    "fuzz/test_fuzz.py",
    "cli/test_cli_hostile.py",
    "test_imports.py",
    "bucket/test_bucket_added.py",
    "engines/server/test_server_requests.py",
)
"""Files that take longest: run first, so that no worker waits for one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def store() -> Store:
    """A fresh bucket in this process's memory."""
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


@pytest.fixture(scope="session", autouse=True)
def _nothing_seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What publishers and readers of signed runs have seen is not kept in this user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAWIRE_STATE", str(tmp_path_factory.mktemp("seen")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients read all certificates of the system whenever they connect, which takes longer than most requests; tests
    use none of them."""
    folder = tmp_path_factory.mktemp("certificates")
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    (folder / "one.pem").write_text(first + end + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(folder / "one.pem"))
        patch.setenv("SSL_CERT_DIR", str(folder))
        yield


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that the product starts are forked in a parallel run (forks.py)."""
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A real S3 server; each worker of a parallel run has its own."""
    with SeaweedFS(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3(seaweed: SeaweedFS) -> Store:
    """A fresh place in a real bucket."""
    return seaweed.store(f"deltawire/{uuid.uuid4()}/run")


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStandIn]:
    """One for all tests of a process: the client remembers what it has uploaded to which server."""
    with pytest.MonkeyPatch.context() as patch, HubStandIn(tmp_path_factory.mktemp("hub"), page=20) as server:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf-home")))
        # what fails for good need not fail so often
        patch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "2")
        yield server


@pytest.fixture
def hub(hub_server: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> HubStandIn:
    """The Hub stand-in, and an environment that leads hf:// addresses there. No faults are left from other tests."""
    monkeypatch.setenv("HF_ENDPOINT", hub_server.endpoint)
    monkeypatch.setenv("HF_TOKEN", hub_server.token)
    hub_server.faults.clear()
    hub_server.requests.clear()
    return hub_server
