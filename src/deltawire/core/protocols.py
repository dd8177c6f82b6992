"""Whether a value that somebody else wrote has all names of a protocol."""

from __future__ import annotations


def implements(protocol: type, value: object) -> bool:
    """Whether a value has all names of a protocol, by `hasattr`: one that passes calls on by __getattr__ has them too.

    Raises TypeError for what has some of them, more than one: a name is misspelled, for example.
    """
    names = [*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))]
    missing = [name for name in names if not hasattr(value, name)]
    if missing and len(names) - len(missing) > 1:
        raise TypeError(f"{type(value).__name__} is no {protocol.__name__}: it has no {' and no '.join(missing)}")
    return not missing
