"""The value types and files that the commands hand to one another.

Only the standard library is imported here, so that every other package can read and write
profiles, clusters and plans without paying for torch, networkx or pulp.
"""
