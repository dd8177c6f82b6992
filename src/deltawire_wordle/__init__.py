"""Reinforcement learning on Wordle: the game, an environment server, a small policy, and how well it plays."""
