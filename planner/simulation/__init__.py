"""Parts of the discrete-event simulation of a plan; :mod:`planner.simulation.simulate` is the entrance."""
