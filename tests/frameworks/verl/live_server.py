"""verl's own vLLM server on a CPU follows a run: `make test-trainers FRAMEWORK=verl`.

It needs vLLM beside verl: the environment of `make test-vllm VLLM=0.32.0`, and what that lacks from verl's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from tests.engines.live.live_server import make_model
from tests.environments import ROOT, VLLM_ON_A_CPU

LIMIT = 800


def both(folder: Path) -> Path:
    """The Python of an environment with the packages of vLLM's environment, then of this one."""
    script = ROOT / "tests" / "engines" / "vllm" / "environment.sh"
    command = [str(script), sys.executable, "0.32.0"]
    place = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    here = Path(sysconfig.get_path("purelib"))
    inside = here.relative_to(Path(sys.prefix))
    (folder / inside / "both.pth").write_text(f"{Path(place) / inside}\n{here}\n")
    return folder / "bin" / "python"


def test_verls_own_server_follows_and_its_samples_are_those_of_the_trained_model(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3-tied")
    here = Path(__file__).parent
    paths = [str(here), str(ROOT / "src"), str(ROOT), VLLM_ON_A_CPU["PYTHONPATH"]]
    settings = {
        **os.environ,
        **VLLM_ON_A_CPU,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_PLUGINS": f"{VLLM_ON_A_CPU['VLLM_PLUGINS']},deltawire",
        "VLLM_HOST_IP": "127.0.0.1",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "DELTAWIRE_RUN": str(tmp_path / "run"),
        "DELTAWIRE_TOKEN": "of-a-test",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray writes a token into the home
        "HOME": str(tmp_path),
    }
    command = [str(both(tmp_path / "both")), str(here / "rollout_server.py"), str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(command, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = script.wait(LIMIT)
        finally:
            # a script that ends has ended what it started
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()[-8000:]
    *report, last = json.loads((tmp_path / "report.json").read_text())
    assert (last["step"], last["status"]["version"]) == (77, 3)
    assert [each["status"]["version"] for each in report] == [1, 2, 3]
    assert [each["step"] for each in report] == [10, 20, 30], "the step of a sample is that of its version"
    for each in report:
        assert (each["status"]["state"], each["status"]["guard"]) == ("healthy", "patch")
        assert each["live"] == each["trained"]
        assert each["sampled"] == each["expected"]
