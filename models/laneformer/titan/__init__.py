"""What TorchTitan needs of the Laneformer; the only part of the package that imports torchtitan."""
