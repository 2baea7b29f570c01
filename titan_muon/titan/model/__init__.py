"""What happens to a TorchTitan model before it trains: its attention, its parallelization, its owned matrices."""

from titan_muon.titan import compat

# torchtitan copies the device when it is imported, and any module of this folder may be the first that anyone imports.
compat.install()
