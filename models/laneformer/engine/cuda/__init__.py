"""The decode engine on GPUs: one persistent kernel, and the same model as a graph of plain kernels."""
