"""Start of a job's processes: environment, shared store, watchdog and lock of the run folder."""
