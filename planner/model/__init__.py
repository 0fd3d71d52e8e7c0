"""The model as the planner sees it: a graph, and the states in which it can be cut."""
