"""TorchTitan's train.py on a CPU, where its import needs a device and Triton's kernels."""

# Before torchtitan, whose modules copy the device.
import titan_muon.trainer  # noqa: F401, I001
from torchtitan.train import main

main()
