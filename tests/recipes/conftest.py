"""Prepares TorchTitan for this machine before a test module imports it."""

import titan_muon.trainer  # noqa: F401
