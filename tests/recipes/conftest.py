"""Prepares TorchTitan for this machine before a test module imports it."""

from titan_muon.trainer.torchtitan import compat

compat.install()
