"""Runs derived from runs: follow one, and publish a view of each of its versions as another.

followed.py    a view of weights that move along deltas: only what changed is computed again
deriver.py     follow, publish, continue after a restart; compute a derived run again
"""

from __future__ import annotations
