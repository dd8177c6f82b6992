"""What can be told about deploy/ by reading it: users, ports, secrets, and command lines that our commands accept."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dockerfiles import Dockerfile

from deltawire.cli import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(DEPLOY.rglob("Dockerfile"))
SPACES = [DEPLOY / "wordle-env", DEPLOY / "vllm-rollout"]
SECRET = re.compile(r"token|secret|password|api_?key|access_key", re.IGNORECASE)


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_image_is_small_in_rights(path: Path) -> None:
    file = Dockerfile.read(path)
    assert file.last("USER") == "user"
    names = [name for name, _ in file.instructions]
    made = next(i for i, (_, rest) in enumerate(file.instructions) if re.search(r"useradd .*--uid 1000 user$", rest))
    assert made < names.index("USER") < names.index("CMD")
    assert file.all("EXPOSE") == ["7860"]
    # one image, one version of what it starts from
    assert re.fullmatch(r"python:3\.\d+(-slim)?", file.last("FROM"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_image_holds_no_secret(path: Path) -> None:
    file = Dockerfile.read(path)
    assert not [name for name in {**file.arguments, **file.environment} if SECRET.search(name)]
    assert not any(re.search(r"hf_\w{8,}|AKIA\w+|Bearer ", rest) for _, rest in file.instructions)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_an_image_copies_is_there(path: Path) -> None:
    context = ROOT if path.parent == DEPLOY else path.parent
    for rest in Dockerfile.read(path).all("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            # the wheel is made by the command that the README begins with
            assert source == "deltawire-*.whl" or (context / source).exists(), source


@pytest.mark.parametrize("folder", SPACES, ids=name_of)
def test_a_space_says_what_it_is(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    header = yaml.safe_load(readme.split("---\n")[1])
    assert header["sdk"] == "docker"
    assert header["app_port"] == 7860
    assert {"title", "emoji", "colorFrom", "colorTo"} <= header.keys()
    assert len(header["short_description"]) <= 60
    file = Dockerfile.read(folder / "Dockerfile")
    assert file.environment["PORT"] == "7860"
    assert "/health" in file.last("HEALTHCHECK")
    assert f"pip wheel --no-deps -w deploy/{folder.name} ." in readme
    # every variable that the start script reads is described
    script = (folder / "start.sh").read_text()
    for variable in set(re.findall(r"\$\{?([A-Z_]+)", script)) - {"PORT"}:
        assert f"`{variable}`" in readme, variable


Help = Callable[..., str]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Help:
    """What a program prints for --help after these words, run in this process."""

    def help_of(main: Callable[[], object], *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [*words, "--help"])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code, words
        return capsys.readouterr().out

    return help_of


def test_the_commands_of_the_hub_are_its_own(help_of: Help) -> None:
    pages = [*DEPLOY.rglob("README.md"), ROOT / "docs" / "disaggregated.md", ROOT / "examples" / "README.md"]
    texts = [page.read_text().replace("\\\n", " ") for page in pages]
    lines = [line for text in texts for line in re.findall(r"^(hf .*)", text, re.MULTILINE)]
    assert len(lines) >= 5
    (hf,) = (entry.load() for entry in entry_points(group="console_scripts", name="hf"))
    for line in lines:
        words = shlex.split(line, comments=True)
        name = next(i for i, word in enumerate(words) if "/" in word)
        known = set(re.findall(r"--[\w-]+", help_of(hf, *words[:name])))
        assert {word for word in words if word.startswith("--") and " " not in word} <= known, line


# ── the compose file ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def test_services_hang_together(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"bucket", "environment", "rollout-1", "rollout-2", "trainer"}
    for name, service in services.items():
        assert "image" in service
        # nothing is reachable from outside the host's own network
        assert "ports" not in service
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in services[needed], f"{name} waits for {needed} for ever"
        if "build" in service:
            build = service["build"]
            assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose["volumes"]


def test_secrets_come_from_outside(compose: dict[str, Any]) -> None:
    seen = 0
    for service in compose["services"].values():
        for variable, value in service.get("environment", {}).items():
            if SECRET.search(variable):
                seen += 1
                assert value.startswith("${" + variable + ":?"), f"{variable} must be given, and missing must be said"
    assert seen


def test_addresses_are_services(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        text = f"{service['command']} {service.get('environment', {}).get('AWS_ENDPOINT_URL', '')}"
        for host in re.findall(r"http://([\w-]+):", text):
            assert host in compose["services"]


def commands(compose: dict[str, Any]) -> Iterator[list[str]]:
    yield from (shlex.split(service["command"]) for service in compose["services"].values())
    for script in DEPLOY.rglob("start.sh"):
        joined = script.read_text().replace("\\\n", " ")
        yield shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", joined.split("exec ", 1)[1]), comments=True)


def test_command_lines_are_accepted(compose: dict[str, Any], help_of: Help) -> None:
    """Parsed by the programs themselves, which stop before they do anything."""
    click_app = typer.main.get_command(app)
    parsed = []
    for words in commands(compose):
        if words[0] == "deltawire":
            command = click_app.commands[words[1]]  # type: ignore[attr-defined]
            command.make_context(words[1], words[2:], resilient_parsing=False)
            parsed.append(words[1])
        elif words[:3] == ["python", "-m", "deltawire_wordle.train"]:
            # argparse reads all options before it obeys --help
            from deltawire_wordle.train import main as train

            known = set(re.findall(r"--[\w-]+", help_of(train, *words[2:])))
            assert {word for word in words if word.startswith("--")} <= known
            parsed.append("train")
        else:
            assert words[0] == "mini", words
            program = Path(sys.executable).with_name("weed")
            done = subprocess.run([str(program), "mini", "-h"], capture_output=True, text=True)
            known = set(re.findall(r"^  -([\w.]+)", done.stdout + done.stderr, re.MULTILINE))
            assert {word[1:].partition("=")[0] for word in words[1:]} <= known
            parsed.append("bucket")
    assert sorted(parsed) == ["bucket", "env", "env", "serve", "serve", "serve", "train"]
