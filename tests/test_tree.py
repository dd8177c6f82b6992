"""Every module has a test file of its name, so that a reader of one finds the other.

src/deltawire/x/y.py is tested by tests/x/test_y.py, or by tests/x/test_x_y.py where another folder has that name: no
two test files may have the same. tests/wordle has the tests of src/deltawire_wordle. A module may have more of them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"

ELSEWHERE = {
    # they only name what other modules define
    "deltawire/errors.py": "core/test_errors.py",
    "deltawire/trl.py": "engines/test_trl.py",
    "deltawire_wordle/errors.py": "wordle/test_env_client.py",
    # it is tests, which every store runs
    "deltawire/testing/stores.py": "store/test_store_base.py",
    # each test of a kernel runs with all of them: plain torch, and Triton with its helpers
    "deltawire/kernels/torch_ops.py": "kernels/test_kernels_change.py",
    "deltawire/kernels/triton_ops.py": "kernels/test_kernels_change.py",
    "deltawire/kernels/_steps.py": "kernels/test_ranks.py",
    "deltawire/kernels/_tiles.py": "kernels/test_kernels_change.py",
    "deltawire/kernels/_rows.py": "engines/live/test_decode.py",
    "deltawire/trainer/adamw.py": "kernels/test_kernels_adamw.py",
    # kernels of one codec: each alone has no meaning that a test could name
    "deltawire/core/codecs/context/classes.py": "kernels/test_ranks.py",
    "deltawire/core/codecs/context/levels.py": "core/codecs/context/test_encoder.py",
    "deltawire/core/codecs/context/old_weights.py": "kernels/test_kernels_block.py",
    "deltawire/core/codecs/context/runs.py": "core/codecs/context/test_encoder.py",
    # parts of a server, tested from outside
    "deltawire/engines/cache_server.py": "bucket/test_neighbour.py",
    "deltawire/engines/control.py": "engines/server/test_app.py",
    "deltawire/engines/follower.py": "engines/server/test_server_follower.py",
    "deltawire/engines/http.py": "engines/server/test_server_requests.py",
    "deltawire/engines/threaded.py": "dash/test_dash_server.py",
    "deltawire/engines/server/answers.py": "engines/server/test_app.py",
    "deltawire/engines/server/server.py": "engines/server/test_app.py",
    # parts of a rank, tested with several of them
    "deltawire/replica/moves.py": "engines/live/test_decoder.py",
    "deltawire/replica/shard.py": "engines/live/test_decode.py",
    "deltawire/engines/live/layout.py": "engines/live/test_placement.py",
    "deltawire/engines/live/rank.py": "engines/live/test_follower.py",
    "deltawire/engines/live/target.py": "engines/live/test_follower.py",
    # what an engine provides, tested through vLLM's adapter
    "deltawire/engines/live/engine.py": "engines/live/test_follower.py",
    "deltawire/engines/live/guard.py": "engines/live/test_endpoint.py",
    "deltawire/engines/vllm/endpoint.py": "engines/live/test_endpoint.py",
    "deltawire/engines/vllm/engine.py": "engines/live/test_follower.py",
    "deltawire/engines/vllm/guard.py": "engines/live/test_endpoint.py",
    "deltawire/engines/vllm/relay.py": "engines/live/test_endpoint.py",
    "deltawire/engines/sglang/core.py": "engines/live/test_sglang.py",
    "deltawire/engines/sglang/endpoint.py": "engines/live/test_sglang.py",
    "deltawire/engines/sglang/engine.py": "engines/live/test_sglang.py",
    "deltawire/engines/sglang/guard.py": "engines/live/test_sglang.py",
    "deltawire/engines/sglang/hooks.py": "engines/live/test_sglang.py",
    # the part of each engine is tested with it
    "deltawire/engines/live/adapter_worker.py": "engines/vllm/test_vllm_adapters.py",
    # nothing of it runs without its engine
    "deltawire/engines/vllm/adapter_worker.py": "engines/vllm/live_adapters.py",
    "deltawire/engines/sglang/adapter_worker.py": "engines/sglang/live_sglang_adapters.py",
    "deltawire/engines/sglang/adapters.py": "engines/sglang/live_sglang_adapters.py",
    "deltawire/engines/vllm/hooks.py": "engines/vllm/live.py",
    "deltawire/engines/vllm/worker.py": "engines/vllm/live.py",
    # stages of one publish, tested through it
    "deltawire/trainer/captures.py": "trainer/test_publisher.py",
    "deltawire/trainer/device.py": "trainer/test_detectors.py",
    "deltawire/trainer/local.py": "trainer/test_publisher.py",
    "deltawire/trainer/writer.py": "trainer/test_pipeline.py",
    # a folder that is always one whole version: the command is the test
    "deltawire/bucket/checkpoint_folder.py": "cli/test_cli_follow.py",
    # a demo is tested as a whole
    "deltawire_wordle/demo.py": "wordle/test_demo_command.py",
    "deltawire_wordle/report.py": "wordle/test_demo_command.py",
    # a page about a run, tested with the server that shows it
    "deltawire/dash/document.py": "dash/test_dash_server.py",
    "deltawire/dash/html.py": "dash/test_dash_server.py",
    "deltawire/dash/trace.py": "dash/test_dash_server.py",
}
"""Modules without a test file of their name, and the one that tests them."""


def modules() -> list[Path]:
    return [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if not path.name.startswith("__")]


def has_test_file(module: Path) -> bool:
    package, *folders = module.parent.parts
    rooms = ["wordle", *folders] if package == "deltawire_wordle" else folders
    stem = module.stem.lstrip("_")
    names = [stem, *(f"{'_'.join(rooms[-count:])}_{stem}" for count in range(1, len(rooms) + 1))]
    return any((TESTS / Path(*rooms) / f"test_{name}.py").exists() for name in names)


def test_every_module_has_a_test_file_of_its_name() -> None:
    missing = {module.as_posix() for module in modules() if not has_test_file(module)}
    assert sorted(missing - set(ELSEWHERE)) == []
    assert sorted(set(ELSEWHERE) - missing) == [], "these have one, or are gone: take them off the list"


def test_the_files_of_the_list_exist() -> None:
    assert [file for file in ELSEWHERE.values() if not (TESTS / file).exists()] == []


def test_the_longest_files_exist() -> None:
    """The list in conftest.py, which decides what runs first."""
    text = (TESTS / "conftest.py").read_text().partition("LONGEST = (")[2].partition(")")[0]
    files = re.findall(r'"(.+)"', text)
    assert files
    assert [file for file in files if not (TESTS / file).exists()] == []


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest could not collect them together."""
    count = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, files in count.items() if files > 1] == []
