"""The search for the fastest plan: candidates, bounds, first plans, and the integer linear programs that decide."""
