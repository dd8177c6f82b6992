"""What engines are made of: the public names of what all of them share, imported on first use.

Every engine
    ServerOptions       what a server serves and follows; `ServerOptions.read()` in every process of an engine
    Follower            the thread that keeps weights of this process at a version of a run
    Bound               the versions that a request accepts, by its headers
    access              tokens, addresses and sockets
    control             routes, status and metrics about the follower
    fingerprint         a SHA-256 of weights by torch alone, to compare servers by
    names               headers, fields and states that clients see
    lacks_tokenizer     whether a checkpoint folder has no tokenizer

An engine with ranks, which adds a thin adapter to them: what its processes do for `Rank` and `Engine`
    Rank                in each worker: its part of the weights; takes messages between two steps
    Layer               a layer with a hook that rearranges its weights; with copy_of and without_data
    common_problems     reasons not to patch a model that all engines have
    Engine              what the HTTP server asks of the engine: calls to ranks, the swap, a pause, a name
    Answer              what ranks answer
    write_all, undo_all, salted     the swap on all ranks, and salts of the prefix cache
    Endpoint            in the HTTP server: the follower, its routes, metrics and versions of tokens
    observe, Record     versions of tokens, noted where outputs pass from the engine to its server
    Adapters, Loaded    versions of adapters beside the base weights: followed, loaded, lent to requests, dropped
    LoadingAdapter      in each worker: an adapter on its way into a rank
    Arrangement         the order, dtype and scale in which ranks copy an adapter's weights
    launch              `deltawire serve --engine …`: write a version to a folder, then start the engine
    ahead               a process beside the engine that compiles what it will need

vLLM and SGLang import nothing else of deltawire but its public names. The rooms behind these names:

placement   checkpoint coordinates → views of runtime storage, traced through the model's own loader
learn       what post-load hooks rearrange, learned by running them on copies
shard       one rank's weights through that map: read, write, take back, prove (device, _rows: on a GPU)
decode      a delta as seen from one rank in host memory
decoder     the process that decodes a delta once, for ranks on GPUs; moves: what it cuts for each of them
layout      all ranks together
guard       what makes patching wrong although bytes look right
rank        what one rank does, when told to
node        the ranks of one node, which share files and a decoder; other nodes are called over TCP
target      all ranks as one target of a replica: stage, swap, or reload
engine      what a target needs of the engine: calls to ranks, the swap between two steps, a pause, a name
swap        what the schedulers of all engines do in a swap; salts of the prefix cache
messages    what these processes ask of each other; channel: how it gets there; arrays: files in memory that they
            share; turns: threads that yield to a loop
follower    a replica and that target, in the HTTP server: pin, state, naming the version
adapters    versions of adapters beside the base weights: followed, loaded, lent to requests, dropped
arrangement their weights, made ready in the decoder's process for ranks to copy
endpoint    routes, metrics and the follower's thread; samples: versions on completions; tested: versions of engines
            that were run
launch      `deltawire serve --engine …`: write a version to a folder, then start the engine; supervise: wait for it;
            ahead: compile beside it what its processes will need, decoders with small_deltas
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...core.full import lacks_tokenizer
    from .. import access, control, names
    from ..bounds import Bound
    from ..fingerprint import fingerprint
    from ..follower import Follower
    from ..options import ServerOptions
    from . import ahead, launch
    from .adapter_worker import LoadingAdapter
    from .adapters import Adapters, Loaded
    from .arrangement import Arrangement
    from .channel import Answer
    from .endpoint import Endpoint
    from .engine import Engine
    from .guard import common_problems
    from .learn import Layer, copy_of, without_data
    from .rank import Rank
    from .samples import Record, observe
    from .swap import salted, undo_all, write_all

__all__ = [
    "Adapters",
    "Answer",
    "Arrangement",
    "Bound",
    "Endpoint",
    "Engine",
    "Follower",
    "Layer",
    "Loaded",
    "LoadingAdapter",
    "Rank",
    "Record",
    "ServerOptions",
    "access",
    "ahead",
    "common_problems",
    "control",
    "copy_of",
    "fingerprint",
    "lacks_tokenizer",
    "launch",
    "names",
    "observe",
    "salted",
    "undo_all",
    "without_data",
    "write_all",
]

_HOMES = {
    "Adapters": ".adapters",
    "Answer": ".channel",
    "Arrangement": ".arrangement",
    "Bound": "..bounds",
    "Endpoint": ".endpoint",
    "Engine": ".engine",
    "Follower": "..follower",
    "Layer": ".learn",
    "Loaded": ".adapters",
    "LoadingAdapter": ".adapter_worker",
    "Rank": ".rank",
    "Record": ".samples",
    "ServerOptions": "..options",
    "common_problems": ".guard",
    "copy_of": ".learn",
    "fingerprint": "..fingerprint",
    "lacks_tokenizer": "...core.full",
    "observe": ".samples",
    "salted": ".swap",
    "undo_all": ".swap",
    "without_data": ".learn",
    "write_all": ".swap",
}
_MODULES = {
    "access": "..access",
    "ahead": ".ahead",
    "control": "..control",
    "launch": ".launch",
    "names": "..names",
}


def __getattr__(name: str) -> Any:
    # on first use: some processes of an engine must not import numba before the engine has set itself up
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = import_module(_HOMES.get(name) or _MODULES[name], __name__)
    value = globals()[name] = home if name in _MODULES else getattr(home, name)
    return value
