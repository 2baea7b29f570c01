"""Changes of a TorchTitan model before training: attention, parallelization, owned matrices."""

from titan_muon.titan import compat

# torchtitan copies the device on import, and any module of this folder may be imported first.
compat.install()
