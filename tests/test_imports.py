"""Who may import whom, and what must not be there: read from the source, and tried without torch."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import deltawire

SOURCE = Path(deltawire.__file__).parent
BASE = {"bucket", "core", "huggingface", "models", "store"}
ROOMS: dict[str, set[str]] = {
    # room → the rooms it may import; a new room needs a line here
    "core": set(),
    "store": {"core"},
    "bucket": {"core", "store"},
    "huggingface": {"core"},
    "models": {"core", "huggingface"},
    "api": {"core", "models"},
    "metrics": {"core"},
    "kernels": {"core", "models"},
    "testing": {"core", "store"},
    "views": {"core", "models"},
    "costs": set(),
    "trainer": {*BASE, "costs", "kernels", "metrics", "views"},
    "derive": {*BASE, "trainer", "views"},
    "replica": {*BASE, "kernels", "metrics"},
    "keeper": {"bucket", "core", "store", "trainer", "replica", "derive"},
    "engines": {*BASE, "kernels", "trainer", "replica", "api"},
    # the edge: EDGE says which names of these
    "fleet": {"errors", "store"},
    "foreign": {"errors", "store"},
    "doctor": {"errors", "store"},
    "dash": {"engines", "errors", "fleet", "store"},
    "cli": {"costs", "dash", "doctor", "engines", "errors", "fleet", "foreign", "store"},
    "errors": {"core"},
    # the public names, each imported on first use
    "__init__": {
        *("api", "bucket", "core", "costs", "derive", "engines", "errors", "keeper", "models", "replica", "trainer"),
    },
    "frameworks": {"__init__", "errors", "trl"},
    "trl": {"engines"},
    "__main__": {"cli"},
}
PUBLIC = {"deltawire", "deltawire.costs", "deltawire.errors", "deltawire.store"}
KIT = "deltawire.engines.live"
"""What engines are made of."""
EDGE: dict[str, set[str]] = {
    # room of the edge → what it imports besides names in `__all__` of PUBLIC: other rooms of the edge, and names in
    # `__all__` of other modules
    "deltawire.cli": {
        KIT,
        "deltawire.dash",
        "deltawire.doctor",
        "deltawire.engines.options",
        "deltawire.engines.server",
        "deltawire.engines.sglang",
        "deltawire.engines.threaded",
        "deltawire.engines.vllm",
        "deltawire.fleet",
        "deltawire.foreign",
    },
    "deltawire.dash": {KIT, "deltawire.engines.threaded", "deltawire.fleet"},
    "deltawire.doctor": set(),
    "deltawire.engines.http": set(),
    "deltawire.engines.server": {KIT, "deltawire.engines.http"},
    "deltawire.engines.sglang": {KIT},
    "deltawire.engines.trl": {KIT, "deltawire.engines.trl_worker"},
    "deltawire.engines.trl_worker": {KIT, "deltawire.engines.trl"},
    "deltawire.engines.vllm": {KIT},
    "deltawire.fleet": set(),
    "deltawire.foreign": set(),
    "deltawire.frameworks": {"deltawire.trl"},
    "deltawire.trl": {"deltawire.engines.trl"},
    "deltawire_wordle": {KIT, "deltawire.cli", "deltawire.dash", "deltawire.engines.http"},
}
BELOW_THE_EDGE = {*BASE, "api", "derive", "engines", "kernels", "keeper", "metrics", "replica", "trainer", "views"}
"""Rooms of which all modules that are not in EDGE know nothing of the edge."""
CORE_MAY_USE = {"blake3", "cryptography", "llvmlite", "msgspec", "numba", "numpy", "safetensors", "zstandard"}
EXTRAS = {
    "cryptography",
    "huggingface_hub",
    "peft",
    "ray",
    "sglang",
    "torch",
    "transformers",
    "triton",
    "trl",
    "verl",
    "vllm",
    "ml_dtypes",
}
# rooms that exist for an extra may import it at their top
OPTIONAL_ROOMS = {"kernels", "engines", "frameworks"}
# and so may modules that are loaded only for models that are torch's
OPTIONAL_FILES = {
    "trainer/adamw.py",
    "trainer/device.py",
    "trainer/partitioned.py",
    "trainer/shards.py",
    "replica/device.py",
    "replica/portions.py",
    "views/device.py",
}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def modules() -> Iterator[tuple[str, Path]]:
    """(room, file)"""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        yield (parts[0] if len(parts) > 1 else path.stem), path


FILES = [*modules()]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> list[tuple[str, bool]]:
    """Absolute names of everything a module imports, and whether that happens when the module itself is imported."""
    package = [*path.relative_to(SOURCE.parent).parts[:-1]]
    found = []
    nodes: list[tuple[ast.AST, bool]] = [(parsed(path), True)]
    while nodes:
        node, at_once = nodes.pop()
        match node:
            case ast.Import():
                found += [(alias.name, at_once) for alias in node.names]
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                stem = ".".join([*base, *([node.module] if node.module else [])])
                found += [(f"{stem}.{alias.name}", at_once) for alias in node.names]
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                at_once = False
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                at_once = False
        nodes += [(child, at_once) for child in ast.iter_child_nodes(node)]
    return found


def test_every_room_has_a_rule() -> None:
    assert {room for room, _ in FILES} <= ROOMS.keys()


def test_the_product_does_not_know_its_demonstration() -> None:
    """Only the table of commands names deltawire_wordle, as text: nothing of it is needed by anything else."""
    naming = {str(path.relative_to(SOURCE)) for _, path in FILES if "deltawire_wordle" in path.read_text()}
    assert naming == {"cli/__init__.py"}
    assert not [path for _, path in FILES for name, _ in imported(path) if name.startswith("deltawire_wordle")]


def test_no_class_name_stands_twice() -> None:
    names = Counter(node.name for _, path in FILES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_imports_point_one_way() -> None:
    wrong = []
    for room, path in FILES:
        if edge_room(dotted(path)) is not None:
            continue
        allowed = ROOMS[room] | {room}
        for name, _ in imported(path):
            first, _, rest = name.partition(".")
            target = rest.split(".")[0]
            # with underscores: the version of the package
            if name == "deltawire" and edge_room(dotted(path)) is None:
                wrong.append(f"{path.relative_to(SOURCE)} imports the public names, which are made of it")
            elif first == "deltawire" and target and not target.startswith("__") and target not in allowed:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}: {room} may use {sorted(allowed)}")
    assert not wrong, "\n".join(wrong)


@cache
def public_in(module: str) -> frozenset[str]:
    """The names in a module's `__all__`."""
    place = SOURCE.parent.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in parsed(path).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def edge_room(name: str) -> str | None:
    """The room of the edge that has this module or name."""
    return next((room for room in EDGE if f"{name}.".startswith(f"{room}.")), None)


