"""Parts of the discrete-event simulation of a plan; :mod:`planner.simulate` is the entrance."""
