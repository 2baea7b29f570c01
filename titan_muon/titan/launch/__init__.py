"""Start of a job's processes: environment, store, watchdog and lock of the run folder."""
