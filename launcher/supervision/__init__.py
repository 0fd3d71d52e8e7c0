"""Around the runtime: starting workers, watching them, telling failures, and what a run leaves behind."""
