"""Prepares TorchTitan for this machine before a test module imports it."""

from titan_muon.titan.torchtitan import compat

compat.install()
