"""What others published, under their own cost models: PipeDream's planner of 2019 and the dnn-partitioning objective."""
