"""Changes of a TorchTitan model before training: attention, parallelization, owned matrices."""

from titan_muon.titan.torchtitan import compat

# torchtitan copies the device on import.
compat.install()
