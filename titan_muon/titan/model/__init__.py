"""What happens to a TorchTitan model before it trains: its attention, its parallelization, its owned matrices."""
