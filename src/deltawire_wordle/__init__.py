"""Demonstrates deltawire: a small policy learns Wordle, sampled by rollout servers that follow its run."""
