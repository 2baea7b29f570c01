"""Start of a job's processes: environment, stores, watchdog and lock of the run folder."""