def is_public(name: str, modules: set[str]) -> bool:
    """Whether a name is one that these modules or PUBLIC are for."""
    module, _, last = name.rpartition(".")
    if name in PUBLIC or module == "deltawire.errors":
        return not last.startswith("_")
    return last == "__version__" or (module in PUBLIC | modules and last in public_in(module))


def test_the_edge_imports_public_names_only() -> None:
    """So that somebody else could have written it."""
    kit, wrong = importlib.import_module(KIT), []
    for path in sorted(SOURCE.parent.rglob("*.py")):
        room = edge_room(dotted(path))
        for name, _ in imported(path) if room is not None else ():
            other = edge_room(name)
            near = other == room or (other in EDGE[room] and "._" not in name)
            if name.startswith("deltawire.") and not near and not is_public(name, EDGE[room]):
                wrong.append(f"{dotted(path)} imports {name}")
            # some names of the kit are modules
            elif name.startswith(f"{KIT}.") and isinstance(module := getattr(kit, name.rpartition(".")[2]), ModuleType):
                used = {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)
                        and ast.unparse(node.value) == name.rpartition(".")[2]}  # fmt: skip
                wrong += [f"{dotted(path)} uses {name}.{each}" for each in used - {*module.__all__}]
        # import deltawire as dw
        for node in ast.walk(parsed(path)) if room is not None else ():
            own = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dw", "deltawire")
            if own and node.attr not in (*deltawire.__all__, "__file__", "__version__"):
                wrong.append(f"{dotted(path)} uses {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_nothing_below_the_edge_knows_the_edge() -> None:
    assert not [
        f"{dotted(path)} imports {name}"
        for room, path in FILES
        if room in BELOW_THE_EDGE and edge_room(dotted(path)) is None
        for name, _ in imported(path)
        if edge_room(name) is not None
    ]


def test_third_parties_stay_in_their_rooms() -> None:
    wrong = []
    for room, path in FILES:
        where = str(path.relative_to(SOURCE))
        for name, at_once in imported(path):
            top = name.split(".")[0]
            own = top == "deltawire" or top in sys.stdlib_module_names
            if room == "core" and not own and top not in CORE_MAY_USE:
                wrong.append(f"{where} imports {name}: core may use {sorted(CORE_MAY_USE)}")
            if top == "obstore" and room != "store":
                wrong.append(f"{where} imports {name}: nobody but store/ talks to a storage SDK")
            if top in EXTRAS and at_once and where not in OPTIONAL_FILES and room not in OPTIONAL_ROOMS:
                wrong.append(f"{where} imports {name} for everybody")
            if top in ("pickle", "shelve", "marshal"):
                wrong.append(f"{where} imports {name}: nothing here is ever unpickled")
    assert not wrong, "\n".join(wrong)


def test_the_public_surface() -> None:
    """No larger than a reader can survey: add a name where a room of the edge needs one, and take it out with the last
    that does."""
    assert 50 < len(deltawire.__all__) < 70
    assert deltawire.__all__ == [*deltawire._HOMES]


def test_every_public_name_has_its_place_in_the_reference() -> None:
    hooks = (Path(__file__).parents[1] / "docs" / "site_hooks.py").read_text()
    for name in deltawire.__all__:
        shown = getattr(deltawire, name).__doc__ or ""
        # a line that is further in than the text
        assert re.search(r"\n\n {4,}\S", shown) or name == "errors", f"{name} has no example"
        assert f'"deltawire.{name}"' in hooks or name in ("DeltawireError", "errors"), name


def test_every_name_of_the_engines_kit_has_its_place_in_the_reference() -> None:
    hooks = (Path(__file__).parents[1] / "docs" / "site_hooks.py").read_text()
    kit = importlib.import_module(KIT)
    for name in kit.__all__:
        assert getattr(kit, name).__doc__, name
        home = getattr(kit, name)
        assert f'"{KIT}.{name}"' in hooks or f'"{getattr(home, "__name__", "")}"' in hooks, name


def test_all_is_sorted_and_true() -> None:
    for room, path in FILES:
        where = path.relative_to(SOURCE.parent)
        for node in parsed(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
                # as ruff sorts them: constants, classes, functions
                assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)), where
                assert len(names) == len(set(names)), where
                if room not in OPTIONAL_ROOMS:
                    module = importlib.import_module(".".join(where.with_suffix("").parts).removesuffix(".__init__"))
                    assert [name for name in names if not hasattr(module, name)] == [], where


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is not installed")

