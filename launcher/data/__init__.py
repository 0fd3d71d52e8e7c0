"""What a job reads: samples, in which order, by whom."""
