"""TorchTitan's train.py on a CPU, where its import needs a device and Triton's kernels."""

from titan_muon.trainer.torchtitan import compat

compat.install()

from torchtitan.train import main

main()