sys.meta_path.insert(0, Blocker())
"""


def run_without(names: set[str], code: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=sorted(names)) + code],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_everything_in_the_base_install_works_without_torch() -> None:
    core = [f"deltawire.core.{m.name}" for m in pkgutil.iter_modules([str(SOURCE / "core")])]
    other = [
        "deltawire",
        "deltawire.cli",
        "deltawire.store",
        "deltawire.trainer",
        "deltawire.replica",
    ]
    out = run_without(
        EXTRAS,
        f"""
import importlib
for name in {core + other!r}:
    importlib.import_module(name)
import deltawire as dw
from support import history, blank, same
from deltawire.store import ObjectStore
versions = history(3)
for encoding in ("raw", "packed"):
    assert same(dw.decode(dw.encode(versions[0], versions[1], encoding), versions[0]), versions[1])
store = ObjectStore.from_url("memory://without-torch")
with dw.Publisher(store) as publisher:
    for weights in versions:
        publisher.publish(weights).result(60)
live = blank(versions[0])
assert dw.Replica(store).sync(live) == 2
assert same(live, versions[2])
assert "torch" not in sys.modules
print("fine")
""",
    )
    assert out == "fine\n"


def test_a_reference_on_the_hub_says_which_extra_it_needs() -> None:
    out = run_without(
        EXTRAS,
        """
from deltawire.bucket.references import find_reference
from deltawire.core.errors import ReferenceUnavailable
try:
    find_reference("org/model", 0)
except ReferenceUnavailable as error:
    print(error)
""",
    )
    assert "[hub]'" in out


def test_importing_deltawire_imports_neither_torch_nor_numba() -> None:
    """Even where they are installed: a command line that answers at once must not wait for them."""
    out = subprocess.run(
        [sys.executable, "-c", "import sys, deltawire.cli; print({'numba', 'torch', 'vllm'} & {*sys.modules})"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert out.stdout == "set()\n"
