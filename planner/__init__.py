"""Pure Python planning: stages, replicas and placement over the hardware graph.

Nothing here imports torch, so a plan can be made on a laptop that has none.
"""
