"""The hardware as the planner sees it: a tree of places and links, and where clusters come from."""
