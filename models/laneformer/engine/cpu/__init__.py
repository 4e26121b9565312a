"""The decode engine on CPUs: packed weights, and the C++ core that threads walk through."""
